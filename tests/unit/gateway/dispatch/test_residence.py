"""What a gateway lets wait for a model that is not ready, and what it tells the supervisor."""

import asyncio
from typing import Any

import pytest

from tests.support.supervision import VIRTUAL_TIME
from vecd.gateway.dispatch.residence import ENDS, MAX_WAITING, Residence
from vecd.gateway.errors import Unavailable
from vecd.shm.control import KeepAlive, Message, ModelAsked, ModelIs, ModelUsed, ModelWanted

GENERATION = 4
FAR_S = 1000.0


@pytest.fixture
def anyio_backend():
    return VIRTUAL_TIME


class Told:
    """A residence, what it has sent, and a clock that the test sets."""

    def __init__(self, *, keep_alive_s: float | None = None, num_gateways: int = 1) -> None:
        self.now = 100.0
        self.sent: list[Message] = []
        self.residence = Residence(
            GENERATION, keep_alive_s=keep_alive_s, num_gateways=num_gateways, send=self.sent.append,
            clock=lambda: self.now,
        )  # fmt: skip

    def change(self, state: str, **fields: Any) -> bool:
        return self.residence.change(ModelIs(GENERATION, state, **fields))

    def refusal(self, num_waiting: int = 0, in_s: float = FAR_S) -> Unavailable:
        with pytest.raises(Unavailable) as raised:
            self.residence.let_wait(num_waiting, self.now + in_s)
        return raised.value


def retry_after_of(error: Unavailable) -> str:
    return error.headers["retry-after"]


def test_the_supervisor_is_told_once_for_each_state():
    told = Told()
    for state in ("draining", "unloaded", "loading"):
        told.change(state)
        assert told.residence.is_awaited
        for _ in range(3):
            told.residence.let_wait(0, told.now + FAR_S)
        told.change(state, nbytes=7)  # no news
        told.residence.let_wait(0, told.now + FAR_S)
    assert told.sent == [ModelWanted(GENERATION)] * 2, "while it is loaded, that is known"
    told.change("ready")
    assert not told.residence.is_awaited


def test_a_failed_load_is_refused_until_the_next_try_is_due():
    told = Told()
    told.change("failed", reason="no file config.json", wait_s=20.0)
    told.now += 5
    error = told.refusal()
    assert (error.status, error.code, retry_after_of(error)) == (503, "model_failed", "15")
    assert "no file config.json" in error.message
    assert told.sent == []
    told.now += 15
    told.residence.let_wait(0, told.now + FAR_S)
    told.residence.let_wait(1, told.now + FAR_S)
    assert told.sent == [ModelWanted(GENERATION)]


def test_a_load_that_fails_again_is_news():
    told = Told()
    assert told.change("failed", reason="a", wait_s=1.0)
    told.now += 1
    told.residence.let_wait(0, told.now + FAR_S)
    assert not told.change("failed", reason="a", wait_s=0.0), "it is about to be tried"
    assert told.change("failed", reason="b", wait_s=2.0)
    told.now += 2
    told.residence.let_wait(0, told.now + FAR_S)
    assert told.sent == [ModelWanted(GENERATION)] * 2


