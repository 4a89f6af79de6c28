"""When a model is loaded and when it goes, with a clock that the test plays; and which one goes for another."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vecd.launch.residency import Decision, LoadHistory, ModelLife, choose, decide, held_nbytes, slice_s
from vecd.shm.control import ModelState

GATEWAY, OTHER = (0, 1), (1, 1)


def made(generation: int = 1, **changes: Any) -> ModelLife:
    told = {"keep_alive_s": 10.0, "pinned": False}
    config = SimpleNamespace(**{name: changes.pop(name, default) for name, default in told.items()})
    plan = SimpleNamespace(gateway=config, settings=SimpleNamespace(request_timeout=300.0))
    model = changes.pop("model", f"m{generation}")
    pool: Any = SimpleNamespace(generation=generation, model=model, plan=plan)
    values: dict[str, Any] = {"total_nbytes": 100, "history": LoadHistory(load_s=1.0), "since": 0.0}
    return ModelLife(pool, **{**values, **changes})


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
    life.begin_draining("memory", 1)
    life.want(2)
    assert life.message(0, 2).state == "draining"
    life.end_draining(3)
    assert life.message(0, 3, has_just_gone=True).state == "unloaded"
    message = life.message(4.0, 3)
    assert (message.state, message.reason, message.nbytes) == ("loading", "", 100)
    assert message.wait_s == round(4.0 + life.load_s, 3), "after the loads before it"
    assert (life.state, life.held_nbytes) == (ModelState.UNLOADED, 0)


def test_what_the_first_load_has_taken_to_choose_an_engine_does_not_count() -> None:
    life = made(history=LoadHistory(), total_nbytes=300_000_000)
    assert (life.load_s, life.reload_s) == (2.0, 2.0)
    seen = []
    for seconds in (20, 1, 3):
        life.begin_load(0)
        life.become_ready(seconds)
        seen.append((life.load_s, life.reload_s))
        life.begin_draining("memory", seconds)
        life.end_draining(seconds)
    assert seen == [(20, 2.0), (1, 1), (3, 3)]


def test_nothing_is_due_for_a_model_that_stays() -> None:
    assert decide([loaded(keep_alive_s=None)], None, 10**6) == ([], None)


def test_no_load_passes_one_that_waits_for_memory() -> None:
    ready = loaded(1, keep_alive_s=None)
    large, small = made(2, total_nbytes=150), made(3, total_nbytes=10)
    large.want(1)
    small.want(2)
    lives = [ready, large, small]
    assert decide(lives, 100, 3) == ([], 4.0), "the ready one is within its slice"
    assert decide(lives, 100, 10) == ([Decision("unload", ready, "memory")], 11.0)
    ready.begin_draining("memory", 10)
    assert decide(lives, 100, 11) == ([], 12.0), "what it gives back is enough"
    ready.end_draining(12)
    assert decide(lives, 200, 12)[0] == [Decision("load", large), Decision("load", small)]


def test_three_that_fit_one_at_a_time_wait_for_their_turns() -> None:
    lives = [made(generation) for generation in (1, 2, 3)]
    for life in lives:
        life.want(life.pool.generation)
    assert decide(lives, 100, 5) == ([Decision("load", lives[0])], 6.0), "the others have no room yet, and may wait"
    lives[0].begin_load(5)
    assert decide(lives, 0, 6) == ([], 7.0)


def test_a_model_that_is_being_replaced_counts_once_and_stays() -> None:
    before, after = loaded(1, model="a", keep_alive_s=None), loaded(2, model="a", keep_alive_s=None)
    waiting = made(3)
    waiting.want(1)
    assert held_nbytes([before, after, waiting]) == 100
    assert decide([before, after, waiting], 40, 100) == ([], 101.0), "neither would give anything back"
    pinned = [loaded(number, model="a", keep_alive_s=None, pinned=True) for number in (1, 2)]
    assert decide([*pinned, waiting], 100, 100) == ([Decision("load", waiting)], None)


def test_requests_that_wait_across_an_unload_keep_it() -> None:
    life = loaded(keep_alive_s=0.0)
    life.use(GATEWAY, 0.0, 1, 1)
    life.begin_draining("operator", 2)
    life.end_draining(3)
    life.begin_load(3)
    life.become_ready(4)
    assert life.idle_at(10) is None


def test_what_never_fits_fails_at_once_and_lets_the_next_pass() -> None:
    pinned, large, small = loaded(1, pinned=True), made(2, total_nbytes=1 << 30), made(3)
    large.want(1)
    small.want(2)
    refused, load = decide([pinned, large, small], 100, 3)[0]
    assert (refused.action, refused.life) == ("refuse", large)
    assert "1024 MB of the budget are missing" in refused.reason
    assert load == Decision("load", small)


def test_an_operator_ends_what_waits_and_what_is_loaded() -> None:
    waiting, ready = made(1), loaded(2)
    waiting.want(0)
    for life in (waiting, ready):
        life.ask_to_go()
    assert not waiting.is_waiting
    assert decide([waiting, ready], None, 1)[0] == [Decision("unload", ready, "operator")]


# --- which one goes -------------------------------------------------------------------------------------------------


MB = 1 << 20
NOW = 1000.0


def resident(
    model: str = "a",
    nbytes: int = 100 * MB,
    use: float = 0.1,
    reload_s: float = 1.0,
    is_busy: bool = False,
    is_pinned: bool = False,
    resident_s: float = 60.0,
) -> ModelLife:
    return made(
        model=model, held_nbytes=nbytes, pinned=is_pinned, since=NOW - resident_s, state=ModelState.READY,
        history=LoadHistory(num_loads=2, load_s=reload_s), used_at=NOW if is_busy else 0.0, _use=use, _use_at=NOW,
    )  # fmt: skip


def waiting(waited_s: float, reload_s: float) -> ModelLife:
    return made(history=LoadHistory(num_loads=2, load_s=reload_s), wanted_at=NOW - waited_s)


def chosen_of(*lives: ModelLife, needed_mb: int = 80, waited_s: float = 0.0, reload_s: float = 1.0) -> list[str] | None:
    chosen = choose(lives, needed_mb * MB, waiting(waited_s, reload_s), NOW)
    return None if chosen is None else [each.model for each in chosen]


@pytest.mark.parametrize(("own_s", "load_s", "expected_s"), [(0.2, 0.1, 5.0), (2.0, 0.1, 8.0), (0.1, 3.0, 12.0)])
def test_one_younger_than_its_slice_stays(own_s: float, load_s: float, expected_s: float) -> None:
    young = resident(reload_s=own_s, resident_s=expected_s - 0.01)
    assert chosen_of(young, reload_s=load_s, waited_s=900) is None
    assert chosen_of(resident(reload_s=own_s, resident_s=expected_s), reload_s=load_s) is not None


@pytest.mark.parametrize(
    ("others", "waited_s"),
    [
        ([resident("busy", use=0.0, is_busy=True, resident_s=1e6)], 900),
        ([resident("b", use=0.2)], 0),
        ([resident("b", reload_s=2.0)], 0),
        ([resident("b", nbytes=90 * MB)], 0),
        ([resident("b", resident_s=59.0)], 0),
        ([resident("small", nbytes=10 * MB, use=0.0)], 0),
    ],
    ids=["busy ones go last, if cheaper", "used less", "loaded faster", "larger", "longer resident", "enough alone"],
)
def test_the_cheapest_for_its_bytes_goes_first(others: list[ModelLife], waited_s: float) -> None:
    assert chosen_of(*others, resident(), waited_s=waited_s) == ["a"]


def test_of_busy_ones_the_longest_resident_goes() -> None:
    older = resident("older", use=1.9, is_busy=True, resident_s=61.0)
    assert chosen_of(resident(use=0.9, is_busy=True), older, waited_s=6.0) == ["older"]


_RESIDENT = st.lists(
    st.builds(
        resident,
        st.text("abcdefgh", min_size=1, max_size=4),
        st.integers(50, 1000),
        st.floats(0, 8),
        st.floats(0.01, 20),
        st.booleans(),
        st.booleans(),
        st.floats(0, 200),
    ),
    max_size=6,
)


@given(_RESIDENT, st.integers(0, 4000), st.floats(0, 200), st.floats(0.01, 20))
def test_what_goes_is_enough_and_may_go(
    lives: list[ModelLife], needed_nbytes: int, waited_s: float, reload_s: float
) -> None:
    load = waiting(waited_s, reload_s)
    chosen = choose(lives, needed_nbytes, load, NOW)
    assert load.wanted_at is not None
    may_go = [
        each
        for each in lives
        if not each.is_pinned
        and NOW - each.since >= slice_s(each, reload_s)
        and (not each.is_busy(NOW) or NOW - load.wanted_at > slice_s(each, reload_s))
    ]
    if chosen is None:
        assert sum(each.held_nbytes for each in may_go) < needed_nbytes
        return
    assert {id(each) for each in chosen} <= {id(each) for each in may_go}
    freed = [each.held_nbytes for each in chosen]
    assert sum(freed) >= needed_nbytes
    assert all(sum(freed) - each < needed_nbytes for each in freed), "each is needed"
