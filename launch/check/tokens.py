"""Texts for `vecd check`, and their token ids as the gateway makes them.

Owns the built-in texts, how many texts a model can afford, and the process that tokenizes them: the tokenizers library
can end a process by a panic. Called by `vecd.launch.check.command`, and by `vecd.launch.child` (serve).
"""

import asyncio
import json
import random
from array import array
from collections.abc import Sequence
from typing import Any, TextIO

from vecd.client.bench.texts import Lengths, draw_text
from vecd.shm.card import ModelCard, ModelError
from vecd.workers.process.kernel import die_with_parent, leave_no_core, set_process_name

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
    """How many of the texts with these numbers of tokens, from the first on, can be compared with a model of this size;
    at least 1."""
    most = max(_LEAST_TOKENS, int(_AFFORDABLE / max(1, num_parameters)))
    total = 0
    for count, length in enumerate(lengths):
        total += length
        if count >= MAX_TEXTS or (count and total > most):
            return count
    return len(lengths)


def serve(orders: TextIO, response_fd: int) -> int:
    """One order: {"parent_pid", "card", "max_tokens", "texts"}; responses as of `vecd.workers.check.run`."""
    order: dict[str, Any] = json.loads(orders.read() or "{}")
    if not order or not die_with_parent(order["parent_pid"]):
        return 0
    set_process_name("vecd-check")
    leave_no_core()
    with open(response_fd, "w") as responses:
        try:
            found = asyncio.run(_tokenize(ModelCard.from_json(order["card"]), order["max_tokens"], order["texts"]))
            print(json.dumps({"found": "tokens", "value": found}), json.dumps({"end": True}), sep="\n", file=responses)
        except ModelError as error:
            print(json.dumps({"error": str(error)}), file=responses)
    return 0


async def _tokenize(card: ModelCard, max_tokens: int, texts: list[str]) -> dict[str, Any]:
    from vecd.gateway.tokenization.tokenizer import Tokenizer
    from vecd.gateway.types.errors import ApiError

    try:
        inputs = [item async for run in Tokenizer(card, max_tokens, "model").tokenize(texts) for item in run]
    except ApiError as error:
        raise ModelError(f"the texts cannot be tokenized: {error}") from error
    sequences = [array("i", item.token_ids).tolist() for item in inputs]
    largest = max(map(max, sequences))
    if largest >= card.vocab_size:
        raise ModelError(
            f"{card.weights_folder}: the tokenizer gives id {largest}, but config.json has a vocab_size of "
            f"{card.vocab_size}: they are of different models"
        )
    return {"sequences": sequences, "num_truncated": sum(item.is_truncated for item in inputs)}
