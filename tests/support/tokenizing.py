"""Inputs to sequences and their token ids, for tests of tokenizers."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import strategies as st

from vecd.gateway.request import TokenizedInput, Tokenizing
from vecd.gateway.tokenization.tokenizer import PLAIN, Tokenizer

WORDS = ["a", "fox", "1234.5", "中文", "naïve", "😀", "<|im_end|>", "\n", ","]
"""Parts of texts that tokenizers take apart in different ways."""


def tokenize(tokenizer: Tokenizer, inputs: Any, how: Tokenizing = PLAIN) -> list[TokenizedInput]:
    """In runs, and at once if that is possible, which gives the same."""

    async def main() -> list[TokenizedInput]:
        return [item async for run in tokenizer.tokenize(inputs, how) for item in run]

    together = asyncio.run(main())
    for _ in range(2):  # the second time with what was learned in the first
        assert tokenizer.tokenize_now(inputs, how) in (None, together)
    return together


@contextmanager
def library_calls(tokenizer: Tokenizer) -> Iterator[list[Any]]:
    """The calls of the library, whose first argument are texts."""
    with mock.patch.object(tokenizer.texts, "ids", wraps=tokenizer.texts.ids) as ids:
        yield ids.call_args_list


def ids_of(item: TokenizedInput) -> list[int]:
    ids: list[int] = np.frombuffer(item.token_ids, "<i4").tolist()
    return ids


def texts_of(words: list[str], *, min_size: int = 0) -> st.SearchStrategy[str]:
    """Texts of these words, and any other."""
    return st.one_of(
        st.lists(st.sampled_from(words), min_size=min_size, max_size=30).map(" ".join),
        st.text(st.characters(exclude_categories=["Cs"]), min_size=min_size, max_size=40),
    )


def common_end(ids_with: Callable[[str], list[int]]) -> list[int]:
    """As sentence-transformers finds the end of a template that it puts back: in the ids of two renderings."""
    first, second = ids_with("0"), ids_with("1 2 3 4")
    num = next(n for n in range(len(first)) if first[len(first) - n - 1] != second[len(second) - n - 1])
    return first[len(first) - num :]
