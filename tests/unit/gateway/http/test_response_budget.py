"""`vecd.gateway.http.response_budget`: who waits for room, and who is in the way, without a connection."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from vecd.gateway.http.response_budget import ResponseBudget

KIB = 1024


class Receiving:
    """A connection, as it is seen here."""

    def __init__(self, unsent: ResponseBudget, address: str) -> None:
        self.unsent = unsent
        self.address = address
        self.num_unsent_bytes = 0
        self.has_room: asyncio.Future[None] | None = None

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


async def test_without_an_address_each_connection_stands_for_itself():
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
    assert (unsent.num_bytes, len(unsent._num_of), len(unsent._waiting)) == (0, 0, 0)


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


@given(steps=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 600 * KIB), st.booleans()), max_size=80))
@settings(deadline=None, derandomize=True)
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
        assert (unsent.num_bytes, len(unsent._num_of), len(unsent._waiting)) == (0, 0, 0)

    asyncio.run(trial())
