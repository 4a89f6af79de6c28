"""The lean engine beside its vectors, which tests/system/vectors compare: passes, threads, memory, files, leases."""

import re
import shutil
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import Checkpoints, random_batch, reference
from vecd.model.card import read_card
from vecd.workers.batch import Layout, PackedBatch, Run, arrange, passes
from vecd.workers.description import NotDescribed
from vecd.workers.onnx import engine as wide
from vecd.workers.onnx.engine import LeanEngine, WideForward
from vecd.workers.onnx.graph import pieces_of
from vecd.workers.onnx.session import LeanForward
from vecd.workers.parity import vectors_of

LENGTHS = [5, 1, 30, 60, 7, 5, 2, 1, 12, 12, 59]


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 700))
def test_passes_cover_a_layout_in_parts_of_equal_size(lengths: list[int], limit: int) -> None:
    ids = np.arange(sum(lengths), dtype=np.int32)
    whole = arrange(PackedBatch(np.array(lengths, dtype=np.int32), ids))
    parts = list(passes(whole, limit))
    assert np.concatenate([part.first_rows for part in parts]).tolist() == whole.first_rows.tolist()
    assert np.concatenate([part.token_ids for part in parts]).tolist() == whole.token_ids.tolist()
    for part in parts:
        assert part.starts[0] == 0
        assert part.runs[-1].stop == part.token_ids.size == part.lengths.sum()
        assert part.token_ids.size <= limit or part.lengths.size == 1
    if len(parts) > 1:
        fewest = -(-sum(lengths) // limit)
        assert len(parts) <= 2 * fewest + 1 or max(lengths) > limit / 2


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
def test_activations_are_the_reference_s(activation: str, checkpoint: Checkpoints) -> None:
    folder, batch = checkpoint("bert", hidden_act=activation), random_batch(LENGTHS)
    engine = LeanEngine(read_card(folder))
    np.testing.assert_allclose(vectors_of(engine, batch, 32), reference(folder, batch), atol=1e-5, rtol=0)


def test_out_of_memory_is_tried_again_in_halves(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    class Starved(LeanForward):
        def __call__(self, layout: Layout) -> NDArray[np.float32]:
            if layout.token_ids.size > 120:
                raise RuntimeError("Failed to allocate memory for requested buffer of size 1024")
            return super().__call__(layout)

    card, batch = read_card(checkpoint("bert")), random_batch(LENGTHS)
    expected = vectors_of(LeanEngine(card), batch, 32)
    monkeypatch.setattr(wide, "LeanForward", Starved)
    engine = LeanEngine(card)
    np.testing.assert_allclose(vectors_of(engine, batch, 32), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("window", [None, 0, 3, 300])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("attended", [(), (700, 5, 400)])
def test_pieces_have_all_queries_and_the_keys_that_they_see(
    window: int | None, is_causal: bool, attended: tuple[int, ...]
) -> None:
    run = Run(start=10, count=3, length=700, attended=attended)
    keys_of: dict[int, range] = {}
    for query, key, count, num_queries, num_keys in pieces_of([run], window, is_causal).T.tolist():
        for index in range(count):
            for place in range(num_queries):
                first_key = key + index * num_keys
                keys_of[query + index * num_queries + place] = range(first_key, first_key + num_keys)
    assert sorted(keys_of) == list(range(10, 2110))
    for query, keys in keys_of.items():
        index, place = divmod(query - 10, 700)
        seen = {
            10 + index * 700 + key
            for key in range(attended[index] if attended else 700)
            if (not is_causal or key <= place) and (window is None or abs(place - key) <= window)
        }
        assert seen <= set(keys)
        assert bool(seen) is bool(keys), "a query without keys is computed without any"


@pytest.mark.parametrize("fault", ["cut off", "encoder.layer.1.output.dense.bias"])
def test_a_file_that_is_not_whole_is_no_bug(fault: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    path = Path(shutil.copytree(checkpoint("bert"), tmp_path / "spoilt")) / "model.safetensors"
    if fault == "cut off":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        weights = {name: tensor for name, tensor in load_file(path).items() if name != fault}
        save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(NotDescribed, match=re.escape(fault)):
        LeanEngine(read_card(path.parent))


# --- leases: when a second session is made, what it computes and what it shares -------------------------------------


MAX_THREADS = 3


def await_wide(engine: LeanEngine) -> None:
    deadline = time.monotonic() + 30
    while engine.lease(MAX_THREADS) != MAX_THREADS:
        assert time.monotonic() < deadline, "the session is not made"
        time.sleep(0.01)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_leased_batches_have_the_vectors_of_one_thread(dtype: str, checkpoint: Checkpoints) -> None:
    engine, batch = LeanEngine(read_card(checkpoint("roberta")), dtype=dtype), random_batch(LENGTHS)
    expected = vectors_of(engine, batch, 32)
    assert list(engine.allow_leases(MAX_THREADS, may_copy_weights=True)) == [1, MAX_THREADS]
    assert engine.facts["wide_session_bytes"] == engine.facts["converted_bytes"] > 0
    await_wide(engine)
    used = []
    for leased in (1, 2, MAX_THREADS, MAX_THREADS + 1, 0):
        used.append(engine.lease(leased))
        np.testing.assert_allclose(vectors_of(engine, batch, 32), expected, atol=1e-6, rtol=0)
    assert used == [1, 1, MAX_THREADS, MAX_THREADS, 1]


def test_a_batch_goes_on_with_one_thread_while_the_session_is_made(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, batch = LeanEngine(read_card(checkpoint("bert"))), random_batch(LENGTHS)
    expected, may_go_on = vectors_of(engine, batch, 32), threading.Event()

    def make_late(*args: Any, **kwargs: Any) -> LeanForward:
        assert may_go_on.wait(30)
        return LeanForward(*args, **kwargs)

    monkeypatch.setattr(wide, "LeanForward", make_late)
    engine.allow_leases(MAX_THREADS, may_copy_weights=True)
    before = threading.active_count()
    assert engine.lease(1) == 1
    assert threading.active_count() == before, "nothing is made before more threads are leased"
    assert engine.lease(MAX_THREADS) == 1
    np.testing.assert_array_equal(vectors_of(engine, batch, 32), expected)
    may_go_on.set()
    await_wide(engine)
    np.testing.assert_allclose(vectors_of(engine, batch, 32), expected, atol=1e-6, rtol=0)


def test_tables_of_embeddings_exist_once(checkpoint: Checkpoints) -> None:
    card = read_card(checkpoint("bert", stored="bfloat16", vocab_size=20_000))  # converted, so not mapped
    one = LeanForward(card)
    tracemalloc.start()
    other = LeanForward(card, 2, like=one)
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert nbytes < 20_000 * card.hidden_size * 4 / 2
    assert other.num_private_bytes <= one.num_private_bytes


def test_files_that_were_replaced_meanwhile_are_not_read(checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder, batch = shutil.copytree(checkpoint("bert"), tmp_path / "model"), random_batch(LENGTHS)
    engine = LeanEngine(read_card(folder))
    expected = vectors_of(engine, batch, 32)
    other = tmp_path / "other.safetensors"
    save_file({name: tensor * 1.5 for name, tensor in load_file(folder / "model.safetensors").items()}, other)
    other.rename(folder / "model.safetensors")
    engine.allow_leases(MAX_THREADS, may_copy_weights=True)
    await_wide(engine)
    np.testing.assert_allclose(vectors_of(engine, batch, 32), expected, atol=1e-6, rtol=0)


def test_one_worker_alone_has_such_a_session(checkpoint: Checkpoints) -> None:
    engine = LeanEngine(read_card(checkpoint("bert")))
    assert list(engine.allow_leases(MAX_THREADS, may_copy_weights=False)) == [1]
    assert engine.facts["wide_session_bytes"] == 0
    assert engine.lease(MAX_THREADS) == 1


class Made:
    """Counts how often it is asked for a session."""

    def __init__(self, error: Exception | None = None) -> None:
        self.count, self._error = 0, error

    def __call__(self) -> Any:
        self.count += 1
        if self._error is not None:
            raise self._error
        return self


@pytest.mark.parametrize(("free_mb", "is_made"), [(299, False), (300, True)])
def test_memory_must_suffice_three_times(
    free_mb: int, is_made: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wide, "available_mb", lambda: free_mb)
    made = Made()
    forward = WideForward(made, 2, 100 << 20)
    for _ in range(3):
        forward.get()
        for thread in threading.enumerate():
            if thread.name == "wide-session":
                thread.join()
    assert made.count == is_made
    assert (forward.get() is not None) == is_made
    assert caplog.text.count("299 MB of memory are available, not 300") == (not is_made)


def test_a_session_that_cannot_be_made_is_one_line_of_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wide, "available_mb", lambda: 1000)
    made = Made(RuntimeError("no\nthread left"))
    forward = WideForward(made, 2, 1)
    for _ in range(3):
        assert forward.get() is None
        for thread in threading.enumerate():
            if thread.name == "wide-session":
                thread.join()
    assert made.count == 1
    assert caplog.text.count("batches keep to one thread") == 1
