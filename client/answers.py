"""What a load generator wants to know of an answer, for little CPU.

Owns the reading of OpenAI-shaped embedding answers and their shortcuts: an answer is parsed whole only when
its bytes leave a doubt. Opens no socket. Called by `client.load`.
"""

import re
from typing import Any, NamedTuple

import orjson

from client.connection import Answer, BadAnswer

_TOTAL_TOKENS = re.compile(rb'"total_tokens"\s*:\s*(\d+)')
# `usage` is the last field of every server seen, and this is more than any of them writes there.
_TAIL_BYTES = 256


class Receipt(NamedTuple):
    """What a good answer brought."""

    num_embeddings: int
    num_tokens: int


def read_answer(answer: Answer, num_texts: int) -> Receipt:
    """Check that `answer` has an embedding for each of `num_texts`, and count its tokens.

    Raises BadAnswer when it has not. The status is the caller's to look at.
    """
    body = answer.body
    usage = _TOTAL_TOKENS.search(body, max(0, len(body) - _TAIL_BYTES))
    # Once per item, and in nothing else: no value of such an answer can hold a quote followed by a colon.
    if usage is not None and body.count(b'"embedding":') == num_texts:
        return Receipt(num_texts, int(usage[1]))
    return _parse_answer(body, num_texts)


def _parse_answer(body: bytes, num_texts: int) -> Receipt:
    """The same, by parsing the whole answer; for servers that write it in another order or spacing."""
    try:
        fields: dict[str, Any] = orjson.loads(body)
        vectors = [item["embedding"] for item in fields["data"]]
        num_tokens = int((fields.get("usage") or {}).get("total_tokens", 0))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise BadAnswer("not an OpenAI-shaped list of embeddings") from error
    if len(vectors) != num_texts or not all(vectors):
        raise BadAnswer(f"{len(vectors)} embeddings for {num_texts} texts")
    return Receipt(num_texts, num_tokens)
