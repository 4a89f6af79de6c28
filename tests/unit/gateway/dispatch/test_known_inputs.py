from vecd.gateway.dispatch.known_inputs import KEPT_S, KnownInputs


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_input_is_known_for_a_while_after_it_was_put_last():
    clock = Clock()
    known: KnownInputs[str] = KnownInputs(10, clock)
    known.put("a", "first")
    clock.now = 0.5 * KEPT_S
    known.put("a", "second")
    known.put("b", "other")
    clock.now = 1.4 * KEPT_S
    assert known.find("a") == "second"
    clock.now = 1.5 * KEPT_S
    assert known.find("a") is None
    assert len(known) == 0


def test_what_is_forgotten_is_not_found():
    known: KnownInputs[str] = KnownInputs(10)
    known.put("a", "value")
    known.forget("a")
    known.forget("never seen")
    assert known.find("a") is None
    assert not known


def test_of_too_many_inputs_the_one_that_was_put_first_is_forgotten():
    known: KnownInputs[int] = KnownInputs(100)
    for number in range(100):
        known.put(str(number), number)
    known.put("0", 0)
    known.put("one more", 1)
    assert len(known) == 100
    assert known.find("0") == 0
    assert known.find("1") is None
