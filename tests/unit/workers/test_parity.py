"""The comparison itself, and the probes; what is done with it is tested in test_selection."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer, processors

from tests.support import tiny_tokenizers
from tests.support.checkpoints import Checkpoints
from vecd.model.card import ModelCard, read_card
from vecd.model.steps import ScoreHead
from vecd.workers.dummy import DummyEngine
from vecd.workers.parity import (
    all_probes,
    compare,
    random_batch,
    short_probes,
    special_tokens,
    vectors_of,
    vectors_one_by_one,
)

PLAIN = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)


def card(max_tokens: int = 256, vocab_size: int = 100) -> ModelCard:
    return ModelCard("", "", "bert", 8, 8, max_tokens, vocab_size, ("mean",), (), False, "")


def changed(rows: int | tuple[int, int], value: Any) -> NDArray[np.float32]:
    vectors = PLAIN.copy()
    vectors[rows] = value
    return vectors


@pytest.mark.parametrize(
    ("ours", "theirs", "float32", "bfloat16"),
    [
        (PLAIN, PLAIN, True, True),
        (changed(2, 0), changed(2, 0), True, True),
        (changed(2, 0), PLAIN, False, False),
        (changed((0, 0), PLAIN[0, 0] + 5e-4), PLAIN, False, True),
        (changed(4, PLAIN[4][::-1]), PLAIN, False, False),
        # The bound grows with vectors that are not normalized.
        (PLAIN * 1000 + np.float32(1e-3), PLAIN * 1000, True, True),
        (PLAIN * 1000 + np.float32(1e-1), PLAIN * 1000, False, True),
    ],
)
def test_float32_is_held_to_a_difference_and_less_to_the_angles_of_all_rows(
    ours: NDArray[np.float32], theirs: NDArray[np.float32], float32: bool, bfloat16: bool
) -> None:
    parity = compare(ours, theirs)
    assert (parity.is_within_bounds("float32"), parity.is_within_bounds("bfloat16")) == (float32, bfloat16)
    if ours is theirs:
        assert parity.max_abs_diff == 0
        assert parity.min_cosine == pytest.approx(1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_vector_that_is_not_finite_disagrees(dtype: str, value: float) -> None:
    broken = PLAIN.copy()
    broken[3, 2] = value
    for ours, theirs in ((broken, PLAIN), (PLAIN, broken), (broken, broken)):
        assert not compare(ours, theirs).is_within_bounds(dtype)


@pytest.mark.parametrize(
    ("max_tokens", "num_parameters", "longest"),
    [
        (1, 10**6, 1),
        (60, 10**6, 60),
        (8192, 25 * 10**7, 2000),
        (8192, 10**10, 256),
    ],
)
def test_probes_reach_from_one_token_to_the_longest_that_is_affordable(
    max_tokens: int, num_parameters: int, longest: int
) -> None:
    batch = all_probes(card(max_tokens), num_parameters)
    assert batch.lengths.min() == 1
    assert batch.lengths.max() == longest
    assert batch.token_ids.size == batch.lengths.sum()
    assert 0 <= batch.token_ids.min() <= batch.token_ids.max() < 100
    assert np.array_equal(batch.token_ids, all_probes(card(max_tokens), num_parameters).token_ids)


@pytest.mark.parametrize("max_tokens", [1, 512])
def test_the_short_probes_are_the_first_of_all(max_tokens: int) -> None:
    short, every = short_probes(card(max_tokens)), all_probes(card(max_tokens), 10**6)
    assert np.array_equal(short.lengths, every.lengths[: short.lengths.size])
    assert np.array_equal(short.token_ids, every.token_ids[: short.token_ids.size])
    assert short.lengths.max() <= 55


def test_one_by_one_is_in_the_order_of_the_batch() -> None:
    batch = short_probes(card())
    engine = DummyEngine(card())
    assert np.array_equal(vectors_one_by_one(engine, batch, 8), vectors_of(engine, batch, 8))


# --- special tokens, against the tokenizers library -----------------------------------------------------------------


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
def classifier(checkpoint: Checkpoints, tmp_path: Path) -> ModelCard:
    file, score = str(tmp_path / "tokenizer.json"), ScoreHead(("a",), "sigmoid", "cls")
    card = replace(read_card(checkpoint("bert")), tokenizer_file=file, vocab_size=1000, score=score)
    return replace(card, capabilities=("classify",))


@pytest.mark.parametrize(
    "make",
    [
        tiny_tokenizers.bert,
        tiny_tokenizers.roberta,
        tiny_tokenizers.qwen,
        lambda: byte_level_first(tiny_tokenizers.roberta()),
        language_behind,
    ],
)
def test_they_are_the_tokenizer_s_own(make: Callable[[], Tokenizer], classifier: ModelCard) -> None:
    tokenizer = make()
    tokenizer.save(classifier.tokenizer_file)
    before, behind = special_tokens(classifier)
    whole, bare = tokenizer.encode("fox").ids, tokenizer.encode("fox", add_special_tokens=False).ids
    assert [*before, *bare, *behind] == whole
    assert special_tokens(replace(classifier, score=None)) == ((), ()), (
        "a model for vectors has no head that reads them"
    )


_OUTSIDE = {"type": "BertProcessing", "sep": ["[SEP]", 1000], "cls": ["[CLS]", 1]}


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"post_processor": null, "model": {}}', json.dumps({"post_processor": _OUTSIDE})],
)
def test_a_file_without_a_template_of_known_tokens_has_none(content: str, classifier: ModelCard) -> None:
    Path(classifier.tokenizer_file).write_text(content)
    assert special_tokens(classifier) == special_tokens(replace(classifier, tokenizer_file="")) == ((), ())


def test_probes_are_between_them(classifier: ModelCard) -> None:
    language_behind().save(classifier.tokenizer_file)
    batch = random_batch(classifier, (5, 1, 400))
    assert batch.lengths.tolist() == [5, 3, classifier.max_tokens]
    for ids in np.split(batch.token_ids, np.cumsum(batch.lengths)[:-1]):
        assert ids[-2:].tolist() == [3, 4]
        assert not np.isin(ids[:-2], (3, 4)).any()
    first = random_batch(classifier, (5, 1))
    assert np.array_equal(batch.token_ids[: first.token_ids.size], first.token_ids), "short probes come first"
