"""`vecd.gateway.http.body_budget`: who gives up what he holds, without a connection."""

from hypothesis import given, settings
from hypothesis import strategies as st

from vecd.gateway.http.body_budget import SMALL_PART_BYTES, BodyBudget

KIB = 1024


class Holding:
    """A connection, as it is seen here."""

    def __init__(self, arriving: BodyBudget, client: str) -> None:
        self.arriving = arriving
        self.address = client
        self.num_held_bytes = 0
        self.num_given_up = 0

    def drop_held(self) -> None:
        assert self.num_held_bytes > SMALL_PART_BYTES
        self.num_given_up += 1
        self.arriving.count(self, 0)

    def get(self, num_bytes: int) -> None:
        """More comes."""
        self.arriving.count(self, self.num_held_bytes + num_bytes)
        while (next_to_drop := self.arriving.next_to_drop(self)) is not None:
            assert isinstance(next_to_drop, Holding)
            next_to_drop.drop_held()


def holding(arriving: BodyBudget, client: str, num_bytes: int = 0) -> Holding:
    made = Holding(arriving, client)
    if num_bytes:
        made.get(num_bytes)
    return made


def test_one_address_has_half():
    arriving = BodyBudget(1000 * KIB)
    first, second = holding(arriving, "a", 400 * KIB), holding(arriving, "a", 100 * KIB)
    assert arriving.num_bytes == 500 * KIB
    second.get(1)
    assert (first.num_given_up, second.num_given_up) == (0, 1)
    assert holding(arriving, "b", 500 * KIB).num_given_up == 0
    assert arriving.num_bytes == 900 * KIB


def test_without_an_address_each_connection_stands_for_itself():
    arriving = BodyBudget(1000 * KIB)
    first = holding(arriving, "", 1000 * KIB)
    assert first.num_given_up == 0
    second = holding(arriving, "", 100 * KIB)
    assert (first.num_given_up, second.num_given_up) == (1, 0)
    second.get(901 * KIB)
    assert second.num_given_up == 1
    assert arriving.num_bytes == 0


def test_of_the_address_that_has_most_the_largest_part_goes():
    arriving = BodyBudget(1000 * KIB)
    parts = [holding(arriving, "a", size * KIB) for size in (100, 200, 150)]
    one = holding(arriving, "b", 350 * KIB)
    late = holding(arriving, "c", 250 * KIB)
    assert [part.num_given_up for part in (*parts, one, late)] == [0, 1, 0, 0, 0]


def test_who_sends_while_he_has_more_than_an_equal_part_is_refused_himself():
    arriving = BodyBudget(900 * KIB)
    first, second = holding(arriving, "a", 450 * KIB), holding(arriving, "b", 100 * KIB)
    third = holding(arriving, "c", 299 * KIB)
    third.get(52 * KIB)
    assert [part.num_given_up for part in (first, second, third)] == [0, 0, 1]


def test_small_parts_are_never_refused_and_keep_out_nobody():
    arriving = BodyBudget(1024 * KIB)
    small = [holding(arriving, client, SMALL_PART_BYTES) for client in "ab" for _ in range(16)]
    assert arriving.num_bytes == 2 * arriving.max_bytes
    large = holding(arriving, "c", 300 * KIB)
    assert not any(part.num_given_up for part in (*small, large))
    large.get(42 * KIB)
    assert large.num_given_up == 1


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 11), st.one_of(st.just(0), st.integers(1, 400 * KIB))), min_size=1, max_size=80
    )
)
@settings(deadline=None, derandomize=True, max_examples=3 * settings().max_examples)
def test_it_never_is_more_than_the_limit_and_the_small_parts(steps):
    arriving = BodyBudget(1000 * KIB)
    parts = [Holding(arriving, client) for client in ("", "a", "b", "c") for _ in range(3)]
    for number, num_bytes in steps:
        if num_bytes:
            parts[number].get(num_bytes)
        else:
            arriving.count(parts[number], 0)
        sizes = [part.num_held_bytes for part in parts]
        assert arriving.num_bytes == sum(sizes)
        num_small_bytes = sum(size for size in sizes if size <= SMALL_PART_BYTES)
        assert arriving.num_bytes <= arriving.max_bytes + num_small_bytes
        for client in "abc":
            of_client = [part.num_held_bytes for part in parts if part.address == client]
            assert sum(of_client) <= arriving.max_bytes // 2 + len(of_client) * SMALL_PART_BYTES
    for part in parts:
        arriving.count(part, 0)
    assert (arriving.num_bytes, len(arriving._num_of), len(arriving._large)) == (0, 0, 0)
