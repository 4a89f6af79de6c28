"""Which gateway gets which part of the cores, whatever gateways do, and however late their messages come."""

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vecd.launch.gateways import CoreGrants, Grants, Life

A, B, C = (0, 1), (1, 1), (2, 1)


class Obedient:
    """Gateways that confirm each smaller grant at once."""

    def __init__(self, num_cores: int, *lives: Life) -> None:
        self.grants = CoreGrants(num_cores)
        self.granted = dict.fromkeys(lives, 0)
        self.num_sent = 0
        for life in lives:
            self.grants.join(life)

    def want(self, **wanted: int) -> list[int]:
        """What each gateway is granted in the end, once the named ones want so much."""
        for name, num in wanted.items():
            self.obey(self.grants.want({"a": A, "b": B, "c": C}[name], num))
        return list(self.granted.values())

    def obey(self, grants: Grants) -> None:
        for life, num in grants:
            self.num_sent += 1
            before, self.granted[life] = self.granted[life], num
            if num < before:
                self.obey(self.grants.hold(life, num))


@pytest.mark.parametrize(
    ("wanted", "parts"),
    [
        ((8, 8), [4, 4]),
        ((8, 1), [7, 1]),
        ((6, 1), [6, 2]),
        ((3, 1), [4, 4]),
        ((1, 1, 1), [3, 3, 2]),
        ((8, 2, 8), [3, 2, 3]),
    ],
)
def test_cores_are_divided_by_what_gateways_want(wanted: tuple[int, ...], parts: list[int]) -> None:
    server = Obedient(8, A, B, C)
    named = dict(zip("abc", wanted, strict=False))
    assert server.want(**named)[: len(wanted)] == parts
    num_sent = server.num_sent
    assert server.want(**named)[: len(wanted)] == parts
    assert server.num_sent == num_sent, "the same wants lead to no grant"


def test_a_core_that_cannot_be_divided_stays_where_it_is() -> None:
    server = Obedient(3, A, B)
    assert server.want(b=9, a=9) == [1, 2]
    assert server.want(a=8) == [1, 2]
    server = Obedient(1, A, B)
    assert server.want(a=1, b=1) == [1, 0]


def test_cores_that_were_taken_are_given_on_only_when_they_have_come_back() -> None:
    grants = CoreGrants(4)
    grants.join(A)
    grants.join(B)
    assert grants.want(A, 4) == [(A, 4)]
    assert grants.want(B, 4) == [(A, 2)]
    assert grants.hold(A, 4) == grants.hold(A, 3) == [], "no answer to the newest grant"
    assert grants.want(B, 0) == [], "the first grant has not been confirmed"
    assert grants.hold(A, 2) == [(A, 4)]
    assert grants.hold(A, 2) == []


def test_a_gateway_is_sent_no_other_grant_before_it_has_confirmed_a_smaller_one() -> None:
    """Else a confirmation of the first one could be taken for that of another, and cores be used twice."""
    grants = CoreGrants(8)
    for life in (A, B, C):
        grants.join(life)
    grants.want(B, 1)
    grants.want(A, 8)
    grants.hold(B, 1)
    assert grants.want(C, 8) == [(A, 4)]
    assert grants.want(A, 1) == [], "not fewer"
    assert grants.want(A, 8) == []
    assert grants.leave(B) == [(C, 1)]
    assert grants.leave(C) == [], "not more, although a core is free"
    assert grants.hold(A, 4) == [(A, 8)]


@dataclass
class FakeHolder:
    """A gateway as `CoreGrants` sees it: messages take time both ways, and leases end when they end."""

    granted: int = 0
    used: int = 0
    wanted: int = 0
    must_confirm: bool = False
    to_come: deque[int] = field(default_factory=deque)
    """Grants under way to it."""
    said: deque[tuple[str, int]] = field(default_factory=deque)
    """Messages under way from it."""

    def lease(self, num: int) -> None:
        self.used = max(self.used, min(num, self.granted))

    def receive(self) -> None:
        num = self.to_come.popleft()
        self.must_confirm = num < self.granted
        self.granted = num
        self.confirm()

    def end_leases(self) -> None:
        self.used = 0
        self.confirm()

    def confirm(self) -> None:
        if self.must_confirm and self.used <= self.granted:
            self.must_confirm = False
            self.said.append(("held", self.granted))


