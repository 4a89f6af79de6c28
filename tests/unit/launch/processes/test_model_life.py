"""When a model is loaded, when it goes, and what gateways are told, with a clock that the test plays."""

from typing import Any

import pytest

from vecd.launch.processes.eviction import choose
from vecd.launch.processes.model_life import (
    BeginLoad,
    BeginUnload,
    LoadHistory,
    ModelLife,
    RefuseLoad,
    decide,
    held_nbytes,
)
from vecd.shm.residence import ModelState

GATEWAY, OTHER = (0, 1), (1, 1)


def made(generation: int = 1, **changes: Any) -> ModelLife:
    values: dict[str, Any] = {
        "generation": generation, "model": f"m{generation}", "keep_alive_s": 10.0, "is_pinned": False,
        "can_park": True, "total_nbytes": 100, "parked_nbytes": 60, "request_timeout_s": 300.0,
        "history": LoadHistory(load_s=1.0), "since": 0.0,
    }  # fmt: skip
    return ModelLife(**{**values, **changes})


def loaded(generation: int = 1, now: float = 0.0, **changes: Any) -> ModelLife:
    life = made(generation, **changes)
    life.begin_load(now)
    life.become_ready(now)
    life.measure_at = None
    return life


def test_the_time_that_it_stays_begins_with_the_last_answer_of_all_gateways() -> None:
    life = loaded()
    assert life.idle_at(0) == 11.5
    life.use(GATEWAY, 0.1, 2, 5)
    life.use(OTHER, 0.1, 1, 6)
    life.use(GATEWAY, 0.1, 0, 7)
    assert life.idle_at(8) is None
    assert life.idle_at(400) == 18.5, "no request takes so long"
    life.forget_gateways([GATEWAY])
    assert life.idle_at(8) == 18.5
    assert loaded(keep_alive_s=None).idle_at(10**6) is None


def test_pauses_double_and_end_with_a_load() -> None:
    life = made()
    pauses = []
    for _ in range(11):
        life.want(0)
        life.begin_load(0)
        pauses.append(life.fail("no such layer", 0))
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert life.message(0, 0).wait_s == 300
    life.begin_load(400)
    life.become_ready(402)
    assert life.history.load_s == 2
    assert life.fail("it died", 500) == 1


def test_what_waits_is_told_as_loading_unless_it_has_just_gone() -> None:
    life = loaded()
    life.begin_draining("memory", 1, parks=True)
    life.want(2)
    assert life.message(0, 2).state == "draining"
    life.end_draining(3)
    assert life.message(0, 3, has_just_gone=True).state == "parked"
    message = life.message(4.0, 3)
    assert (message.state, message.reason, message.nbytes) == ("loading", "", 100)
    assert 4 < message.wait_s < 5, "a fork, after the loads before it"
    assert (life.state, life.held_nbytes) == (ModelState.PARKED, 60)


def test_what_the_first_load_has_taken_to_choose_an_engine_does_not_count() -> None:
    life = made(history=LoadHistory(), total_nbytes=300_000_000)
    assert (life.load_s, life.reload_s) == (2.0, 2.0)
    seen = []
    for seconds in (20, 1, 3):
        life.begin_load(0)
        life.become_ready(seconds)
        seen.append((life.load_s, life.reload_s))
        life.begin_draining("memory", seconds, parks=False)
        life.end_draining(seconds)
    assert seen == [(20, 2.0), (1, 1), (3, 3)]


def test_a_gpu_model_is_never_parked() -> None:
    life = loaded(can_park=False, parked_nbytes=0)
    life.begin_draining("operator", 1, parks=True)
    life.end_draining(2)
    assert (life.state, life.held_nbytes) == (ModelState.UNLOADED, 0)


def test_nothing_is_due_for_a_model_that_stays() -> None:
    assert decide([loaded(keep_alive_s=None)], None, choose, 10**6) == ([], None)


