"""What a model for late interaction puts around queries and documents.

Owns how a `vecd.shm.heads.TokenHead` becomes a prompt, a marker, a limit and an expansion. Tokenizes nothing. Called by
`vecd.gateway.tokenization.tokenizer`.

    query     [CLS] [Q] q q q [SEP] [MASK] [MASK] [MASK]     filled up to `query_tokens`, if the model has an expansion
    document  [CLS] [D] d d d d d d d [SEP]                  at most `document_tokens` long

Sources: PyLate's `insert_prefix_token` and `tokenize`, which puts the marker behind the first token; Stanford ColBERT's
QueryTokenizer and DocTokenizer; `query_expansion` of sentence-transformers 6.
"""

from array import array
from typing import NamedTuple

import numpy as np

from vecd.gateway.tokenization.id_policy import SequenceTemplate
from vecd.gateway.tokenization.offsets import no_offsets
from vecd.gateway.types.request import Role, TokenizedInput
from vecd.shm.heads import TokenHead


class RoleTemplate(NamedTuple):
    """What is put around the texts of one role."""

    prompt: str | None
    """In place of the model's default; None: that one."""
    marker: list[int]
    """None or one, behind the first special token."""
    max_tokens: int | None
    """Longest sequence, all included; None: the model's limit."""
    num_filled: int = 0
    """A shorter sequence is filled up to so many tokens."""
    expansion_id: int = 0
    is_expansion_attended: bool = False

    def around(self, template: SequenceTemplate) -> SequenceTemplate:
        prefix = [*template.prefix[:1], *self.marker, *template.prefix[1:]]
        return SequenceTemplate(prefix, template.suffix)

    def filled(self, item: TokenizedInput, max_tokens: int) -> TokenizedInput:
        """The sequence with its expansion, together at most `max_tokens`."""
        num_added = min(max_tokens, self.num_filled) - item.num_tokens
        if num_added <= 0:
            return item
        offsets = item.offsets
        return item._replace(
            token_ids=item.token_ids + array("i", [self.expansion_id] * num_added).tobytes(),
            num_tokens=item.num_tokens + num_added,
            border=0 if self.is_expansion_attended else item.num_tokens,
            offsets=None if offsets is None else np.concatenate((offsets, no_offsets(num_added))),
        )


_PLAIN = RoleTemplate(None, [], None)


def role_templates(head: TokenHead | None) -> dict[Role, RoleTemplate]:
    """For the roles whose texts get something of their own, or have a limit."""
    if head is None:
        return {}
    limit, expansion_id = head.query_tokens, head.expansion_id
    if head.max_query_tokens is not None:
        limit = head.max_query_tokens and max(head.max_query_tokens, head.query_tokens)
    query = RoleTemplate(head.query_prompt or None, _marker(head.query_marker), limit or None)
    if expansion_id is not None:
        query = query._replace(
            num_filled=head.query_tokens,
            expansion_id=expansion_id,
            is_expansion_attended=head.attends_to_expansion,
        )
    document = RoleTemplate(head.document_prompt or None, _marker(head.document_marker), head.document_tokens or None)
    templates = {Role.QUERY: query, Role.DOCUMENT: document}
    return {role: template for role, template in templates.items() if template != _PLAIN}


def _marker(token_id: int | None) -> list[int]:
    return [] if token_id is None else [token_id]
