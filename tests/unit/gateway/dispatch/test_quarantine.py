from types import SimpleNamespace
from typing import Any

import pytest

from vecd.gateway.dispatch.known_inputs import KEPT_S
from vecd.gateway.dispatch.quarantine import MAX_KEPT, Quarantine
from vecd.gateway.types.errors import PoisonInput

POISON, OTHER = b"\x0d\0\0\0", b"\x0e\0\0\0"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def sequences(start: int, *token_ids: bytes) -> list[Any]:
    """Of a request's inputs from `start` on."""
    return [SimpleNamespace(token_ids=ids, index=index) for index, ids in enumerate(token_ids, start)]


def test_what_is_kept_is_refused_by_name_and_nothing_else():
    quarantine = Quarantine(b"key")
    quarantine.add(quarantine.digest(POISON))
    quarantine.check(sequences(0, OTHER, POISON + OTHER))
    with pytest.raises(PoisonInput, match=r"^'input\[8\]' ended its worker") as caught:
        quarantine.check(sequences(7, OTHER, POISON, POISON))
    assert (caught.value.status, caught.value.code) == (500, "poison_input")
    assert caught.value.headers == {"x-should-retry": "false"}


def test_a_digest_is_understood_by_whoever_has_the_key_and_says_nothing_to_others():
    ours, theirs, stranger = Quarantine(b"key"), Quarantine(b"key"), Quarantine(b"another")
    digest = ours.digest(POISON)
    for quarantine in (theirs, stranger):
        quarantine.add(digest)
    assert theirs.holds(POISON)
    assert not stranger.holds(POISON)


def test_it_is_forgotten_after_its_time_and_later_when_it_is_told_again():
    clock = Clock()
    quarantine = Quarantine(b"key", clock)
    digests = [quarantine.digest(ids) for ids in (POISON, OTHER)]
    for digest in digests:
        quarantine.add(digest)
    clock.now = KEPT_S / 2
    quarantine.add(digests[0])
    clock.now = KEPT_S
    assert quarantine.holds(POISON)
    assert not quarantine.holds(OTHER)
    clock.now = 1.5 * KEPT_S
    assert not quarantine.holds(POISON)
    assert len(quarantine) == 0


def test_of_too_many_the_oldest_is_forgotten():
    quarantine = Quarantine(b"key")
    for number in range(MAX_KEPT + 3):
        quarantine.add(quarantine.digest(number.to_bytes(4, "little")))
    assert len(quarantine) == MAX_KEPT
    held = [quarantine.holds(number.to_bytes(4, "little")) for number in (0, 2, 3, MAX_KEPT + 2)]
    assert held == [False, False, True, True]


def test_nothing_is_hashed_while_nothing_is_kept():
    quarantine = Quarantine(b"key")
    untouchable: list[Any] = [object()]  # has no token ids to hash
    quarantine.check(untouchable)
    quarantine.add(quarantine.digest(POISON))
    with pytest.raises(AttributeError):
        quarantine.check(untouchable)
