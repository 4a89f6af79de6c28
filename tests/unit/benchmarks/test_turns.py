import pytest

from benchmarks.turns import alternate, fastest, median_interval, paired_ratios, passes_of_turn, take_turns


class Machine:
    """A clock that only moves while somebody works, and notes who did."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def clock(self) -> float:
        return self.now

    def worker(self, name: str, *seconds: float):
        remaining = list(seconds)

        def run() -> None:
            self.log.append(name)
            self.now += remaining.pop(0) if len(remaining) > 1 else remaining[0]

        return run


def test_each_round_begins_with_another_contender() -> None:
    machine = Machine()
    contenders = {name: machine.worker(name, 1.0) for name in "abc"}
    take_turns(contenders, num_rounds=3, turn_s=0.0, clock=machine.clock)
    assert "".join(machine.log) == "aabbcc" + "bbccaa" + "ccaabb"  # one pass to warm up, one that counts


def test_the_first_pass_of_a_turn_is_not_counted_and_the_others_median_is() -> None:
    machine = Machine()
    seconds = take_turns({"a": machine.worker("a", 50.0, 1.0, 9.0, 2.0)}, 1, turn_s=12.0, clock=machine.clock)
    assert seconds == {"a": [2.0]}


def test_a_turn_lasts_as_long_as_asked() -> None:
    machine = Machine()
    take_turns({"a": machine.worker("a", 0.25)}, 2, turn_s=1.0, clock=machine.clock)
    assert len(machine.log) == 2 * (1 + 4)


def test_the_fastest_is_whose_best_pass_is_shortest() -> None:
    machine = Machine()
    candidates = {"steady": machine.worker("steady", 3.0), "disturbed": machine.worker("disturbed", 4.0, 2.0)}
    assert fastest(candidates, clock=machine.clock) == "disturbed"


def test_who_is_far_behind_gets_one_look() -> None:
    machine = Machine()
    passes = {
        "slow": machine.worker("slow", 9.0),
        "near": machine.worker("near", 1.2),
        "fast": machine.worker("fast", 1),
    }
    fastest(passes, machine.clock)
    assert machine.log == ["slow", "near", "fast", "near", "fast", "fast"]


def test_a_slow_minute_of_the_machine_cancels_out_of_a_ratio() -> None:
    assert paired_ratios([10.0, 1.0, 10.0], [5.0, 0.5, 5.0]) == pytest.approx([2.0, 2.0, 2.0])


@pytest.mark.parametrize(
    ("num_values", "expected"),
    [
        (4, None),  # 1 - 2 / 2**4 = 0.875
        (5, (0, 4)),  # 1 - 2 / 2**5 = 0.94
        (7, (0, 6)),  # without the outermost 1 - 2 * 8 / 2**7 = 0.875
        (8, (1, 6)),  # 1 - 2 * 9 / 2**8 = 0.93
        (20, (5, 14)),  # 0.96; one more left out would be 0.88
    ],
)
def test_an_interval_is_as_narrow_as_its_confidence_allows(num_values: int, expected: tuple[int, int] | None) -> None:
    shuffled = [float(value) for value in (*range(1, num_values, 2), *range(0, num_values, 2))]
    assert median_interval(shuffled) == expected


def test_turns_of_any_kind_alternate() -> None:
    log: list[str] = []

    def turn(name: str) -> int:
        log.append(name)
        return len(log)

    figures = alternate({"a": lambda: turn("a"), "b": lambda: turn("b")}, num_rounds=2)
    assert "".join(log) == "ab" + "ba"
    assert figures == {"a": [1, 4], "b": [2, 3]}


def test_a_warm_up_is_as_long_as_asked_and_not_counted() -> None:
    machine = Machine()
    passes = passes_of_turn(machine.worker("a", 3.0, 2.0, 1.0), turn_s=2.0, warmup_s=4.0, clock=machine.clock)
    assert passes == [1.0, 1.0]
