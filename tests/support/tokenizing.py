"""The gateway's tokenizers with the rules of tiny ones, the texts that they are tried with, and the ids they give."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tokenizers
from hypothesis import strategies as st

from tests.support import tiny_tokenizers
from vecd.gateway.tokenization.tokenizer import PLAIN, Tokenizer
from vecd.gateway.types.request import Pair, TokenizedInput, Tokenizing
from vecd.shm.card import ModelCard

KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "bert": tiny_tokenizers.bert,
    "roberta": tiny_tokenizers.roberta,
    "xlm_roberta": tiny_tokenizers.xlm_roberta,
    "qwen": tiny_tokenizers.qwen,
    "gemma": tiny_tokenizers.gemma,
}

MakeTokenizer: TypeAlias = Callable[..., Tokenizer]


@contextmanager
def making_tokenizers(card: ModelCard, folder: Path) -> Iterator[MakeTokenizer]:
    """A function that makes tokenizers, which are closed at the end. It takes that of the library, which it saves in
    `folder`, the most tokens, changes of `card`, and options of `Tokenizer`."""
    made: list[Tokenizer] = []

    def make(
        library: tokenizers.Tokenizer, max_tokens: int = 64, changes: dict[str, Any] | None = None, **options: Any
    ) -> Tokenizer:
        library.save(str(folder / "tokenizer.json"))
        changed = replace(card, tokenizer_file=str(folder / "tokenizer.json"), **(changes or {}))
        made.append(Tokenizer(changed, max_tokens, "auto", **options))
        return made[-1]

    try:
        yield make
    finally:
        for tokenizer in made:
            tokenizer.threads.close()


def texts_with(words: Sequence[str], min_size: int = 0) -> st.SearchStrategy[str]:
    """Texts of `words` and blanks, and of any characters."""
    return st.one_of(
        st.lists(st.sampled_from(words), min_size=min_size, max_size=30).map(" ".join),
        st.text(st.characters(exclude_categories=["Cs"]), min_size=min_size, max_size=40),
    )


def tokenize(tokenizer: Tokenizer, inputs: list[str] | list[Pair], how: Tokenizing = PLAIN) -> list[TokenizedInput]:
    """In runs, and at once if that is possible, which gives the same."""

    async def main() -> list[TokenizedInput]:
        return [item async for run in tokenizer.tokenize(inputs, how) for item in run]

    together = asyncio.run(main())
    for _ in range(2):  # known words are not remembered past their role
        assert tokenizer.tokenize_now(inputs, how) in (None, together)
    return together


def ids(item: TokenizedInput) -> list[int]:
    found: list[int] = np.frombuffer(item.token_ids, "<i4").tolist()
    return found
