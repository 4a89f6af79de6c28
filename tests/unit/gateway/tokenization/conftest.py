"""Tokenizers of the bundled model's card, with tiny vocabularies in place of its own."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tokenizers

from vecd.gateway.tokenization import text_tokens
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.model.card import ModelCard, read_card


@pytest.fixture
def card_of(minilm_folder: Path, tmp_path: Path) -> Callable[..., ModelCard]:
    """Makes the card with another tokenizer, and changes of it."""

    def make(library: tokenizers.Tokenizer, **changes: Any) -> ModelCard:
        library.save(str(tmp_path / "tokenizer.json"))
        return replace(read_card(minilm_folder), tokenizer_file=str(tmp_path / "tokenizer.json"), **changes)

    return make


@pytest.fixture
def make_tokenizer() -> Iterator[Callable[..., Tokenizer]]:
    """Makes the tokenizer of a card. Its threads end with the test."""
    made: list[Tokenizer] = []

    def make(card: ModelCard, max_tokens: int, **options: Any) -> Tokenizer:
        made.append(Tokenizer(card, max_tokens, "auto", **options))
        return made[-1]

    yield make
    for tokenizer in made:
        tokenizer.threads.close()


@pytest.fixture
def small_pieces() -> Iterator[None]:
    """Texts of any length are tokenized in several pieces."""
    with mock.patch.multiple(
        text_tokens, PIECE_CHARS=40, LEAST_PIECE_CHARS=5, SEARCH_CHARS=20, CHARS_PER_EXPECTED_TOKEN=2
    ):
        yield
