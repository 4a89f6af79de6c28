"""Texts for `vecd check`, and their token ids as the gateway makes them.

Owns the built-in texts, how many texts a model can afford, what they are to a model of each kind, and the process that
tokenizes them: the tokenizers library can end a process by a panic.
"""

import asyncio
import itertools
import random
from array import array
from collections.abc import Sequence
from typing import Any, TextIO

from vecd.base.files import load
from vecd.client.bench.texts import Lengths, draw_text
from vecd.model.card import ModelCard, ModelError
from vecd.model.steps import TokenHead
from vecd.workers.batch import ReportProgress
from vecd.workers.check.order import is_query, pairs_of
from vecd.workers.process.ordered_process import OnFound, carry_out

MAX_TEXTS = 200
_AFFORDABLE = 5e11
"""Multiplications by weights for all texts together: about 10 s on a core."""
_LEAST_TOKENS = 500
_WORDS = (1, 8, 180, 3, 25, 400, 12, 50, 5, 100, 2, 35)
_AWKWARD = (
    "Ünïcödé, ﬁ ligatures and e\u0301 combining",
    "你好，世界。这是一个测试。",
    "🙂🙃 👩‍👩‍👧‍👦 🇪🇺",
    "https://example.org/a?b=c&d=%20#e f(x) = x**2; // 3.14159e-10",
    "   blanks \t and\n\nlines   ",
    "word" * 60,
)


def built_in_texts() -> list[str]:
    """Texts of 1 to 400 words, some unusual ones, and a long one; the same at every call."""
    rng = random.Random(0)
    return [*(draw_text(Lengths(count), rng) for count in _WORDS * 3), *_AWKWARD, draw_text(Lengths(1500), rng)]


def affordable(lengths: Sequence[int], num_parameters: int) -> int:
    """How many of the texts with these numbers of tokens, from the first on, a model of this size can afford."""
    most = max(_LEAST_TOKENS, int(_AFFORDABLE / max(1, num_parameters)))
    return max(1, sum(total <= most for total in itertools.accumulate(lengths[:MAX_TEXTS])))


def serve(orders: TextIO, response_fd: int) -> int:
    """The process: tokenizes the order's "texts" with the tokenizer of "card", cut to "max_tokens". It finds
    "sequences", "borders" and "kept", which are as in `Order`, and "num_truncated". Returns the exit code."""
    return carry_out(_tokenize, orders, response_fd, "vecd-check")


def _tokenize(order: dict[str, Any], report: ReportProgress, on_found: OnFound) -> None:
    from vecd.gateway.errors import ApiError
    from vecd.gateway.request import Pair, Role, Tokenizing
    from vecd.gateway.tokenization.tokenizer import Tokenizer

    card, texts = load(ModelCard, order["card"]), order["texts"]
    tokenizer = Tokenizer(card, order["max_tokens"], "model")
    inputs = [Pair(*pair) for pair in pairs_of(texts)] if "rerank" in card.capabilities else texts

    async def tokenized(inputs: Any, role: Role | None) -> list[Any]:
        return [item async for run in tokenizer.tokenize(inputs, Tokenizing(role=role)) for item in run]

    async def all_inputs() -> list[Any]:
        if card.tokens is None:
            return await tokenized(inputs, None)
        roles = [Role.QUERY if is_query(i) else Role.DOCUMENT for i in range(len(texts))]
        return [item for text, role in zip(texts, roles, strict=True) for item in await tokenized([text], role)]

    try:
        inputs = asyncio.run(all_inputs())
    except ApiError as error:
        raise ModelError(f"the texts cannot be tokenized: {error}") from error
    sequences = [array("i", item.token_ids).tolist() for item in inputs]
    largest = max(map(max, sequences))
    if largest >= card.vocab_size:
        raise ModelError(
            f"{card.weights_folder}: the tokenizer gives id {largest}, but config.json has a vocab_size of "
            f"{card.vocab_size}: they are of different models"
        )
    on_found("sequences", sequences)
    on_found("borders", [item.border for item in inputs])
    on_found("kept", [] if card.tokens is None else _kept(card.tokens, sequences))
    on_found("num_truncated", sum(item.is_truncated for item in inputs))


def _kept(head: TokenHead, sequences: Sequence[list[int]]) -> list[list[int]]:
    import numpy as np

    from vecd.gateway.encoding.result import DroppedTokens
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
