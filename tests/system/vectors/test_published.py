"""Models in their published layouts: every engine that is offered gives the rows of the model's reference, and the one
that is selected is the one that it should be.

The first layout of each family is in every run.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.checkpoints import FLOATS_OF_FUSED, cosines_of
from tests.support.published import Layout, folder_of, layouts
from tests.support.published._configured import configured
from vecd.model.known import known_models
from vecd.shm.output import Output, span_of
from vecd.workers.batch import Engine, PackedBatch
from vecd.workers.config import WorkerConfig
from vecd.workers.description import NotDescribed
from vecd.workers.formats import PATHS
from vecd.workers.load import load_engine
from vecd.workers.parity import special_tokens, vectors_of
from vecd.workers.select import build
from vecd.workers.torch.fused import FusedForward
from vecd.workers.torch.packed import PackingError

Rows = NDArray[np.float32]

BOUND = 1e-5
"""Of numbers in float32, as a part of them or, below 1, as it is."""
COSINES = {"float32": 0.99999, "bfloat16": 0.998}
WITHOUT_NAMES = ("org", "a-firm", "a-lab", "Xenova", "Qdrant", "drawais", "maywell", "boboliu", "AXERA-TECH")
"""Owners of layouts that are of no published model, or of the files of others' models in another form."""
MOST_TOKENS = 300
LENGTHS = (2, 3, 7, 64, 1, 33, 2, 12, MOST_TOKENS)
_OUTPUTS = {"dense": Output.VECTORS, "sparse": Output.SPARSE, "multi-vector": Output.TOKEN_VECTORS}


def _cases() -> list[object]:
    firsts = {layout.family: layout for layout in reversed(layouts())}.values()
    return [
        pytest.param(layout, id=layout.name, marks=() if layout in firsts else pytest.mark.full) for layout in layouts()
    ]


def sequences_of(config: WorkerConfig) -> list[tuple[NDArray[np.int32], int]]:
    """Random ids between the special tokens that the model's sequences have, and where a second part begins."""
    card, rng = config.card, np.random.default_rng(0)
    before, behind = special_tokens(card)
    others = np.setdiff1d(np.arange(card.vocab_size, dtype=np.int32), [*before, *behind, *card.ignored_ids])
    most = min(MOST_TOKENS, card.max_tokens)
    lengths = [max(len(before) + 1 + len(behind), min(length, most)) for length in LENGTHS]
    found = []
    for index, length in enumerate(lengths):
        words = rng.choice(others, length - len(before) - len(behind))
        is_pair = card.score is not None and bool(card.score.pooling) and index % 2 == 0 and length > 2
        ids = np.array([*before, *words, *behind], dtype=np.int32)
        found.append((ids, length // 2 if is_pair else 0))
    return found


def batch_of(config: WorkerConfig, capability: str, sequences: list[tuple[NDArray[np.int32], int]]) -> PackedBatch:
    card = config.card
    output = _OUTPUTS.get(capability, card.main_output)
    borders = np.array([border for _, border in sequences], dtype=np.int32)
    return PackedBatch(
        np.array([ids.size for ids, _ in sequences], dtype=np.int32),
        np.concatenate([ids for ids, _ in sequences]),
        np.full(len(sequences), output, dtype=np.uint8),
        borders if borders.any() else None,
        span_of(card) if output.spans_rows else 1,
    )


def rows_of(engine: Engine, config: WorkerConfig, batch: PackedBatch) -> list[Rows]:
    """Of each sequence, as `RowsOf` gives them."""
    assert batch.outputs is not None
    output = Output(batch.outputs[0])
    rows, width = vectors_of(engine, batch, config.card.row_dim), output.width_of(config.card)
    parts = np.split(rows, np.cumsum(batch.rows_of_each)[:-1])
    if output.spans_rows:
        return [part.reshape(-1)[:width] for part in parts]
    return [part[:, :width] if output.is_per_token else part[0, :width] for part in parts]


def assert_same(found: list[Rows], expected: list[Rows], dtype: str, capability: str) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert np.isfinite(ours).all()
        if dtype == "float32" and capability not in ("dense", "multi-vector"):
            assert (np.abs(ours - theirs) <= BOUND * np.maximum(1, np.abs(theirs))).all(), (ours, theirs)
        elif capability in ("dense", "multi-vector", "sparse"):
            cosines = cosines_of(np.atleast_2d(ours), np.atleast_2d(theirs))
            assert cosines.min() >= COSINES[dtype], cosines.min()
    if dtype != "float32" and capability in ("rerank", "classify", "token-classify"):
        ours, theirs = (np.concatenate([each.reshape(-1, each.shape[-1]) for each in all]) for all in (found, expected))
        assert (np.abs(ours - theirs) <= 0.15 * np.maximum(theirs.std(axis=0), 0.05 * np.abs(theirs).max())).all()


@pytest.mark.parametrize("layout", _cases())
def test_rows_are_the_reference_s(layout: Layout, tmp_path: Path) -> None:
    reference = layout.reference(folder_of(layout))
    with configured(layout, "float32", tmp_path) as config:
        assert layout.capability in config.card.capabilities
        engine = load_engine(replace(config, cache_dir=None), lambda stage: None)
        assert engine.facts["path"] == layout.path
        sequences = sequences_of(config)
        batch = batch_of(config, layout.capability, sequences)
        expected = [reference(ids.astype(np.int64), border) for ids, border in sequences]
        assert_differ(expected)
        assert_same(rows_of(engine, config, batch), expected, "float32", layout.capability)
        for path in PATHS["auto"]:
            for dtype in ("float32", "bfloat16"):
                if (other := offered(config, path, dtype, layout)) is not None:
                    rows = rows_of(other, config, batch)
                    assert_same(rows, expected, dtype, layout.capability)


def assert_differ(expected: list[Rows]) -> None:
    """The reference tells sequences apart; else its rows would show nothing."""
    first, second = expected[-1], expected[2]
    rows = [each[0] if each.ndim > 1 else each for each in (first, second)]
    assert np.abs(rows[0] - rows[1]).max() > 1e-3


def offered(config: WorkerConfig, path: str, dtype: str, layout: Layout) -> Engine | None:
    """None where the model has no such engine, or this processor not its number format."""
    order = PATHS["auto"]
    if config.card.is_static or config.card.export_file or order.index(path) > order.index("padded"):
        return None
    is_next_refused = path == "packed" and order.index(layout.path) > order.index(path)
    if is_next_refused or (path == "lean" and dtype != "float32"):
        return None
    if path == "fused" and dtype not in FLOATS_OF_FUSED:
        return None
    with mock.patch.object(FusedForward, "warm"), suppress(NotDescribed, PackingError):
        return build(config, path, dtype)
    return None


def test_every_published_model_has_a_name_of_one_word() -> None:
    known = {model.hub_id for model in known_models()}
    ids = {"/".join(layout.name.split("/")[:2]) for layout in layouts()}
    without = {each for each in ids if each.partition("/")[0] in WITHOUT_NAMES or each.endswith("-GGUF")}
    assert ids - without <= known
