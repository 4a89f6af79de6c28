"""`vecd.gateway.http.budgets`, without a connection: who gives up what it holds, who waits for room, and who is in the
way."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from vecd.gateway.http.budgets import SMALL_PART_BYTES, BodyBudget, ResponseBudget

KIB = 1024


class Holding:
    """A connection, as it is seen here."""

    num_unsent_bytes = 0

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
@settings(derandomize=True, max_examples=3 * settings().max_examples)
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
    assert (arriving.num_bytes, len(arriving.num_of), len(arriving.large)) == (0, 0, 0)


# --- responses that wait to be read ------------------------------------------------------------------------------


class Receiving:
    """A connection, as it is seen here."""

    num_held_bytes = 0

    def __init__(self, unsent: ResponseBudget, address: str) -> None:
        self.unsent = unsent
        self.address = address
        self.num_unsent_bytes = 0
        self.has_room: asyncio.Future[None] | None = None

    def drop_held(self) -> None:
        raise AssertionError

    def take(self, num_bytes: int) -> "Receiving":
        self.has_room = self.unsent.take(self, num_bytes)
        return self

    @property
    def waits(self) -> bool:
        return self.has_room is not None and not self.has_room.done()


def receivers(unsent: ResponseBudget, *addresses: str) -> list[Receiving]:
    return [Receiving(unsent, address) for address in addresses]


async def test_one_address_has_half_and_the_others_need_not_wait_for_it():
    unsent = ResponseBudget(1000 * KIB)
    first, second, other = (each.take(300 * KIB) for each in receivers(unsent, "a", "a", "b"))
    assert [each.waits for each in (first, second, other)] == [False, True, False]
    assert unsent.num_bytes == 600 * KIB
    unsent.count(first, 201 * KIB)
    assert second.waits
    unsent.count(first, 200 * KIB)
    assert not second.waits
    assert unsent.num_bytes == 800 * KIB


async def test_the_least_holder_goes_first_and_then_who_came_first():
    unsent = ResponseBudget(1000 * KIB)
    held = [each.take(size * KIB) for each, size in zip(receivers(unsent, "a", "b", "c"), (400, 300, 300), strict=True)]
    of_b, first_of_c, second_of_c, of_d = (each.take(100 * KIB) for each in receivers(unsent, "b", "c", "c", "d"))
    waiting, order = {"b": of_b, "c1": first_of_c, "c2": second_of_c, "d": of_d}, []
    unsent.count(held[2], 200 * KIB)
    for _ in waiting:
        [let_in] = [name for name, each in waiting.items() if not each.waits and name not in order]
        order.append(let_in)
        unsent.count(held[0], held[0].num_unsent_bytes - 100 * KIB)
    assert order == ["d", "c1", "b", "c2"]


async def test_a_large_one_is_not_overtaken_for_ever_by_small_ones():
    unsent = ResponseBudget(1000 * KIB)
    first, second = (each.take(450 * KIB) for each in receivers(unsent, "a", "b"))
    large, small = receivers(unsent, "c", "d")
    large.take(300 * KIB)
    small.take(100 * KIB)
    assert large.waits
    assert small.waits
    unsent.count(first, 0)
    assert not large.waits
    assert not small.waits
    assert not second.waits


async def test_a_response_larger_than_the_room_is_made_alone_and_a_small_one_needs_none():
    unsent = ResponseBudget(1000 * KIB)
    large, small, next_large = receivers(unsent, "a", "a", "a")
    assert not large.take(5000 * KIB).waits
    assert unsent.num_bytes == 500 * KIB
    assert not small.take(64 * KIB).waits
    assert next_large.take(5000 * KIB).waits
    unsent.count(large, 0)
    assert not next_large.waits


async def test_without_an_address_each_connection_has_half():
    unsent = ResponseBudget(1000 * KIB)
    assert [each.take(400 * KIB).waits for each in receivers(unsent, "", "", "")] == [False, False, True]


async def test_who_is_closed_or_no_longer_waits_gives_its_room_to_the_next():
    unsent = ResponseBudget(1000 * KIB)
    first, second, third, fourth = (each.take(500 * KIB) for each in receivers(unsent, "a", "a", "a", "a"))
    assert second.has_room is not None
    second.has_room.cancel()
    await asyncio.sleep(0)
    unsent.forget(third)
    unsent.forget(first)
    assert not fourth.waits
    unsent.forget(fourth)
    assert (unsent.num_bytes, len(unsent.num_of), len(unsent.waiting)) == (0, 0, 0)


async def test_of_those_who_read_nothing_the_one_goes_that_is_in_the_way():
    unsent = ResponseBudget(1000 * KIB)
    of_a, of_b = receivers(unsent, "a", "b")
    of_a.take(500 * KIB)
    of_b.take(200 * KIB)
    assert not unsent.must_drop(of_a), "nobody waits"
    [same] = receivers(unsent, "a")
    same.take(100 * KIB)
    assert [unsent.must_drop(each) for each in (of_a, of_b)] == [True, False]
    unsent.forget(same)
    [other] = receivers(unsent, "c")
    other.take(400 * KIB)
    assert sorted((of_b, of_a), key=unsent.rank, reverse=True) == [of_a, of_b]
    assert unsent.must_drop(of_a)
    unsent.count(of_a, 0)
    assert not other.waits
    assert not unsent.must_drop(of_b)
    unsent.count(of_a, 5000 * KIB)  # more than it said
    assert unsent.must_drop(of_a)


async def test_without_an_address_only_the_one_that_waits_is_in_its_own_way():
    unsent = ResponseBudget(1000 * KIB)
    waiting, other = (each.take(400 * KIB) for each in receivers(unsent, "", ""))
    assert waiting.take(200 * KIB).waits
    assert [unsent.must_drop(each) for each in (waiting, other)] == [True, False]


@given(steps=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 600 * KIB), st.booleans()), max_size=80))
@settings(derandomize=True)
def test_it_never_is_more_than_the_limit_and_all_are_let_in_at_last(steps):
    async def trial() -> None:
        unsent = ResponseBudget(1000 * KIB)
        all_of_them = receivers(unsent, *("", "a", "b", "c") * 3)
        for number, num_bytes, closes in steps:
            each = all_of_them[number]
            if closes:
                unsent.forget(each)
                each.has_room = None
            elif not each.waits:
                unsent.count(each, 0)
                each.take(num_bytes)
            assert unsent.num_bytes == sum(each.num_unsent_bytes for each in all_of_them) <= unsent.max_bytes
            await asyncio.sleep(0)
        for _ in range(len(all_of_them)):
            for each in all_of_them:
                if not each.waits:
                    unsent.count(each, 0)
        assert not any(each.waits for each in all_of_them)
        assert (unsent.num_bytes, len(unsent.num_of), len(unsent.waiting)) == (0, 0, 0)

    asyncio.run(trial())