@pytest.mark.parametrize(("num_gateways", "most"), [(1, MAX_WAITING), (4, MAX_WAITING // 4)])
def test_so_many_may_wait(num_gateways, most):
    told = Told(num_gateways=num_gateways)
    told.change("loading", wait_s=8.0)
    told.residence.let_wait(most - 1, told.now + FAR_S)
    told.now += 3
    error = told.refusal(num_waiting=most)
    assert (error.status, error.code, retry_after_of(error)) == (503, "model_loading", "5")


def test_a_deadline_before_the_expected_end_of_the_load_is_refused_and_the_model_is_wanted():
    told = Told()
    told.change("unloaded", wait_s=8.0)
    told.residence.let_wait(0, told.now + 8.0)
    error = told.refusal(in_s=7.9)
    assert (error.status, error.code, retry_after_of(error)) == (503, "model_loading", "8")
    assert told.sent == [ModelWanted(GENERATION)]


def test_a_load_that_takes_longer_than_expected_refuses_nothing():
    told = Told()
    told.change("loading", wait_s=2.0)
    told.now += 10
    told.residence.let_wait(0, told.now + 0.1)
    assert retry_after_of(told.residence.late_error()) == "1"


# --- those who wait for a state -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "before", "states"),
    [
        ("load", "unloaded", ["loading", "ready"]),
        ("load", "failed", ["loading", "failed"]),
        ("unload", "ready", ["draining", "unloaded", "loading"]),
    ],
)
async def test_an_operator_waits_until_the_state_is_reached(action, before, states):
    """Even one that is over at once, because requests wait."""
    told = Told()
    told.change(before, wait_s=60.0)
    asking = asyncio.ensure_future(told.residence.ask(action, 10.0))
    await asyncio.sleep(1)
    assert told.sent == [ModelAsked(GENERATION, action)]
    assert not asking.done()
    for state in states:
        told.change(state, wait_s=60.0)
    assert await asking


async def test_an_unload_that_a_load_follows_at_once_has_been_one() -> None:
    """Because requests wait, gateways may not be told of the state in between."""
    told = Told()
    told.change("ready", num_unloads={"idle": 1})
    asking = asyncio.ensure_future(told.residence.ask("unload", 10.0))
    await asyncio.sleep(1)
    told.change("draining", num_unloads={"idle": 1})
    told.change("loading", num_unloads={"idle": 1, "operator": 1})
    assert await asking
    loading = asyncio.ensure_future(told.residence.ask("load", 10.0))
    await asyncio.sleep(1)
    told.change("draining", num_loads=1)
    assert await loading


@pytest.mark.parametrize("action", ENDS)
async def test_what_is_so_already_is_asked_all_the_same(action):
    told = Told()
    told.change({"load": "ready", "unload": "unloaded"}[action])
    assert await told.residence.ask(action, 10.0)
    assert told.sent == [ModelAsked(GENERATION, action)]


async def test_nothing_is_left_of_one_who_does_not_wait_or_is_gone() -> None:
    told = Told()
    assert not await told.residence.ask("unload", 0.0)
    assert not await told.residence.ask("unload", 1.0)
    asking = asyncio.ensure_future(told.residence.ask("unload", 100.0))
    await asyncio.sleep(1)
    asking.cancel()
    await asyncio.wait([asking])
    assert told.residence._watchers == {}
    told.change("unloaded")


async def test_a_preload_waits_for_the_model() -> None:
    told = Told()
    await told.residence.until_ready(1.0)
    assert told.sent == []
    told.change("unloaded")
    waiting = [asyncio.ensure_future(told.residence.until_ready(100.0)) for _ in range(3)]
    await asyncio.sleep(1)
    assert told.sent == [ModelWanted(GENERATION)]
    told.change("loading")
    told.change("ready")
    await asyncio.gather(*waiting)
    told.change("unloaded")
    failing = asyncio.ensure_future(told.residence.until_ready(100.0))
    await asyncio.sleep(1)
    told.change("failed", reason="gone", wait_s=9.0)
    with pytest.raises(Unavailable, match="gone"):
        await failing
    told.change("loading")
    with pytest.raises(Unavailable, match="not loaded before"):
        await told.residence.until_ready(1.0)


async def test_the_end_of_the_server_ends_those_who_wait() -> None:
    told = Told()
    told.change("loading")
    waiting = [
        asyncio.ensure_future(told.residence.until_ready(100.0)),
        asyncio.ensure_future(told.residence.ask("unload", 100.0)),
    ]
    await asyncio.sleep(1)
    told.residence.end(lambda: Unavailable("the end", retry_after_s=1))
    for each in waiting:
        with pytest.raises(Unavailable, match="the end"):
            await each
    with pytest.raises(Unavailable, match="the end"):
        await told.residence.until_ready(100.0)


# --- use ------------------------------------------------------------------------------------------------------------


def test_use_is_reported_at_most_once_a_second_and_only_if_there_is_any():
    told = Told(keep_alive_s=5.0)
    told.residence.note_use(0, 0, 0.0)
    assert told.sent == []
    told.residence.note_use(1, 1, 0.0)
    for tenth in range(8):
        told.now += 0.1
        told.residence.note_use(2 + tenth, 1, 0.25)
    assert told.sent == [ModelUsed(GENERATION, 0.0, 1)]
    told.now += 0.25
    told.residence.note_use(9, 0, 0.5)
    assert told.sent[1:] == [ModelUsed(GENERATION, 0.5, 0)]
    for _ in range(40):
        told.now += 0.25
        told.residence.note_use(9, 0, 0.5)
    assert len(told.sent) == 2


def test_what_has_waited_across_an_unload_is_reported_again():
    told = Told(keep_alive_s=5.0)
    told.change("draining")
    told.residence.note_use(1, 1, 0.0)
    told.now += 10.0
    for state in ("unloaded", "loading", "ready"):
        told.change(state)
    told.residence.note_use(1, 1, 0.0)
    assert told.sent == [ModelUsed(GENERATION, 0.0, 1)] * 2
    told.now += 10.0
    told.residence.note_use(1, 1, 0.0)
    assert len(told.sent) == 2


async def test_a_preload_waits_across_an_unload_and_an_operator_does_not() -> None:
    told = Told()
    told.change("loading")
    operator = asyncio.ensure_future(told.residence.ask("load", 100.0))
    await asyncio.sleep(1)
    assert not told.residence.has_waiting_clients
    client = asyncio.ensure_future(told.residence.until_ready(100.0))
    await asyncio.sleep(1)
    assert told.residence.has_waiting_clients
    told.change("ready")
    await asyncio.gather(operator, client)
    assert not told.residence.has_waiting_clients


def test_when_it_expires():
    told = Told(keep_alive_s=5.0)
    told.change("ready")
    told.now += 2
    assert told.residence.expires_in_s == 3.0
    told.residence.note_use(1, 1, 0.0)
    assert told.residence.expires_in_s == 5.0
    told.now += 9
    told.residence.note_use(1, 1, 0.0)  # it is still being answered
    assert told.residence.expires_in_s == 5.0
    told.now += 9
    assert told.residence.expires_in_s == 0.0
    told.residence.keep_alive(None)
    assert told.residence.expires_in_s is None


def test_a_client_s_keep_alive_is_sent_when_it_changes():
    told = Told(keep_alive_s=5.0)
    for seconds in (5.0, 5.0, None, None, 0.0, 60.0, 60.0):
        told.residence.keep_alive(seconds)
    assert told.sent == [KeepAlive(GENERATION, seconds) for seconds in (5.0, None, 0.0, 60.0)]
    told.change("unloaded")
    assert told.residence.keep_alive_s == 5.0, "the configured one counts for the next load"
    told.residence.keep_alive(60.0)
    assert told.sent[4:] == [KeepAlive(GENERATION, 60.0)]


def test_of_several_gateways_the_last_word_counts():
    told = Told(num_gateways=2)
    for _ in range(20):
        told.residence.keep_alive(60.0)
        told.now += 0.25
    assert len(told.sent) == 5