class GrantsMachine(RuleBasedStateMachine):
    """Gateways start, want, lease, are slow and die in any order."""

    @initialize(num_cores=st.integers(1, 9))
    def begin(self, num_cores: int) -> None:
        self.num_cores = num_cores
        self.grants = CoreGrants(num_cores)
        self.gateways: dict[Life, FakeHolder] = {}
        self.num_lives = [0, 0, 0, 0]

    def send(self, grants: Grants) -> None:
        for life, num in grants:
            self.gateways[life].to_come.append(num)

    def pick(self, data: st.DataObject) -> Life:
        return data.draw(st.sampled_from(list(self.gateways)))

    @precondition(lambda self: len(self.gateways) < len(self.num_lives))
    @rule()
    def start(self) -> None:
        index = next(i for i in range(len(self.num_lives)) if i not in {life[0] for life in self.gateways})
        self.num_lives[index] += 1
        life = index, self.num_lives[index]
        self.grants.join(life)
        self.gateways[life] = FakeHolder()

    @precondition(lambda self: self.gateways)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """With messages under way: those are lost, or come from a life that is over."""
        life = self.pick(data)
        dead = self.gateways.pop(life)
        self.send(self.grants.leave(life))
        for kind, num in dead.said:
            assert (self.grants.want if kind == "want" else self.grants.hold)(life, num) == []

    @precondition(lambda self: self.gateways)
    @rule(data=st.data(), num=st.integers(0, 12))
    def want(self, data: st.DataObject, num: int) -> None:
        gateway = self.gateways[self.pick(data)]
        gateway.wanted = num
        gateway.said.append(("want", num))

    @precondition(lambda self: self.gateways)
    @rule(data=st.data(), num=st.integers(1, 12))
    def lease(self, data: st.DataObject, num: int) -> None:
        self.gateways[self.pick(data)].lease(num)

    @precondition(lambda self: self.gateways)
    @rule(data=st.data())
    def end_leases(self, data: st.DataObject) -> None:
        self.gateways[self.pick(data)].end_leases()

    @precondition(lambda self: any(gateway.to_come for gateway in self.gateways.values()))
    @rule(data=st.data())
    def grant_comes(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from([gateway for gateway in self.gateways.values() if gateway.to_come])).receive()

    @precondition(lambda self: any(gateway.said for gateway in self.gateways.values()))
    @rule(data=st.data())
    def message_comes(self, data: st.DataObject) -> None:
        life = data.draw(st.sampled_from([life for life, gateway in self.gateways.items() if gateway.said]))
        kind, num = self.gateways[life].said.popleft()
        self.send((self.grants.want if kind == "want" else self.grants.hold)(life, num))

    @rule()
    def settle(self) -> None:
        """Everything arrives and every lease ends: few messages, then each has its part and nothing changes."""
        num_messages = 0
        while any(gateway.to_come or gateway.said or gateway.used for gateway in self.gateways.values()):
            num_messages += 1
            assert num_messages < 1000, "it does not converge"
            for life, gateway in self.gateways.items():
                gateway.end_leases()
                if gateway.to_come:
                    gateway.receive()
                if gateway.said:
                    kind, num = gateway.said.popleft()
                    self.send((self.grants.want if kind == "want" else self.grants.hold)(life, num))
                self.no_core_is_used_twice()
        wanting = [gateway for gateway in self.gateways.values() if gateway.wanted]
        for gateway in wanting:
            assert gateway.granted >= min(gateway.wanted, self.num_cores // len(wanting))
        if wanting:
            assert sum(gateway.granted for gateway in wanting) == self.num_cores, "none is idle"
        for life, gateway in self.gateways.items():
            assert self.grants.want(life, gateway.wanted) == []

    @invariant()
    def no_core_is_used_twice(self) -> None:
        """Not even if each gateway uses at once what it has, or what is under way to it."""
        if hasattr(self, "gateways"):
            usable = [max(g.granted, g.used, *g.to_come, 0) for g in self.gateways.values()]
            assert sum(usable) <= self.num_cores


TestGrants = GrantsMachine.TestCase
TestGrants.settings = settings(max_examples=2 * settings().max_examples, stateful_step_count=40, deadline=None)
