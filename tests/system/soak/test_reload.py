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
from tests.support.soak.form import LONG, pick, record
from tests.support.soak.questions import Tenant
from tests.support.soak.tally import Tally
from tests.support.soak.tenants import texts_of, weightless_reference
from tests.support.soak.traffic import Traffic

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
        num_reloaded = self.server.stderr.count("is served by generation")
        self.file.write_text(self.configurations[configuration])
        told_at = time.monotonic()
        self.server.process.send_signal(signal.SIGHUP)
        await wait_until(lambda: self.server.stderr.count("is served by generation") > num_reloaded, RELOADED_WITHIN_S)
        return told_at, time.monotonic()


@pytest.fixture
def reloadable(tmp_path: Path, request: pytest.FixtureRequest, minilm_folder: Path) -> Iterator[Reloadable]:
    configurations, flags = [f"max-tokens = {number}\n" for number in (256, FEW_TOKENS)], ["--engine", "weightless"]
    if LONG:
        folders = [request.getfixturevalue("minilm_folder"), request.getfixturevalue("mirrored_model")]
        configurations, flags = [f'model = "{folder}"\n' for folder in folders], ["--dtype", "float32"]
    file = tmp_path / "vecd.toml"
    file.write_text(configurations[0])
    with running_server("--config", str(file), "--workers", "2", "--gateways", "2", *flags) as server:
        tenants = mirrored(request.getfixturevalue("tenants")) if LONG else cut_short(minilm_folder)
        yield Reloadable(server, file, configurations, tenants)


def cut_short(model_folder: Path) -> list[Tenant]:
    """Callers whose texts are all longer than FEW_TOKENS."""
    found = []
    for seed, name in enumerate(("alpha", "beta")):
        texts = [f"{text} and some more words, so that it is cut" for text in texts_of(name, 40, seed=seed)]
        references = tuple(weightless_reference(model_folder, texts, number) for number in (256, FEW_TOKENS))
        found.append(Tenant(name, texts, references))
    return found


def mirrored(tenants: list[Tenant]) -> list[Tenant]:
    return [replace(tenant, references=(tenant.references[0], tenant.references[0] * signs())) for tenant in tenants]


@pytest.fixture(scope="module")
def mirrored_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mirrored(tmp_path_factory.mktemp("model") / "mirrored")


def test_each_answer_is_the_old_one_s_or_the_new_one_s(reloadable: Reloadable):
    """There and back again, and once to the same."""
    order = pick(short=[1], long=[0, *[1, 0] * 5])
    changes: list[tuple[float, float, int, int]] = []

    async def trial() -> Traffic:
        async with Traffic(reloadable.server.url, reloadable.tenants, NUM_CLIENTS) as traffic:
            current = 0
            await traffic.answers(20)
            for following in order:
                told_at, done_at = await reloadable.reload(following)
                changes.append((told_at, done_at, current, following))
                current = following
                await traffic.answers(20)
        return traffic

    traffic = asyncio.run(trial())
    reload_s = [round(done_at - told_at, 1) for told_at, done_at, *_ in changes]
    figures = {"reloads": len(order), "reload_s": reload_s}
    record("reload", clients=NUM_CLIENTS, **figures, **traffic.tally.figures())
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


def test_a_configuration_that_cannot_be_used_changes_nothing(reloadable: Reloadable):
    server = reloadable.server

    async def trial() -> Traffic:
        async with Traffic(server.url, reloadable.tenants, NUM_CLIENTS) as traffic:
            for wrong in (
                "max-tokens = 100000\n",
                "nonsense",
                'port = 1\nuds = "/nowhere/x"\n',
                'model = "/nowhere"\n',
            ):
                num_refused = server.stderr.count("not reloaded")
                reloadable.file.write_text(wrong)
                server.process.send_signal(signal.SIGHUP)
                await wait_until(lambda n=num_refused: server.stderr.count("not reloaded") > n, 60)  # type: ignore[misc]
                await traffic.answers(5)
        return traffic

    traffic = asyncio.run(trial())
    traffic.tally.assert_all_right()
    assert {model for *_, model in traffic.tally.models} == {0}
    assert server.info()["model"]["id"]


@pytest.mark.skipif(not LONG, reason="takes minutes: with VECD_SOAK=1")
def test_reloads_while_workers_are_killed(reloadable: Reloadable):
    rng = random.Random(8)

    async def trial() -> tuple[Traffic, int]:
        num_killed = 0
        async with Traffic(reloadable.server.url, reloadable.tenants, NUM_CLIENTS) as traffic:
            for following in (1, 0, 1, 0):
                reload = asyncio.create_task(reloadable.reload(following))
                while not reload.done():
                    await asyncio.wait((reload,), timeout=2.0)
                    kill_one(workers(reloadable.server), rng)
                    num_killed += 1
                await reload
                await traffic.answers(20)
        return traffic, num_killed

    traffic, num_killed = asyncio.run(trial())
    record("reload while workers are killed", clients=NUM_CLIENTS, kills=num_killed, **traffic.tally.figures())
    traffic.tally.assert_all_right()
