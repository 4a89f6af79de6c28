"""Inputs to sequences and their token ids, for tests of tokenizers."""

import asyncio

import numpy as np

from vecd.gateway.tokenization.tokenizer import PLAIN, Tokenizer
from vecd.gateway.types.request import Inputs, TokenizedInput, Tokenizing


def tokenize(tokenizer: Tokenizer, inputs: Inputs, how: Tokenizing = PLAIN) -> list[TokenizedInput]:
    """In runs, and at once if that is possible, which gives the same."""

    async def main() -> list[TokenizedInput]:
        return [item async for run in tokenizer.tokenize(inputs, how) for item in run]

    together = asyncio.run(main())
    assert tokenizer.tokenize_now(inputs, how) in (None, together)
    return together


def ids_of(item: TokenizedInput) -> list[int]:
    ids: list[int] = np.frombuffer(item.token_ids, "<i4").tolist()
    return ids
