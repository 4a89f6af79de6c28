"""The token ids of texts before there is a gateway, for the check of a reranker's order and for `vecd check`.

Owns the process that makes them with the gateway's tokenizer: the tokenizers library can end a process by a panic, and
the supervisor keeps none of its memory.
"""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from vecd.base.files import JsonObject, dump, load
from vecd.model.card import ModelCard, ModelError
from vecd.model.steps import TokenHead
from vecd.shm.job import Report, run_job
from vecd.workers.check.order import is_query, pairs_of

# A query with an answer, and with a text about something else: by them a reranker's order is checked.
#
# A model that gets its pairs through a template ranks without an error, and at random, if the template is not its own.
# The check itself is in `vecd.workers.select`, behind the selection of an engine, where a model can still be refused.
QUERY = "What is the capital of France?"
ANSWER = "Paris is the capital and the largest city of France."
OTHER = "To bake bread, mix flour, water, salt and yeast, and let the dough rest for an hour."
_TIMEOUT_S = 120.0
"""Reading the tokenizer of a large vocabulary takes seconds on a busy machine."""


def ordered_pair(card: ModelCard, max_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """None for a model without a template. Raises ModelError when it cannot be tokenized."""
    if card.score is None or card.score.pair_template is None or "rerank" not in card.capabilities:
        return None
    found = tokenize(card, max_tokens, [QUERY, ANSWER, OTHER], _TIMEOUT_S, lambda stage: None)
    _, better, worse = map(tuple, found["sequences"])
    return better, worse


def tokenize(
    card: ModelCard, max_tokens: int, texts: Sequence[str], timeout_s: float, report: Callable[[str], None]
) -> JsonObject:
    """What `work` finds of texts, which are pairs with the first one to a reranker. Raises ModelError."""
    title = f"{card.folder}: the process that tokenizes texts"
    order = {"card": dump(card), "max_tokens": max_tokens, "texts": texts}
    return dict(run_job("tokenize", title, report, timeout_s, **order))


def work(report: Report, card: JsonObject, max_tokens: int, texts: Sequence[str]) -> JsonObject:
    """The job "tokenize": the tokens of texts, cut to `max_tokens`. It finds "sequences", "borders" and "kept", which
    are as in `Order`, and "num_truncated"."""
    from vecd.gateway.errors import ApiError
    from vecd.gateway.request import Pair, Role, Tokenizing
    from vecd.gateway.tokenization.tokenizer import Tokenizer

    loaded = load(ModelCard, card)
    report("reading the tokenizer")
    tokenizer = Tokenizer(loaded, max_tokens, "model")
    report("tokenizing")
    inputs = [Pair(*pair) for pair in pairs_of(texts)] if "rerank" in loaded.capabilities else texts

    async def tokenized(inputs: Any, role: Role | None) -> list[Any]:
        return [item async for run in tokenizer.tokenize(inputs, Tokenizing(role=role)) for item in run]

    async def all_inputs() -> list[Any]:
        if loaded.tokens is None:
            return await tokenized(inputs, None)
        roles = [Role.QUERY if is_query(i) else Role.DOCUMENT for i in range(len(texts))]
        return [item for text, role in zip(texts, roles, strict=True) for item in await tokenized([text], role)]

    try:
        found = asyncio.run(all_inputs())
    except ApiError as error:
        raise ModelError(f"{loaded.folder}: the texts cannot be tokenized: {error}") from error
    sequences = [array("i", item.token_ids).tolist() for item in found]
    largest = max(map(max, sequences))
    if largest >= loaded.vocab_size:
        raise ModelError(
            f"{loaded.weights_folder}: the tokenizer gives id {largest}, but config.json has a vocab_size of "
            f"{loaded.vocab_size}: they are of different models"
        )
    return {
        "sequences": sequences,
        "borders": [item.border for item in found],
        "kept": [] if loaded.tokens is None else _kept(loaded.tokens, sequences),
        "num_truncated": sum(item.is_truncated for item in found),
    }


def _kept(head: TokenHead, sequences: Sequence[list[int]]) -> list[list[int]]:
    import numpy as np

    from vecd.gateway.encoding.streams import DroppedTokens
    from vecd.gateway.request import EmbedRequest, Role, Tokenizing

    kept = []
    for index, ids in enumerate(sequences):
        role = Role.QUERY if is_query(index) else Role.DOCUMENT
        token_ids = np.array(ids, dtype=np.int32)
        places = np.arange(token_ids.size, dtype=np.float32)[:, None]
        dropped = DroppedTokens(
            head, EmbedRequest([""], tokenizing=Tokenizing(role=role)), [token_ids], drops_first=False
        )
        kept.append(dropped.without(0, places)[:, 0].astype(int).tolist())
    return kept
