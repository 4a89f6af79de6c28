"""Inputs that end their worker, hang it, delay it, or make its model fail: they alone are answered with an error.

The workers are real; what happens to them on certain token ids is put in from outside (`injection/sitecustomize.py`).
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.support.serving import Server, eventually, running_server
from tests.support.soak.faults import injecting, wait_until, workers
from tests.support.soak.form import LONG, pick, record
from tests.support.soak.injection.sitecustomize import CRASH, KILL, RAISE, SLEEP, SPIN
from tests.support.soak.questions import Tenant
from tests.support.soak.tally import Tally
from tests.support.soak.traffic import Traffic

NUM_CLIENTS = pick(short=4, long=16)
NUM_GOOD = pick(short=60, long=999)
MAX_DEATHS = {KILL: 5, CRASH: 3}
"""What is promised: so many workers may die with one input before it is rejected. By a signal that a process brings
upon itself, each death is proof; SIGKILL may have come from outside (`vecd.gateway.dispatch.crash_attribution`)."""
MAX_DEATHS_OF_COPIES = 10
"""The same of SIGKILL, when each of two gateways has a copy under way (`test_crash_attribution`): its client has gone
and comes again by the other gateway before the first copy is given up."""
BATCH_TIMEOUT_S = pick(short=1.0, long=1.5)


@dataclass
class Trial:
    tally: Tally
    answers: list[httpx.Response] = field(default_factory=list)
    """To the bad requests, in order."""
    num_deaths: list[int] = field(default_factory=list)
    """After each of them, all that there have been."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with faulty_server(tmp_path_factory.mktemp("faults")) as running:
        yield running


@contextmanager
def faulty_server(folder: Path, *more_flags: str) -> Iterator[Server]:
    switch = folder / "on"
    flags = pick(short=["--engine", "weightless"], long=["--dtype", "float32"])
    flags += ["--workers", "2", "--batch-timeout", str(BATCH_TIMEOUT_S), *more_flags]
    with running_server(*flags, env=injecting(switch)) as running:
        switch.touch()
        yield running


@pytest.fixture(scope="module")
def callers(request: pytest.FixtureRequest) -> list[Tenant]:
    found: list[Tenant] = request.getfixturevalue("tenants" if LONG else "weightless_tenants")
    return found


def num_deaths(server: Server) -> int:
    """Of workers, counted by their lives."""
    return sum(worker["life"] - 1 for worker in server.info()["workers"])


def among_good_requests(server: Server, callers: list[Tenant], ids: list[list[int]]) -> Trial:
    """Each list of ids in a request of its own, one after the other, among NUM_GOOD good requests and more."""

    async def trial() -> Trial:
        async with (
            Traffic(server.url, callers, NUM_CLIENTS) as traffic,
            httpx.AsyncClient(base_url=server.url, timeout=60) as client,
        ):
            result = Trial(traffic.tally)
            await traffic.answers(NUM_GOOD // 2)
            for bad in ids:
                result.answers.append(await client.post("/v1/embeddings", json={"input": bad}))
                await wait_until(lambda: len(workers(server)) == 2 and len(server.info()["workers"]) == 2, 60)
                result.num_deaths.append(num_deaths(server))
            await traffic.answers(NUM_GOOD - NUM_GOOD // 2)
        return result

    return asyncio.run(trial())


@pytest.fixture(autouse=True)
def whole(server: Server) -> None:
    eventually(lambda: len(server.info()["workers"]) == 2, 60)


@pytest.mark.parametrize("poison", [KILL, CRASH])
def test_an_input_that_ends_its_worker(server: Server, callers: list[Tenant], poison: int):
    deaths_before = num_deaths(server)
    trial = among_good_requests(server, callers, [[101, poison, 102]] * 2)
    deaths = [number - deaths_before for number in trial.num_deaths]
    record("poison input", poison=poison, deaths=deaths, **trial.tally.figures())
    trial.tally.assert_all_right()
    for answer in trial.answers:
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "poison_input"
        assert "input[0]" in answer.json()["error"]["message"]
        assert answer.headers["x-should-retry"] == "false"
    assert 3 <= deaths[0] <= MAX_DEATHS[poison], "it was tried again, the last time alone"
    assert deaths[1] == deaths[0], "the second time it reaches no worker"
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_an_input_that_comes_again_by_several_gateways(tmp_path: Path):
    """Its client never waits for the end, and comes again by a new connection, which any gateway may accept."""
    with faulty_server(tmp_path, "--gateways", "2") as running:
        response = asked_until_answered(running, [101, KILL, 102])
        deaths = num_deaths(running)
        record("poison input by several gateways", deaths=deaths)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "poison_input")
    assert deaths <= MAX_DEATHS_OF_COPIES


def asked_until_answered(server: Server, ids: list[int]) -> httpx.Response:
    """All workers are up again when this returns."""
    response: httpx.Response | None = None
    for _ in range(30):
        with suppress(httpx.TimeoutException):
            response = httpx.post(f"{server.url}/v1/embeddings", json={"input": ids}, timeout=0.1)
        eventually(lambda: len(workers(server)) == 2 and len(server.info()["workers"]) == 2, 60)
        if response is not None:
            return response
    raise AssertionError("no answer, however often it was asked")


def test_poison_takes_only_its_own_request_along(server: Server, callers: list[Tenant]):
    """In one request with good inputs, which are lost with it, and beside others, which are not."""
    trial = among_good_requests(server, callers, [[101, 2000, 102], [101, KILL, 2001, 102]])
    trial.tally.assert_all_right()
    assert [answer.status_code for answer in trial.answers] == [200, 500]


def test_a_worker_that_spins(server: Server, callers: list[Tenant]):
    """It neither answers nor dies, and its Python never returns: it is ended, and the log says where it was."""
    trial = among_good_requests(server, callers, [[101, SPIN, 102]])
    record("spinning worker", **trial.tally.figures())
    trial.tally.assert_all_right()
    assert trial.answers[0].status_code == 500
    assert "begin_or_not" in server.stderr, "a traceback of the stuck worker"


def test_a_worker_that_answers_late(server: Server, callers: list[Tenant]):
    """But within its deadline: everybody waits, and nobody fails."""
    deaths_before = num_deaths(server)
    trial = among_good_requests(server, callers, [[101, SLEEP, 102]] * pick(short=1, long=10))
    record("worker that answers late", **trial.tally.figures())
    trial.tally.assert_all_right()
    assert [answer.status_code for answer in trial.answers] == [200] * len(trial.answers)
    assert trial.num_deaths[-1] == deaths_before


def test_an_input_that_the_model_fails_on(server: Server, callers: list[Tenant]):
    deaths_before = num_deaths(server)
    trial = among_good_requests(server, callers, [[101, RAISE, 102]] * pick(short=1, long=5))
    record("input that the model fails on", **trial.tally.figures())
    trial.tally.assert_all_right()
    assert {answer.status_code for answer in trial.answers} == {500}
    assert trial.num_deaths[-1] == deaths_before, "its worker is kept"
