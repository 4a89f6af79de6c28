"""Leases of the lean engine: when its second session is made, which batches it computes, and what it shares."""

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from vecd.shm.card import read_card
from vecd.workers.engines.lean import wide
from vecd.workers.engines.lean.engine import LeanEngine
from vecd.workers.engines.lean.forward import LeanForward
from vecd.workers.engines.lean.wide import WideForward
from vecd.workers.engines.parity import vectors_of

LENGTHS = [5, 1, 30, 60, 7, 5, 2, 1, 12, 12, 59]
MAX_THREADS = 3


def await_wide(engine: LeanEngine) -> None:
    deadline = time.monotonic() + 30
    while engine.lease(MAX_THREADS) != MAX_THREADS:
        assert time.monotonic() < deadline, "the session is not made"
        time.sleep(0.01)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_leased_batches_have_the_vectors_of_one_thread(
    dtype: str, checkpoint: Callable[..., Path], random_batch: Any
) -> None:
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
    checkpoint: Callable[..., Path], random_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, batch = LeanEngine(read_card(checkpoint("bert"))), random_batch(LENGTHS)
    expected, may_go_on = vectors_of(engine, batch, 32), threading.Event()
    made = LeanForward.__init__

    def slow(*args: Any, **kwargs: Any) -> None:
        assert may_go_on.wait(30)
        made(*args, **kwargs)

    monkeypatch.setattr(LeanForward, "__init__", slow)
    engine.allow_leases(MAX_THREADS, may_copy_weights=True)
    before = threading.active_count()
    assert engine.lease(1) == 1
    assert threading.active_count() == before, "nothing is made before more threads are leased"
    assert engine.lease(MAX_THREADS) == 1
    np.testing.assert_array_equal(vectors_of(engine, batch, 32), expected)
    may_go_on.set()
    await_wide(engine)
    np.testing.assert_allclose(vectors_of(engine, batch, 32), expected, atol=1e-6, rtol=0)


def test_tables_of_embeddings_exist_once(checkpoint: Callable[..., Path]) -> None:
    card = read_card(checkpoint("bert", stored="bfloat16"))  # converted, so not mapped
    one = LeanForward(card)
    other = LeanForward(card, 2, like=one)
    assert other._weights["embeddings/words"] is one._weights["embeddings/words"]
    assert not other._borrowed


def test_files_that_were_replaced_meanwhile_are_not_read(
    checkpoint: Callable[..., Path], random_batch: Any, tmp_path: Path
) -> None:
    folder, batch = shutil.copytree(checkpoint("bert"), tmp_path / "model"), random_batch(LENGTHS)
    engine = LeanEngine(read_card(folder))
    expected = vectors_of(engine, batch, 32)
    other = tmp_path / "other.safetensors"
    save_file({name: tensor * 1.5 for name, tensor in load_file(folder / "model.safetensors").items()}, other)
    other.rename(folder / "model.safetensors")
    engine.allow_leases(MAX_THREADS, may_copy_weights=True)
    await_wide(engine)
    np.testing.assert_allclose(vectors_of(engine, batch, 32), expected, atol=1e-6, rtol=0)


def test_one_worker_alone_has_such_a_session(checkpoint: Callable[..., Path]) -> None:
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
