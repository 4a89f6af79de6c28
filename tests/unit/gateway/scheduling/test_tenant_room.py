"""Room of which one tenant gets half."""

from contextlib import suppress

import pytest

from vecd.gateway.errors import TooManyRequests
from vecd.gateway.scheduling.admission import TenantRoom


def fill(room: TenantRoom, tenant: str, *nums: int):
    shares = [room.share(tenant) for _ in nums]
    for share, num in zip(shares, nums, strict=True):
        share.take(num)
    return shares


def test_one_tenant_gets_half_and_another_is_served():
    room = TenantRoom(100, "{} rows are held", per_s=10)
    shares = fill(room, "a", 30, 20)
    refused = room.share("a")
    with pytest.raises(TooManyRequests, match=r"50 rows .*, 50 of them yours, .* has 1 or more: at most 100 .* 50 of"):
        refused.take(1)
    shares += fill(room, "b", 50)
    for tenant in "bc":
        with pytest.raises(TooManyRequests) as caught:
            room.share(tenant).take(1)
        assert int(caught.value.headers["retry-after"]) >= 10
    assert (room.num, dict(room.num_of)) == (100, {"a": 50, "b": 50})
    shares[0].keep(0)
    refused.take(1)
    for share in (refused, *shares):
        share.keep(0)
    assert (room.num, dict(room.num_of)) == (0, {})


def test_a_share_grows_until_it_would_be_too_much_and_keeps_what_it_had():
    room = TenantRoom(100, "{}")
    [first, second] = fill(room, "a", 10, 10)
    first.take(40)
    with pytest.raises(TooManyRequests, match=r"^10, 10 of them yours, and this request has 41 "):
        first.take(41)
    assert (first.num, room.num) == (40, 50)
    first.keep(5)
    second.take(45)
    assert room.num == 50


def test_less_may_be_allowed_of_one_tenant():
    room = TenantRoom(100, "{}")
    fill(room, "a", 20)
    with pytest.raises(TooManyRequests, match="and 25 of one caller"):
        room.share("a").take(6, 25)
    room.share("a").take(5, 25)


def test_who_is_alone_has_room_for_anything():
    room = TenantRoom(100, "{}")
    [large] = fill(room, "a", 1_000)
    large.take(2_000)
    with pytest.raises(TooManyRequests):
        room.share("b").take(1)
    large.keep(90)
    room.share("b").take(10)  # the only one of its tenant is held to the whole room


def test_who_is_no_tenant_has_no_half():
    room = TenantRoom(100, "{}")
    fill(room, "", 50, 50)
    with pytest.raises(TooManyRequests):
        room.share("").take(1)


def test_all_is_given_back_after_an_error():
    room = TenantRoom(100, "{}")
    with suppress(ZeroDivisionError), room.share("a") as share:
        share.take(60)
        raise ZeroDivisionError
    assert (room.num, dict(room.num_of)) == (0, {})
