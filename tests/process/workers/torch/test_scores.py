"""Logits of classifiers and cross-encoders on every path, against transformers' classes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.support.checkpoints import (
    FLOATS_OF_FUSED,
    VOCAB_SIZE,
    assert_same_vectors,
    change_weights,
    embed,
    engine_of,
    worker_config,
)
from tests.support.score_checkpoints import logits_of, save_classifier
from vecd.model.card import ModelError, read_card
from vecd.shm.output import Output
from vecd.workers.batch import PackedBatch, arrange
from vecd.workers.description import NotDescribed
from vecd.workers.onnx import engine as lean_engine
from vecd.workers.parity import compare, random_batch, vectors_one_by_one
from vecd.workers.select import select
from vecd.workers.torch.fused import load_fused

LENGTHS = [5, 1, 30, 60, 7, 5, 2, 1, 12, 12, 59]
BERTS = ["bert", "electra", "roberta", "xlm-roberta", "camembert", "distilbert", "mpnet", "modernbert"]
CAUSAL = ["qwen2", "qwen3", "mistral", "llama", "gemma3_text"]
LEAN = [*BERTS, "nomic_bert", "gte", "qwen2", "qwen3", "mistral", "gemma3_text"]
FUSED = [*BERTS, "qwen2", "qwen3", "mistral"]
PADDED = [*BERTS, *CAUSAL, "albert", "nomic_bert", "gte", "gemma2", "deberta-v2", "deberta"]
PACKED = [family for family in PADDED if family not in ("mpnet", "gemma2", "deberta-v2", "deberta")]
"""The attention of the others is their own, or takes what the packed one does not."""


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def make(family: str, **arguments: Any) -> Path:
        key = f"{family}{sorted(arguments.items())}"
        if key not in made:
            made[key] = save_classifier(tmp_path_factory.mktemp(family), family, **arguments)
        return made[key]

    return make


def pairs(output: Output = Output.SCORES) -> PackedBatch:
    """Sequences of which some are pairs."""
    token_ids = np.random.default_rng(1).integers(2, VOCAB_SIZE, sum(LENGTHS), dtype=np.int32)
    lengths = np.array(LENGTHS, dtype=np.int32)
    borders = np.where(lengths > 4, lengths // 3, 0).astype(np.int32)
    borders[-1] = 0
    return PackedBatch(lengths, token_ids, np.full(lengths.size, output, dtype=np.uint8), borders)


def scores(folder: Path, path: str, batch: PackedBatch, dtype: str = "float32") -> NDArray[np.float32]:
    return embed(engine_of(folder, path, dtype), batch, read_card(folder).row_dim)


@cache
def expected_of(folder: Path) -> NDArray[np.float32]:
    return logits_of(folder, pairs())


PATHS = ["lean", "fused", "packed", "padded"]
TYPICAL = {"bert", "roberta", "distilbert", "mpnet", "modernbert", "qwen3", "gemma3_text", "deberta"}
"""One of each kind of positions, attention, norms and heads. The others are in the full runs."""


def cases(path: str, families: Sequence[str], *more: object) -> list[Any]:
    """Of a path and each of these families."""
    return [
        pytest.param(path, family, *more, marks=[] if family in TYPICAL else pytest.mark.full) for family in families
    ]


@pytest.mark.parametrize(
    ("path", "family", "num_labels"),
    [
        *(case for path, of in zip(PATHS, (LEAN, FUSED, PACKED, PADDED), strict=True) for case in cases(path, of, 2)),
        *((path, "bert", count) for path in PATHS for count in (1, 3)),
    ],
)
def test_the_logits_of_pairs_are_those_of_transformers(path, family, num_labels, classifier):
    folder = classifier(family, labels=num_labels)
    engine, expected = engine_of(folder, path), expected_of(folder)
    assert expected.shape == (len(LENGTHS), num_labels)
    assert_same_vectors(embed(engine, pairs(), num_labels), expected)
    assert_same_vectors(vectors_one_by_one(engine, pairs(), num_labels), expected)
    assert np.ptp(expected, axis=0).min() > 0.01, "a head that gives every sequence the same shows nothing"


@pytest.mark.parametrize("family", ["bert", "modernbert"])  # with the norms behind each half of a layer, and before
def test_the_last_layer_is_computed_for_the_tokens_that_are_read(family, classifier):
    def num_states(**arguments: Any) -> int:
        card = read_card(classifier(family, **arguments))
        with torch.inference_mode():
            return len(load_fused(card, "float32")(arrange(pairs())))

    settings = {"classifier_pooling": "cls"} if family == "modernbert" else {}
    assert num_states(**settings) == len(LENGTHS)
    assert num_states(is_of_tokens=True) == sum(LENGTHS)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "settings",
    [
        {"classifier_pooling": "cls"},
        {"classifier_pooling": "mean"},
        {"classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True, "classifier_activation": "silu"},
    ],
)
def test_modernbert_pools_and_computes_as_its_settings_say(settings, path, classifier):
    folder = classifier("modernbert", labels=3, **settings)
    assert_same_vectors(scores(folder, path, pairs()), expected_of(folder))


@pytest.mark.parametrize(
    ("path", "family"),
    [
        *cases("lean", [family for family in LEAN if family not in ("nomic_bert", "gte", "gemma3_text")]),
        *cases("fused", ("bert", "roberta", "distilbert", "electra", "modernbert", "qwen3")),
        *cases("packed", ("bert", "albert", "camembert", "modernbert", "llama")),
        *cases("padded", ("bert", "deberta-v2", "xlm-roberta", "mistral")),
    ],
)
def test_every_token_has_its_logits(path, family, classifier):
    folder = classifier(family, labels=4, is_of_tokens=True)
    batch = replace(pairs(Output.TOKEN_SCORES), borders=None)
    found = scores(folder, path, batch)
    assert found.shape == (sum(LENGTHS), 4)
    assert_same_vectors(found, logits_of(folder, batch, is_of_tokens=True))


@pytest.mark.parametrize("path", PATHS)
def test_the_second_part_of_a_pair_counts_as_such(path, classifier):
    folder = classifier("bert")
    as_pairs, as_texts = scores(folder, path, pairs()), scores(folder, path, replace(pairs(), borders=None))
    is_pair = pairs().borders > 0  # type: ignore[operator]
    assert np.abs(as_pairs - as_texts)[is_pair].min() > 1e-3
    np.testing.assert_array_equal(as_pairs[~is_pair], as_texts[~is_pair])


@pytest.mark.parametrize("path", ["lean", "packed", "padded"])
def test_roberta_has_one_type_even_with_two_in_its_table(path, classifier):
    """Its tokenizers give none."""
    folder = classifier("roberta", type_vocab_size=2)
    expected = logits_of(folder, replace(pairs(), borders=None))
    assert_same_vectors(scores(folder, path, pairs()), expected)


@pytest.mark.parametrize("path", PATHS)
def test_padding_at_the_end_of_a_text_is_passed_over_as_in_transformers(path, classifier):
    batch = pairs()
    token_ids = batch.token_ids.copy()
    token_ids[2:5] = 1  # the end of the first
    token_ids[5] = 1  # the whole second
    batch = replace(batch, token_ids=token_ids)
    folder = classifier("qwen3", labels=2)
    assert_same_vectors(scores(folder, path, batch), logits_of(folder, batch))


@pytest.mark.parametrize(
    ("family", "is_of_tokens"),
    [("convbert", False), ("roformer", True), ("xlm-roberta-xl", False), ("gpt2", False), ("gpt2", True)],
)
def test_a_family_without_a_table_is_computed_by_transformers_class(family, is_of_tokens, classifier):
    output = Output.TOKEN_SCORES if is_of_tokens else Output.SCORES
    folder = classifier(family, labels=3, is_of_tokens=is_of_tokens)
    config = worker_config(folder)
    selection, engine = select(config, lambda stage: None)
    assert selection.path in ("padded", "unpadded")
    batch = pairs(output)
    found, expected = embed(engine, batch, 3), logits_of(folder, batch, is_of_tokens=is_of_tokens)
    assert_same_vectors(found, expected)
    for path in ("lean", "packed"):
        with pytest.raises(NotDescribed, match="no table"):
            engine_of(folder, path)


@pytest.mark.parametrize("family", ["bart", "mbart"])
def test_a_head_that_reads_the_end_of_a_text_is_compared_with_texts_that_have_one(family, classifier):
    """As facebook/bart-large-mnli: its class raises for a sequence without the token, or with others of it."""
    folder = classifier(family, labels=["contradiction", "neutral", "entailment"])
    config = worker_config(folder)
    _, engine = select(config, lambda stage: None)
    assert (engine.facts["path"], engine.warnings) == ("padded", [])
    batch = random_batch(config.card, (40, *LENGTHS))
    assert_same_vectors(embed(engine, batch, 3), logits_of(folder, batch))
    # A pair has an end token in its middle, too.
    token_ids = batch.token_ids.copy()
    token_ids[20] = token_ids[39]
    mixed = replace(batch, token_ids=token_ids)
    assert_same_vectors(embed(engine, mixed, 3), logits_of(folder, mixed))


def test_a_causal_model_without_padding_is_computed_one_text_at_a_time(classifier):
    folder = classifier("gpt2", labels=2, pad_token_id=None)
    assert_same_vectors(scores(folder, "padded", pairs()), logits_of(folder, pairs()))


@pytest.mark.parametrize("dtype", FLOATS_OF_FUSED)
def test_the_selected_engine_is_compared_with_transformers_class(dtype, classifier):
    folder = classifier("bert", labels=2)
    config = worker_config(folder, dtype=dtype)
    selection, _ = select(config, lambda stage: None)
    if selection.dtype == dtype:  # bfloat16 by AMX orders the scores of this small model otherwise, and is not selected
        assert selection.path == ("lean" if dtype == "float32" else "fused")
    probes = random_batch(config.card, (5, 1, 34, 3))
    np.testing.assert_allclose(selection.reference[:4], logits_of(folder, probes), atol=1e-5)
    assert probes.borders is not None
    assert probes.borders.any()


@pytest.mark.parametrize(
    ("changes", "message", "of_the_reference"),
    [
        ({"bert.pooler.dense.weight": None}, r"lack pooler\.dense\.weight", r"lack bert\.pooler\.dense\.weight"),
        ({"classifier.weight": torch.zeros(3, 32)}, r"classifier\.weight is \[3, 32\]", r"classifier\.weight"),
        ({"bert.encoder.layer.3.output.dense.weight": torch.zeros(32, 64)}, "", r"encoder\.layer\.3"),
    ],
)
def test_weights_that_do_not_fit_the_settings_are_refused(changes, message, of_the_reference, tmp_path):
    def change(weights: dict[str, torch.Tensor]) -> None:
        for name, tensor in changes.items():
            weights.pop(name, None)
            weights.update({} if tensor is None else {name: tensor})

    folder = change_weights(save_classifier(tmp_path, "bert", labels=2), change)
    with pytest.raises(ModelError, match=of_the_reference):
        select(worker_config(folder), lambda stage: None)
    for path in ("lean", "fused") if message else ():
        with pytest.raises(ModelError, match=message):
            engine_of(folder, path)


# --- the engine without torch -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "family"), cases("lean", LEAN))
def test_scores_in_int8_are_within_the_bounds(path, family, classifier):
    folder = classifier(family, labels=3)
    parity = compare(scores(folder, path, pairs(), "int8"), logits_of(folder, pairs()), 1, Output.SCORES)
    assert parity.is_within_bounds("int8")
    assert parity.max_abs_diff > 1e-4, "nothing was quantized"


@pytest.mark.parametrize("family", ["bert", "qwen2"])
def test_several_threads_give_the_same_scores(family, classifier):
    folder = classifier(family, labels=2)
    engine, expected = engine_of(folder, "lean"), scores(folder, "lean", pairs())
    assert engine.allow_leases(2, may_copy_weights=True) == (1, 2)
    deadline = time.monotonic() + 60
    while engine.lease(2) != 2:
        assert time.monotonic() < deadline, "there is no wide session"
        time.sleep(0.01)
    assert_same_vectors(embed(engine, pairs(), 2), expected)
    engine.lease(0)
    engine.use_threads(2)
    assert_same_vectors(embed(engine, pairs(), 2), expected)


def test_a_batch_of_several_passes_has_the_scores_of_one(classifier, monkeypatch):
    """Each pass has the token types of its own sequences."""
    folder = classifier("bert")
    monkeypatch.setattr(lean_engine, "TOKENS_OF_A_PASS", 40)
    assert_same_vectors(scores(folder, "lean", pairs()), logits_of(folder, pairs()))
