"""The way of one short request through the gateway: which module hands it to which.

A module has the request in hand while one of its functions runs an event-loop callback for it, or is suspended with it.
A call that returns within the same callback only consults the module that is called: it is on the list below the module
that made it, and is no change of hands. `pytest -s` on this file prints the whole list.
"""

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest

from tests.support.dispatching import SPEC, Worker
from tests.support.pipelines import app_of, planned_config
from vecd.gateway.http.listeners import Server
from vecd.gateway.request import Limits
from vecd.launch.sockets import make_zmq_endpoint
from vecd.shm.control import WorkerUp

MAX_CHANGES = 12
BODY = b'{"input": "a short text", "model": "m"}'
REQUEST = b"POST /v1/embeddings HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY)
GATEWAY = "vecd.gateway."


@dataclass(slots=True)
class Run:
    """A function while it runs, until it returns or is suspended."""

    frame: FrameType
    callees: "list[Run]" = field(default_factory=list)

    @property
    def module(self) -> str:
        return self.frame.f_globals["__name__"].removeprefix(GATEWAY)

    def modules(self) -> Iterator[str]:
        for callee in self.callees:
            yield callee.module
            yield from callee.modules()


@dataclass(slots=True)
class Holder:
    """A module that has the request in hand, and those that it consults meanwhile, in order."""

    module: str
    consulted: list[str]


@contextmanager
def recorded(callbacks: list[Run]) -> Iterator[None]:
    """Note what the gateway's modules run in this thread, by event-loop callback."""
    stack: list[Run] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if not frame.f_globals.get("__name__", "").startswith(GATEWAY):
            return
        if event == "call":
            run = Run(frame)
            if stack:
                stack[-1].callees.append(run)
            elif not _is_of_timer(frame):
                callbacks.append(run)
            stack.append(run)
        elif event == "return" and stack and stack[-1].frame is frame:
            stack.pop()

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def _is_of_timer(frame: FrameType) -> bool:
    """Whether a frame is a timer's callback: sweeps and the like, which are no part of the way."""
    caller = frame.f_back
    return caller is not None and isinstance(caller.f_locals.get("self"), asyncio.TimerHandle)


def holders_of(callbacks: list[Run]) -> list[Holder]:
    """Who has the request in hand, in order, until its response is written; a module that hands it to itself is named
    once."""
    num_runs: dict[FrameType, int] = {}

    def count(run: Run) -> None:
        num_runs[run.frame] = num_runs.get(run.frame, 0) + 1
        for callee in run.callees:
            count(callee)

    for callback in callbacks:
        count(callback)
    holders: list[Holder] = []

    def chain_of(run: Run) -> Iterator[Holder]:
        # A coroutine that was suspended with the request is run once more, when its rows have come.
        suspended = [callee for callee in run.callees if num_runs[callee.frame] > 1]
        consulted = [
            name
            for callee in run.callees
            if callee not in suspended
            for name in (callee.module, *callee.modules())
            if name != run.module
        ]
        yield Holder(run.module, consulted)
        for callee in suspended:
            yield from chain_of(callee)

    seen: set[FrameType] = set()
    last = max(index for index, callback in enumerate(callbacks) if callback.module == "http.connection")
    for callback in callbacks[: last + 1]:
        chain = list(chain_of(callback))
        # A chain that goes on returns: the innermost coroutine is the first to run.
        for holder in reversed(chain) if callback.frame in seen else chain:
            if holders and holders[-1].module == holder.module:
                holders[-1].consulted += holder.consulted
            else:
                holders.append(holder)
        seen.add(callback.frame)
    return holders


async def trace() -> list[Holder]:
    """What one short request goes through, from its first byte to the last of its response."""
    planned = planned_config()
    card = replace(planned.card, dim=SPEC.dim, hidden_size=SPEC.dim)
    config = replace(planned, card=card, arena=SPEC, gateways=1)
    app = app_of(config)
    service = app.active
    server = Server(app, Limits(max_body_bytes=1 << 20))
    listening, address_fd = make_zmq_endpoint()
    service.dispatcher.start(listening.detach())
    worker = Worker(address_fd)
    public = socket.create_server(("127.0.0.1", 0))
    address = public.getsockname()
    await server.start(public)
    try:
        app.on_message(WorkerUp(1, worker.incarnation, {}), [worker.fd])
        reader, writer = await asyncio.open_connection(*address)

        async def exchange() -> bytes:
            writer.write(REQUEST)
            worker.answer(await worker.receive())
            head = await reader.readuntil(b"\r\n\r\n")
            [length] = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            return await reader.readexactly(int(length.partition(b":")[2]))

        assert b'"embedding":[' in await exchange()  # and everything is warm
        await asyncio.sleep(0.1)  # timers of the first request are over
        callbacks: list[Run] = []
        with recorded(callbacks):
            assert b'"embedding":[' in await exchange()
        writer.close()
        return holders_of(callbacks)
    finally:
        await server.drain(1, 0)
        service.stop()
        worker.close()
        os.close(address_fd)


@pytest.fixture(scope="module")
def way() -> list[Holder]:
    async def limited() -> list[Holder]:
        async with asyncio.timeout(60):
            return await trace()

    return asyncio.run(limited())


def test_a_short_request_changes_hands_seldom(way):
    for holder in way:
        print(holder.module)
        for name in dict.fromkeys(holder.consulted):
            print("   ", name)
    modules = [holder.module for holder in way]
    assert {"http.connection", "pipeline", "dispatch.dispatcher"} <= set(modules), "the way was traced"
    assert len(modules) - 1 <= MAX_CHANGES, modules


def test_it_returns_to_no_room_but_with_its_response(way):
    rooms = [holder.module.split(".")[0] for holder in way]
    changes = [room for room, before in zip(rooms, [None, *rooms], strict=False) if room != before]
    there = changes[: changes.index("dispatch") + 1]
    back = changes[len(there) :]
    assert len(there) == len(set(there)), changes
    assert set(back) <= set(there), "the response comes back by the rooms that the request went through"
    assert all(here != then for here, then in pairwise(changes))
