"""Texts to token ids, as the gateway makes them, in a process of its own for `vecd check`.

Owns that process. It loads the model's tokenizer, whose library can end a process by a panic. Called by
`vecd.launch.child`; the other end is `vecd.launch.check.children`.
"""

import asyncio
import json
from array import array
from typing import Any, TextIO

from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.gateway.types.errors import ApiError
from vecd.gateway.types.request import TokenizedInput
from vecd.shm.card import ModelCard, ModelError
from vecd.workers.process.kernel import die_with_parent, leave_no_core, set_process_name


def serve(orders: TextIO, answer_fd: int) -> int:
    """One order: {"parent_pid", "do", "card", "max_tokens", "texts"}; one answer, as `vecd.workers.check.orders` gives
    them."""
    order: dict[str, Any] = json.loads(orders.readline() or "{}")
    if not order or not die_with_parent(order["parent_pid"]):
        return 0
    set_process_name("vecd-check")
    leave_no_core()
    with open(answer_fd, "w") as answers:
        try:
            answer: dict[str, Any] = {"result": asyncio.run(_tokenize(order))}
        except ModelError as error:
            answer = {"error": str(error)}
        except ApiError as error:
            answer = {"error": f"the texts cannot be tokenized: {error}"}
        print(json.dumps(answer), file=answers)
    return 0


async def _tokenize(order: dict[str, Any]) -> dict[str, Any]:
    card = ModelCard.from_json(order["card"])
    tokenizer = Tokenizer(card, order["max_tokens"], "model")
    sequences: list[TokenizedInput] = []
    async for run in tokenizer.tokenize(order["texts"]):
        sequences += run
    ids = [array("i", item.token_ids).tolist() for item in sequences]
    largest = max(map(max, ids))
    if largest >= card.vocab_size:
        raise ModelError(
            f"{card.weights_folder}: the tokenizer gives id {largest}, but config.json has a vocab_size of "
            f"{card.vocab_size}: they are of different models"
        )
    return {"sequences": ids, "num_truncated": sum(item.is_truncated for item in sequences)}
