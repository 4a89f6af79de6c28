from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vecd.launch.processes.eviction import Eviction, Occupant, choose, slice_s

MB = 1 << 20
_IDLE = Occupant(
    "a", 100 * MB, 30 * MB, use=0.1, reload_s=1.0, is_busy=False, is_pinned=False, resident_s=60.0
)  # fmt: skip
_BUSY = replace(_IDLE, use=0.9, is_busy=True)


def _choose(*occupants, needed_mb=80, waited_s=0.0, reload_s=1.0):
    return choose(occupants, needed_mb * MB, waited_s=waited_s, reload_s=reload_s)


def test_an_idle_one_is_unloaded_at_once():
    assert _choose(_IDLE) == [Eviction("a", parks=False)]


def test_nothing_is_evicted_where_nothing_is_needed():
    assert _choose(_IDLE, needed_mb=0) == []


def test_a_pinned_one_stays_however_long_a_load_waits():
    assert _choose(replace(_IDLE, is_pinned=True), replace(_BUSY, is_pinned=True), waited_s=1e6) is None


@pytest.mark.parametrize(
    ("own_s", "load_s", "expected_s"), [(0.2, 0.1, 5.0), (2.0, 0.1, 8.0), (0.1, 3.0, 12.0)]
)  # fmt: skip
def test_one_younger_than_its_slice_stays(own_s, load_s, expected_s):
    young = replace(_IDLE, reload_s=own_s, resident_s=expected_s - 0.01)
    assert _choose(young, reload_s=load_s, waited_s=1e6) is None
    assert _choose(replace(young, resident_s=expected_s), reload_s=load_s) is not None


def test_idle_ones_go_before_busy_ones_although_these_are_cheaper():
    busy = replace(_BUSY, model="busy", use=0.0, resident_s=1e6)
    assert _choose(busy, _IDLE, waited_s=1e6) == [Eviction("a", parks=False)]


@pytest.mark.parametrize(
    "costlier",
    [
        {"use": 0.2},
        {"reload_s": 2.0},
        {"nbytes": 90 * MB},
        {"resident_s": 59.0},
    ],
)
def test_the_cheapest_for_its_bytes_goes_first(costlier):
    assert _choose(replace(_IDLE, model="b", **costlier), _IDLE) == [Eviction("a", parks=False)]


def test_parking_is_enough_where_it_frees_enough():
    assert _choose(_IDLE, needed_mb=30) == [Eviction("a", parks=True)]


def test_a_parked_one_gives_back_the_rest():
    assert _choose(replace(_IDLE, nbytes=70 * MB, parked_nbytes=0), needed_mb=30) == [Eviction("a", parks=False)]


def test_several_go_where_one_is_not_enough_and_the_costliest_is_parked():
    costlier = replace(_IDLE, model="b", use=0.5)
    assert _choose(costlier, _IDLE, needed_mb=120) == [Eviction("a", parks=False), Eviction("b", parks=True)]


def test_a_small_one_stays_where_a_larger_one_is_enough():
    small = replace(_IDLE, model="small", nbytes=10 * MB, parked_nbytes=5 * MB, use=0.0)
    assert _choose(small, _IDLE) == [Eviction("a", parks=False)]


def test_a_busy_one_goes_only_for_a_load_that_has_waited_for_a_slice():
    assert _choose(_BUSY, waited_s=5.0) is None
    assert _choose(_BUSY, waited_s=5.1) == [Eviction("a", parks=False)]


def test_of_busy_ones_the_longest_resident_goes():
    assert _choose(_BUSY, replace(_BUSY, model="older", use=1.9, resident_s=61.0), waited_s=6.0) == [
        Eviction("older", parks=False)
    ]


def test_no_one_goes_where_all_together_are_not_enough():
    assert _choose(_IDLE, replace(_BUSY, model="b"), needed_mb=201, waited_s=1e6) is None


_OCCUPANTS = st.lists(
    st.builds(
        Occupant,
        st.text("abcdefgh", min_size=1, max_size=4),
        st.integers(50, 1000),
        st.integers(0, 50),
        st.floats(0, 8),
        st.floats(0, 20),
        st.booleans(),
        st.booleans(),
        st.floats(0, 200),
    ),
    max_size=6,
    unique_by=lambda each: each.model,
)


