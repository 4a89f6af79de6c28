"""When the identity of each model is read, tried again and withdrawn. The threads and the files are real."""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from vecd.launch import identities
from vecd.launch.config.identity import read_identity
from vecd.launch.config.plan import Plan, make_plan
from vecd.launch.config.settings import load_settings
from vecd.launch.files import FileAccess
from vecd.launch.identities import Identities
from vecd.launch.workers import ModelLog
from vecd.shm.control import ModelIdentity


class Pools:
    """Worker pools without workers, and what gateways would have been told of each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told: list[ModelIdentity] = []
        self.identities = Identities(FileAccess(), self._note)
        self.all: list[Any] = []

    def _note(self) -> None:
        known = [pool.identity for pool in self.all if pool.identity is not None]
        self.told += [each for each in known if each not in self.told]

    def add(self, *, on_demand: bool = False) -> Any:
        flags = ["--load", "demand"] if on_demand else []
        plan: Plan = make_plan(load_settings([str(self.folder), *flags]))
        pool = SimpleNamespace(generation=len(self.all) + 1, plan=plan, identity=None, log=ModelLog(None))
        self.all.append(pool)
        self.identities.add(pool)  # type: ignore[arg-type]
        return pool

    def save_weights(self, value: float) -> None:
        save_file({"weight": np.full(8, value, np.float32)}, self.folder / "model.safetensors")


@pytest.fixture
async def pools(minilm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pools]:
    monkeypatch.setenv("VECD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(identities, "PAUSES_S", (0.0, 0.0))
    shutil.copytree(minilm_folder, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    made = Pools(tmp_path / "model")
    made.save_weights(1.0)
    reading = asyncio.create_task(made.identities.run())
    yield made
    reading.cancel()
    for pool in made.all:
        pool.plan.close()


async def until(is_true: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not is_true():
            await asyncio.sleep(0.01)


async def digest_of(pool: Any) -> str:
    await until(lambda: pool.identity is not None)
    return str(pool.identity.digest)


class Reader:
    """Stands before `read_identity`: notes whose turn it is, and fails as often as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_failures: int = 0) -> None:
        self.num_failures, self.read = num_failures, list[bool]()
        self._read_identity = read_identity
        monkeypatch.setattr(identities, "read_identity", self)

    def __call__(self, plan: Plan) -> Any:
        self.read.append(plan.gateway.is_loaded_on_demand)
        if len(self.read) <= self.num_failures:
            raise RuntimeError("a fault of the disk")
        return self._read_identity(plan)


async def test_a_failure_is_told_at_once_and_tried_again(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    Reader(monkeypatch, num_failures=1)
    pool = pools.add()
    await until(lambda: pool.identity is not None and pool.identity.digest)
    failed, known = pools.told
    assert (failed.digest, failed.problem) == ("", "RuntimeError: a fault of the disk")
    assert (len(known.digest), known.problem) == (32, "")


async def test_it_is_given_up_in_the_end_and_the_next_model_is_read(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(monkeypatch, num_failures=3)
    pool = pools.add()
    await until(lambda: len(reader.read) == 3)
    other = pools.add()
    assert await digest_of(other)
    assert (await digest_of(pool), len(reader.read)) == ("", 4)


async def test_a_change_before_the_reading_is_told(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    def change_and_read(plan: Plan) -> Any:
        pools.save_weights(2.0)
        return read_identity(plan)

    monkeypatch.setattr(identities, "read_identity", change_and_read)
    pool = pools.add()
    assert await digest_of(pool) == ""
    assert "files have changed" in pool.identity.problem


async def test_models_on_demand_are_read_after_the_start(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(monkeypatch)
    later = pools.add(on_demand=True)
    assert await digest_of(pools.add())
    assert await digest_of(pools.add())
    assert (later.identity, reader.read) == (None, [False, False])
    pools.identities.read_all()
    assert await digest_of(later)


async def test_a_load_hurries_it_and_waits_for_it(pools: Pools) -> None:
    pool = pools.add(on_demand=True)
    await pools.identities.confirm(pool)
    assert pool.identity.digest


async def test_a_reading_that_takes_long_holds_up_no_worker(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identities, "WAIT_S", 0)
    may_read = threading.Event()
    monkeypatch.setattr(identities, "read_identity", lambda plan: may_read.wait(30) and read_identity(plan))
    pool = pools.add()
    await pools.identities.confirm(pool)
    assert pool.identity is None
    may_read.set()
    assert await digest_of(pool)


async def test_it_is_withdrawn_if_a_worker_may_have_read_other_files(pools: Pools) -> None:
    pool = pools.add()
    digest = await digest_of(pool)
    (pools.folder / "README.md").write_text("Another text.")
    await pools.identities.confirm(pool)
    assert pool.identity.digest == digest
    pools.save_weights(2.0)
    await pools.identities.confirm(pool)
    assert pool.identity == ModelIdentity(1, "", problem=identities._CHANGED)


async def test_a_tokenizer_whose_plan_is_closed_is_still_the_model_s(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = await digest_of(pools.add())
    pool = pools.add(on_demand=True)
    pool.plan.close()
    # The next descriptor gets the number of the one that was closed.
    with (pools.folder / "config.json").open():
        pools.identities.read_all()
        assert await digest_of(pool) == digest
    pool.plan = replace(pool.plan, gateway=replace(pool.plan.gateway, card=pool.plan.card))  # to be closed once
