"""The special tokens that a tokenizer's file says, against the tokenizers library itself."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from tests.support import tiny_tokenizers
from vecd.shm.card import ModelCard, read_card
from vecd.shm.heads import ScoreHead
from vecd.workers.engines.parity import random_batch
from vecd.workers.special_tokens import special_tokens


def byte_level_first(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), tokenizer.post_processor])
    return tokenizer


def language_behind() -> Tokenizer:
    """As mBART's: nothing before a text, two tokens behind it."""
    tokenizer = tiny_tokenizers.bert()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A [SEP] [MASK]", pair="$A $B [SEP] [MASK]", special_tokens=[("[SEP]", 3), ("[MASK]", 4)]
    )
    return tokenizer


@pytest.fixture
def card(checkpoint: Callable[..., Path], tmp_path: Path) -> ModelCard:
    file, score = str(tmp_path / "tokenizer.json"), ScoreHead(("a",), "sigmoid", "cls")
    card = replace(read_card(checkpoint("bert")), tokenizer_file=file, vocab_size=1000, score=score)
    return replace(card, capabilities=("classify",))


@pytest.mark.parametrize(
    "make",
    [
        tiny_tokenizers.bert,
        tiny_tokenizers.roberta,
        tiny_tokenizers.xlm_roberta,
        tiny_tokenizers.qwen,
        tiny_tokenizers.gemma,
        lambda: byte_level_first(tiny_tokenizers.roberta()),
        language_behind,
    ],
)
def test_they_are_the_tokenizer_s_own(make: Callable[[], Tokenizer], card: ModelCard) -> None:
    tokenizer = make()
    tokenizer.save(card.tokenizer_file)
    before, behind = special_tokens(card)
    whole, bare = tokenizer.encode("fox").ids, tokenizer.encode("fox", add_special_tokens=False).ids
    assert [*before, *bare, *behind] == whole


@pytest.mark.parametrize("content", ["", "{", "[]", '{"post_processor":', '{"post_processor": null, "model": {}}'])
def test_a_file_without_a_template_has_none(content: str, card: ModelCard) -> None:
    Path(card.tokenizer_file).write_text(content)
    assert special_tokens(card) == special_tokens(replace(card, tokenizer_file="")) == ((), ())


def test_a_model_for_vectors_has_no_head_that_reads_them(card: ModelCard) -> None:
    tiny_tokenizers.bert().save(card.tokenizer_file)
    assert special_tokens(card) != special_tokens(replace(card, score=None)) == ((), ())


def test_a_token_outside_the_vocabulary_is_not_used(card: ModelCard) -> None:
    processor = {"type": "BertProcessing", "sep": ["[SEP]", 1000], "cls": ["[CLS]", 1]}
    Path(card.tokenizer_file).write_text(json.dumps({"post_processor": processor}))
    assert special_tokens(card) == ((), ())


def test_probes_are_between_them(card: ModelCard) -> None:
    language_behind().save(card.tokenizer_file)
    batch = random_batch(card, (5, 1, 400))
    assert batch.lengths.tolist() == [5, 3, card.max_tokens]
    for ids in np.split(batch.token_ids, np.cumsum(batch.lengths)[:-1]):
        assert ids[-2:].tolist() == [3, 4]
        assert not np.isin(ids[:-2], (3, 4)).any()
    first = random_batch(card, (5, 1))
    assert np.array_equal(batch.token_ids[: first.token_ids.size], first.token_ids), "short probes come first"
