"""Reloads under load: no request fails, and each is answered by one model, the old or the new.

The short form changes where texts are cut, which the engine without a model shows in its vectors; the long one changes
the model, for one whose vectors are known from the first one's.
"""

import asyncio
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from benchmarks.checkpoints import save_mirrored, signs
from tests.support.serving import Server, running_server
from tests.support.soak.faults import kill_one, wait_until, workers
from tests.support.soak.form import ENGINE, LONG, only_long, pick, record
from tests.support.soak.questions import Tenant
from tests.support.soak.tenants import dummy_reference, texts_of
from tests.support.soak.traffic import Tally, Traffic, under_traffic

NUM_CLIENTS = pick(short=4, long=32)
RELOADED_WITHIN_S = 120.0
FEW_TOKENS = 8


@dataclass
class Reloadable:
    """A server whose configuration is a file, and what it may say in that."""

    server: Server
    file: Path
    configurations: Sequence[str]
    tenants: list[Tenant]
    """With a reference for each configuration."""

    async def reload(self, configuration: int) -> tuple[float, float]:
        """When it was told to, and when it was done; by `time.monotonic`."""
        told_at = time.monotonic()
        await self.write(self.configurations[configuration], "is served by generation", RELOADED_WITHIN_S)
        return told_at, time.monotonic()

    async def write(self, text: str, said: str, timeout_s: float) -> None:
        """Have the server read a configuration, and wait for what it says of it."""
        num_before = self.server.stderr.count(said)
        self.file.write_text(text)
        self.server.process.send_signal(signal.SIGHUP)
        await wait_until(lambda: self.server.stderr.count(said) > num_before, timeout_s)


@pytest.fixture(scope="module")
def reloadable(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, minilm_folder: Path
) -> Iterator[Reloadable]:
    """With the first of its configurations."""
    folder = tmp_path_factory.mktemp("reloadable")
    configurations = [f"max-tokens = {number}\n" for number in (256, FEW_TOKENS)]
    if LONG:
        configurations = [f'model = "{model}"\n' for model in (minilm_folder, save_mirrored(folder / "mirrored"))]
    file = folder / "vecd.toml"
    file.write_text(configurations[0])
    with running_server("--config", str(file), "--workers", "2", "--gateways", "2", *ENGINE) as server:
        tenants = mirrored(request.getfixturevalue("tenants")) if LONG else cut_short(minilm_folder)
        yield Reloadable(server, file, configurations, tenants)


def cut_short(model_folder: Path) -> list[Tenant]:
    """Callers whose texts are all longer than FEW_TOKENS."""
    found = []
    for seed, name in enumerate(("alpha", "beta")):
        texts = [f"{text} and some more words, so that it is cut" for text in texts_of(name, 40, seed=seed)]
        references = tuple(dummy_reference(model_folder, texts, number) for number in (256, FEW_TOKENS))
        found.append(Tenant(name, texts, references))
    return found


def mirrored(tenants: list[Tenant]) -> list[Tenant]:
    return [replace(tenant, references=(tenant.references[0], tenant.references[0] * signs())) for tenant in tenants]


def test_each_answer_is_the_old_one_s_or_the_new_one_s(reloadable: Reloadable):
    """There and back again, and once to the same."""
    order = pick(short=[1], long=[0, *[1, 0] * 5])
    changes: list[tuple[float, float, int, int]] = []

    async def reload_in_turns(traffic: Traffic) -> None:
        current = 0
        for following in order:
            changes.append((*await reloadable.reload(following), current, following))
            current = following
            await traffic.answers(20)

    traffic, _ = under_traffic(reloadable.server.url, reloadable.tenants, NUM_CLIENTS, reload_in_turns, before=20)
    reload_s = [round(done_at - told_at, 1) for told_at, done_at, *_ in changes]
    record("reload", clients=NUM_CLIENTS, reloads=len(order), reload_s=reload_s, **traffic.tally.figures())
    traffic.tally.assert_all_right()
    assert_in_order(traffic.tally, changes)


def assert_in_order(tally: Tally, changes: list[tuple[float, float, int, int]]) -> None:
    """Before a reload the old one's, after it the new one's, and meanwhile either's."""
    told_at, done_at, old, new = zip(*changes, strict=True)
    for sent_at, answered_at, model in tally.models:
        last_done = max((n for n in range(len(changes)) if done_at[n] <= sent_at), default=-1)
        last_told = max((n for n in range(len(changes)) if told_at[n] <= answered_at), default=-1)
        may_be = {new[n] if n >= 0 else old[0] for n in range(last_done, last_told + 1)}
        assert model in may_be, f"sent {sent_at:.3f}, answered {answered_at:.3f} by {model}: {changes}"
    assert {model for *_, model in tally.models} == {0, 1}


@only_long
def test_reloads_while_workers_are_killed(reloadable: Reloadable):
    rng = random.Random(8)

    async def reload_and_kill(traffic: Traffic) -> int:
        num_killed = 0
        for following in (1, 0, 1, 0):
            reload = asyncio.create_task(reloadable.reload(following))
            while not reload.done():
                await asyncio.wait((reload,), timeout=2.0)
                kill_one(workers(reloadable.server), rng)
                num_killed += 1
            await reload
            await traffic.answers(20)
        return num_killed

    traffic, num_killed = under_traffic(reloadable.server.url, reloadable.tenants, NUM_CLIENTS, reload_and_kill)
    record("reload while workers are killed", clients=NUM_CLIENTS, kills=num_killed, **traffic.tally.figures())
    traffic.tally.assert_all_right()
