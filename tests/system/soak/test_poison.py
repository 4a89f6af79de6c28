"""Inputs that end their worker, hang it, delay it, or make its model fail: they alone are answered with an error.

The workers are real; what happens to them on certain token ids is put in from outside (`injection/sitecustomize.py`).
"""

from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest

from tests.support.serving import Server, eventually, running_server
from tests.support.soak.faults import injecting, wait_until, workers
from tests.support.soak.form import ENGINE, pick, record
from tests.support.soak.injection.sitecustomize import CRASH, KILL, RAISE, SLEEP, SPIN
from tests.support.soak.questions import Tenant
from tests.support.soak.traffic import Tally, Traffic, under_traffic

NUM_CLIENTS = pick(short=4, long=16)
NUM_GOOD = pick(short=60, long=999)
MAX_DEATHS = {KILL: 5, CRASH: 3}
"""What is promised: so many workers may die with one input before it is rejected. By a signal that a process brings
upon itself, each death is proof; SIGKILL may have come from outside (`vecd.gateway.dispatch.known`)."""
MAX_DEATHS_OF_COPIES = 10
"""The same of SIGKILL, when each of two gateways has a copy under way (`test_known`): its client has gone
and comes again by the other gateway before the first copy is given up."""
BATCH_TIMEOUT_S = pick(short=1.0, long=1.5)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    switch = tmp_path_factory.mktemp("faults") / "on"
    flags = ["--workers", "2", "--gateways", "2", "--batch-timeout", str(BATCH_TIMEOUT_S)]
    with running_server(*ENGINE, *flags, env=injecting(switch)) as running:
        switch.touch()
        yield running


@pytest.fixture
def server(faulty: Server) -> Server:
    """With all its workers."""
    eventually(lambda: is_whole(faulty), 60)
    return faulty


def is_whole(server: Server) -> bool:
    return len(workers(server)) == 2 and len(server.info()["workers"]) == 2


def num_deaths(server: Server) -> int:
    """Of workers, counted by their lives."""
    return sum(worker["life"] - 1 for worker in server.info()["workers"])


def among_good_requests(
    server: Server, callers: list[Tenant], trial: str, ids: list[list[int]]
) -> tuple[list[httpx.Response], list[int]]:
    """Each list of ids in a request of its own, one after the other, among `NUM_GOOD` good requests, which are all
    answered right: the responses to the bad ones, and the deaths that there have been after each of them."""
    answers: list[httpx.Response] = []
    deaths: list[int] = []
    before = num_deaths(server)

    async def ask(traffic: Traffic) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            for bad in ids:
                answers.append(await client.post("/v1/embeddings", json={"input": bad}))
                await wait_until(lambda: is_whole(server), 60)
                deaths.append(num_deaths(server) - before)

    half = NUM_GOOD // 2
    traffic, _ = under_traffic(server.url, callers, NUM_CLIENTS, ask, before=half, after=NUM_GOOD - half)
    tally: Tally = traffic.tally
    record(trial, deaths=deaths, **tally.figures())
    tally.assert_all_right()
    return answers, deaths


@pytest.mark.parametrize("poison", [KILL, CRASH])
def test_an_input_that_ends_its_worker(server: Server, callers: list[Tenant], poison: int):
    answers, deaths = among_good_requests(server, callers, f"poison input {poison}", [[101, poison, 102]] * 2)
    for answer in answers:
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "poison_input"
        assert "input[0]" in answer.json()["error"]["message"]
        assert answer.headers["x-should-retry"] == "false"
    assert 3 <= deaths[0] <= MAX_DEATHS[poison], "it was tried again, the last time alone"
    assert deaths[1] == deaths[0], "the second time it reaches no worker"
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_an_input_that_comes_again_by_several_gateways(server: Server):
    """Its client never waits for the end, and comes again by a new connection, which any gateway may accept."""
    before = num_deaths(server)
    response = asked_until_answered(server, [101, KILL, 2002, 102])
    deaths = num_deaths(server) - before
    record("poison input by several gateways", deaths=deaths)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "poison_input")
    assert deaths <= MAX_DEATHS_OF_COPIES


def asked_until_answered(server: Server, ids: list[int]) -> httpx.Response:
    """All workers are up again when this returns."""
    response: httpx.Response | None = None
    for _ in range(30):
        with suppress(httpx.TimeoutException):
            response = httpx.post(f"{server.url}/v1/embeddings", json={"input": ids}, timeout=0.1)
        eventually(lambda: is_whole(server), 60)
        if response is not None:
            return response
    raise AssertionError("no answer, however often it was asked")


def test_a_worker_that_spins(server: Server, callers: list[Tenant]):
    """It neither answers nor dies, and its Python never returns: it is ended, and the log says where it was."""
    [answer], _ = among_good_requests(server, callers, "spinning worker", [[101, SPIN, 102]])
    assert answer.status_code == 500
    assert "begin_or_not" in server.stderr, "a traceback of the stuck worker"


@pytest.mark.parametrize(
    ("trial", "token_id", "status"),
    [("worker that answers late", SLEEP, 200), ("input that the model fails on", RAISE, 500)],
)
def test_what_is_late_or_raises_costs_no_worker(
    server: Server, callers: list[Tenant], trial: str, token_id: int, status: int
):
    """Late, but within its deadline: everybody waits, and nobody fails."""
    answers, deaths = among_good_requests(server, callers, trial, [[101, token_id, 102]] * pick(short=1, long=5))
    assert {answer.status_code for answer in answers} == {status}
    assert deaths[-1] == 0
