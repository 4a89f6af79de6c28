"""What a request demands of the model's identity, and when it is known."""

import asyncio
import time
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from vecd.gateway.app import conditions
from vecd.gateway.app.conditions import Demand, check_after, check_before, parse_demand
from vecd.gateway.errors import BadRequest, IdentityMismatch, NotReady, Unavailable
from vecd.gateway.request import HttpRequest, Identity
from vecd.gateway.service import Service

OWN, OTHER, OF_ALIAS = "a" * 32, "b" * 32, "c" * 32


class Model:
    """A service with the identity alone, and a model that is loaded when it is asked for."""

    def __init__(self, *aliases: str, timeout_s: float = 30.0) -> None:
        self.identity = Identity(aliases)
        self.num_loads = 0
        self.has_workers = True
        config = SimpleNamespace(request_timeout=timeout_s)
        self.service = cast(
            Service,
            SimpleNamespace(info=self, config=config, residence=self, made_at=time.monotonic()),
        )

    async def until_ready(self, timeout_s: float) -> None:
        self.num_loads += 1
        if self.has_workers:
            self.identity.add_format("float32")

    def check(self, text: str, **headers: str) -> Coroutine[Any, Any, None]:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        request = HttpRequest(
            method="POST", path="/embed", query=b"", headers=names, http_minor=1, keep_alive=True, request_id="r"
        )
        request.timeline.arrived_at = time.monotonic()
        return check_before(demand(text), self.service, self.identity, Service.deadline_of(self.service, request))


def demand(text: str) -> Demand:
    found = parse_demand(text)
    assert str(found) == text
    return found


@pytest.mark.parametrize(
    "value", ["", OWN[1:], f"{OWN}a", f"{OWN};dtype=", f"{OWN};float32", f"{OWN}; dtype=int8", "Ä"]
)
def test_a_malformed_one_is_refused(value: str) -> None:
    with pytest.raises(BadRequest, match="header if-vecd-identity: must be an identity"):
        parse_demand(value)


def test_the_text_is_there_once_both_parts_are_known() -> None:
    identity = Identity(["short"])
    identity.set(OWN, {"short": OF_ALIAS})
    assert (identity.text, identity.describe()) == (None, OWN)
    identity.add_format("int8")
    assert (identity.text, identity.by_alias["short"].text) == (f"{OWN};dtype=int8", f"{OF_ALIAS};dtype=int8")


def test_a_format_is_compared_at_the_end_and_two_of_them_are_no_identity() -> None:
    model = Model()
    model.identity.set(OWN, {})
    with pytest.raises(NotReady):
        check_after(demand(f"{OWN};dtype=float32"), model.service, model.identity)
    model.identity.add_format("bfloat16")
    check_after(demand(f"{OWN};dtype=bfloat16"), model.service, model.identity)
    with pytest.raises(IdentityMismatch):
        check_after(demand(f"{OWN};dtype=float32"), model.service, model.identity)
    model.identity.add_format("float32")
    assert model.identity.text is None
    assert model.identity.describe() == f"{OWN};dtype=bfloat16+float32"
    check_after(demand(OWN), model.service, model.identity)
    with pytest.raises(IdentityMismatch, match="bfloat16\\+float32"):
        check_after(demand(f"{OWN};dtype=float32"), model.service, model.identity)


async def test_it_is_compared_before_anything_is_loaded() -> None:
    model = Model()
    model.identity.set(OWN, {})
    await model.check(OWN)
    with pytest.raises(IdentityMismatch, match=f"{OTHER};dtype=float32 is demanded, and the model here is {OWN}$"):
        await model.check(f"{OTHER};dtype=float32")
    assert model.num_loads == 0
    await model.check(f"{OWN};dtype=float32")
    assert model.num_loads == 1
    with pytest.raises(IdentityMismatch, match=f"{OWN};dtype=float32$"):
        await model.check(f"{OWN};dtype=int8")
    assert model.num_loads == 1


async def test_a_request_waits_until_it_is_known() -> None:
    model = Model()
    waiting = [asyncio.ensure_future(model.check(OWN)), asyncio.ensure_future(model.check(OTHER))]
    await asyncio.sleep(0)
    assert not any(each.done() for each in waiting)
    model.identity.set(OWN, {})
    await waiting[0]
    with pytest.raises(IdentityMismatch):
        await waiting[1]


@pytest.mark.parametrize(
    ("timeout_s", "headers", "max_wait_s"), [(0.01, {}, 30), (30, {"x_vecd_timeout_ms": "10"}, 30), (300, {}, 0.01)]
)
async def test_it_waits_until_its_deadline_at_most_and_never_for_long(monkeypatch, timeout_s, headers, max_wait_s):
    monkeypatch.setattr(conditions, "MAX_WAIT_S", max_wait_s)
    with pytest.raises(NotReady) as refused:
        await asyncio.wait_for(Model(timeout_s=timeout_s).check(OWN, **headers), 10)
    assert (refused.value.status, refused.value.code) == (503, "not_ready")
    assert "retry-after" in refused.value.headers


async def test_one_that_cannot_be_found_out_is_refused_at_once_until_it_is_known() -> None:
    model = Model("short")
    waiting = asyncio.ensure_future(model.check(OWN))
    await asyncio.sleep(0)
    model.identity.set("", {}, "no such file")
    for check in (waiting, model.check(OWN), model.check(f"{OWN};dtype=float32")):
        with pytest.raises(Unavailable, match="is not known: no such file"):
            await asyncio.wait_for(check, 10)
    assert model.identity.by_alias["short"].problem == "no such file"
    model.identity.set(OWN, {"short": OF_ALIAS})
    await model.check(OWN)
    model.identity.add_format("float32")
    model.identity.set("", {}, "its files are others")
    assert model.identity.text is None
    with pytest.raises(Unavailable, match="its files are others"):
        check_after(demand(OWN), model.service, model.identity)


async def test_the_first_worker_is_waited_for_where_a_format_is_demanded() -> None:
    model = Model()
    model.has_workers = False
    model.identity.set(OWN, {})
    await model.check(OWN)
    waiting = asyncio.ensure_future(model.check(f"{OWN};dtype=float32"))
    await asyncio.sleep(0)
    assert not waiting.done()
    model.identity.add_format("int8")
    with pytest.raises(IdentityMismatch):
        await waiting