def test_no_load_passes_one_that_waits_for_memory() -> None:
    ready = loaded(1, keep_alive_s=None)
    large, small = made(2, total_nbytes=150), made(3, total_nbytes=10)
    large.want(1)
    small.want(2)
    lives = [ready, large, small]
    assert decide(lives, 100, choose, 3) == ([], 4.0), "the ready one is within its slice"
    assert decide(lives, 100, choose, 10) == ([BeginUnload(ready, "memory", False)], 11.0)
    ready.begin_draining("memory", 10, parks=False)
    assert decide(lives, 100, choose, 11) == ([], 12.0), "what it gives back is enough"
    ready.end_draining(12)
    assert decide(lives, 200, choose, 12)[0] == [BeginLoad(large), BeginLoad(small)]


def test_three_that_fit_one_at_a_time_wait_for_their_turns() -> None:
    lives = [made(generation) for generation in (1, 2, 3)]
    for life in lives:
        life.want(life.generation)
    assert decide(lives, 100, choose, 5) == ([BeginLoad(lives[0])], 6.0), "the others have no room yet, and may wait"
    lives[0].begin_load(5)
    assert decide(lives, 0, choose, 6) == ([], 7.0)


def test_a_model_that_is_being_replaced_counts_once_and_stays() -> None:
    before, after = loaded(1, model="a", keep_alive_s=None), loaded(2, model="a", keep_alive_s=None)
    waiting = made(3)
    waiting.want(1)
    assert held_nbytes([before, after, waiting]) == 100
    assert decide([before, after, waiting], 40, choose, 100) == ([], 101.0), "neither would give anything back"
    pinned = [loaded(number, model="a", keep_alive_s=None, is_pinned=True) for number in (1, 2)]
    assert decide([*pinned, waiting], 100, choose, 100) == ([BeginLoad(waiting)], None)


def test_a_parked_model_goes_at_once() -> None:
    parked = loaded(1, keep_alive_s=None)
    parked.begin_draining("operator", 9, parks=True)
    parked.end_draining(9)
    assert not parked.is_parking
    waiting = made(2)
    waiting.want(10)
    [decision], _ = decide([parked, waiting], 50, choose, 10)
    assert decision == BeginUnload(parked, "memory", False)


def test_what_an_operator_ends_is_loaded_only_afterwards() -> None:
    parked = loaded(1, keep_alive_s=None)
    parked.begin_draining("operator", 9, parks=True)
    parked.end_draining(9)
    parked.ask_to_go("unload")
    parked.want(10)
    assert decide([parked], None, choose, 10)[0] == [BeginUnload(parked, "operator", False)]


def test_requests_that_wait_across_an_unload_keep_it() -> None:
    life = loaded(keep_alive_s=0.0)
    life.use(GATEWAY, 0.0, 1, 1)
    life.begin_draining("operator", 2, parks=False)
    life.end_draining(3)
    life.begin_load(3)
    life.become_ready(4)
    assert life.idle_at(10) is None


def test_what_never_fits_fails_at_once_and_lets_the_next_pass() -> None:
    pinned, large, small = loaded(1, is_pinned=True), made(2, total_nbytes=1 << 30), made(3)
    large.want(1)
    small.want(2)
    refused, load = decide([pinned, large, small], 100, choose, 3)[0]
    assert isinstance(refused, RefuseLoad)
    assert refused.life is large
    assert "1024 MB of the budget are missing" in refused.reason
    assert load == BeginLoad(small)


@pytest.mark.parametrize("action", ["unload", "park"])
def test_an_operator_ends_what_waits_and_what_is_loaded(action: str) -> None:
    waiting, ready = made(1), loaded(2)
    waiting.want(0)
    for life in (waiting, ready):
        life.ask_to_go(action)
    assert not waiting.is_waiting
    assert decide([waiting, ready], None, choose, 1)[0] == [BeginUnload(ready, "operator", action == "park")]