@given(_OCCUPANTS, st.integers(0, 4000), st.floats(0, 200), st.floats(0, 20))
def test_what_goes_is_enough_and_may_go(occupants, needed_nbytes, waited_s, reload_s):
    chosen = choose(occupants, needed_nbytes, waited_s=waited_s, reload_s=reload_s)
    by_name = {each.model: each for each in occupants}
    may_go = [
        each
        for each in occupants
        if not each.is_pinned
        and each.resident_s >= slice_s(each, reload_s)
        and (not each.is_busy or waited_s > slice_s(each, reload_s))
    ]
    if chosen is None:
        assert sum(each.nbytes for each in may_go) < needed_nbytes
        return
    assert {eviction.model for eviction in chosen} <= {each.model for each in may_go}
    freed = [by_name[e.model].parked_nbytes if e.parks else by_name[e.model].nbytes for e in chosen]
    assert sum(freed) >= needed_nbytes
    assert all(sum(freed) - each < needed_nbytes for each in freed), "each is needed"


@dataclass
class _Played:
    """Models of 100 MB that share a budget, each always requested. A load takes `reload_s`; evictions take no time."""

    models: tuple[str, ...]
    budget_mb: int
    reload_s: float = 3.0
    step_s: float = 0.25

    def run(self, duration_s):
        """The times of loads, and the served seconds and the longest wait of each model."""
        now = 0.0
        loads: list[tuple[float, str]] = []
        served_s: dict[str, float] = dict.fromkeys(self.models, 0.0)
        longest_wait_s = served_s.copy()
        wanted = dict.fromkeys(self.models, 0.0)
        """Since when each waits, in the order of arrival."""
        loading: dict[str, float] = {}
        ready: dict[str, float] = {}
        while now < duration_s:
            for model in [model for model, since in loading.items() if now - since >= self.reload_s]:
                ready[model] = now
                del loading[model]
            if wanted:
                self._let_one_in(now, loads, wanted, loading, ready, longest_wait_s)
            for model in ready:
                served_s[model] += self.step_s
            now += self.step_s
        return loads, served_s, longest_wait_s

    def _let_one_in(self, now, loads, wanted, loading, ready, longest_wait_s):
        model, since = next(iter(wanted.items()))
        needed_mb = 100 * (len(ready) + len(loading) + 1) - self.budget_mb
        occupants = [
            Occupant(each, 100 * MB, 10 * MB, 1.0, self.reload_s, True, False, now - at) for each, at in ready.items()
        ]
        longest_wait_s[model] = max(longest_wait_s[model], now - since)
        chosen = choose(occupants, needed_mb * MB, waited_s=now - since, reload_s=self.reload_s)
        if chosen is None:
            return
        for eviction in chosen:
            del ready[eviction.model]
            wanted[eviction.model] = now
        del wanted[model]
        loading[model] = now
        loads.append((now, model))


@pytest.mark.parametrize(("num_models", "budget_mb"), [(3, 200), (2, 100), (5, 200)])
def test_models_that_do_not_fit_together_take_turns_without_thrashing(num_models, budget_mb):
    models = tuple("abcde"[:num_models])
    num_fitting, slice_is_s = budget_mb // 100, 12.0
    loads, served_s, longest_wait_s = _Played(models, budget_mb).run(600.0)
    per_minute = Counter(int(at // 60) for at, _ in loads)
    assert max(per_minute.values()) <= num_fitting * 60 / slice_is_s + num_fitting
    gaps = [
        later - earlier
        for model in models
        for earlier, later in zip(*[[at for at, each in loads if each == model][i:] for i in (0, 1)], strict=False)
    ]
    assert min(gaps) >= slice_is_s, "none comes back sooner than it may be evicted"
    fair_s = 600.0 * num_fitting / num_models
    assert all(served_s[model] >= 0.6 * fair_s for model in models), (served_s, fair_s)
    assert max(longest_wait_s.values()) <= (num_models - num_fitting + 1) * (slice_is_s + 3.0 + 1.0)
