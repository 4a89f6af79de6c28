"""Generations: which is prepared, takes new requests, is retired and discarded; and the drain of all of them."""

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import ANY, Mock, call

import pytest

from tests.support.dispatching import private_metrics
from tests.support.pipelines import app_of, planned_config
from tests.support.supervision import VIRTUAL_TIME
from vecd.base.files import dump
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.app.app import App
from vecd.gateway.config import ApiKey, GatewayConfig
from vecd.gateway.dispatch.dispatcher import Dispatcher
from vecd.gateway.errors import ApiError, Unavailable
from vecd.gateway.http.listeners import Server
from vecd.gateway.main import drain
from vecd.gateway.request import HttpRequest, Identity
from vecd.gateway.service import GatewayProcess, Service
from vecd.gateway.tokenization.fair_pool import Threads
from vecd.gateway.tokenization.tokenizer import NO_VOCABULARY, Tokenizer
from vecd.model.card import ModelError
from vecd.shm.arena import create_arena
from vecd.shm.control import (
    Activate,
    Discard,
    InputDeaths,
    InputsCleared,
    Message,
    ModelBroken,
    ModelFiles,
    ModelIdentity,
    NewKeys,
    Prepare,
    Prepared,
    Quarantined,
    ReloadAsked,
    Retired,
    WorkerDown,
    WorkerUp,
)
from vecd.shm.vector_cache import VectorCacheMemory
from vecd.shm.wire import Incarnation

IN_VIRTUAL_TIME = pytest.mark.parametrize("anyio_backend", [VIRTUAL_TIME], ids=["virtual time"])
KEYS = (ApiKey("a", "00"),)


def http_request(path: str = "/", **fields: Any) -> HttpRequest:
    """A POST without a query and headers, but for `fields`."""
    given = {"method": "POST", "query": b"", "headers": {}, "http_minor": 1, "keep_alive": True, "request_id": "id"}
    return HttpRequest(path=path, **{**given, **fields})


class FakeService:
    def __init__(self, config: GatewayConfig, generation: int) -> None:
        self.residence = SimpleNamespace(is_awaited=False)
        self.info = ModelInfo(config, cast(Any, self.residence), Identity(), created_at=0, generation=generation)
        self.watch_use = Mock()
        self.tokenizer = SimpleNamespace(threads=Mock(), max_chars=1, max_ids=1)
        self.config = config
        self.generation = generation
        self.dispatcher = Mock(spec=Dispatcher)
        self.known = Mock(changed_files="")
        self.dispatcher.broken_error.side_effect = self._broken_error
        self.errors: list[ApiError] = []
        self.pipeline = SimpleNamespace(end=self._end, fail_all=lambda make: self.errors.append(make()))
        self.admission = SimpleNamespace(num_requests=0)
        self.num_handled = 0
        self.has_ended_at: float | None = None

    is_in_use = Service.is_in_use

    def _broken_error(self) -> Unavailable:
        return Unavailable(*self.dispatcher.set_broken.call_args.args, retry_after_s=1)

    def _end(self, make: Callable[[], ApiError]) -> None:
        self.errors.append(make())
        self.has_ended_at = asyncio.get_running_loop().time()

    def stop(self) -> None:
        self.dispatcher.stop()


class Bench:
    """An app with a first generation, 1, whose services are fakes."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.made: dict[int, FakeService] = {}
        self.read: Callable[[], None] = lambda: None
        """Called in the thread in which a tokenizer is read."""
        self.make: Callable[[FakeService], None] = lambda service: None
        """Called with each service that is made."""
        self.activated: list[GatewayConfig] = []
        self.shared_metrics = private_metrics()
        self.is_running = False
        self.app = app_of(
            planned_config(), sent=self.sent, shared_metrics=self.shared_metrics,
            read_tokenizer=self._read_tokenizer, make_service=self._make_service,
        )  # fmt: skip
        self.is_running = True
        self.first = self.made.pop(1)
        self.app.on_activated = self.activated.append

    def _read_tokenizer(self, config: GatewayConfig) -> Tokenizer:
        if self.is_running:
            assert threading.current_thread() is not threading.main_thread(), "it would hold up the loop"
        self.read()
        tokenizer = SimpleNamespace(model=config.model, threads=SimpleNamespace(close=lambda: None))
        return cast(Tokenizer, tokenizer)

    def _make_service(
        self, config: GatewayConfig, generation: int, tokenizer: Tokenizer, process: GatewayProcess
    ) -> Service:
        assert cast(Any, tokenizer).model == config.model
        made = self.made[generation] = FakeService(config, generation)
        self.make(made)
        return cast(Service, made)

    def order(self, generation: int, listening: socket.socket, model: str = "other") -> None:
        config = replace(planned_config(), model=model)
        self.app.prepare(Prepare(generation, dump(config)), listening)

    async def prepared(self, generation: int, listening: socket.socket, model: str = "other") -> FakeService:
        self.order(generation, listening, model)
        await self.reported(Prepared(generation))
        return self.made[generation]

    async def reported(self, message: Message) -> None:
        async with asyncio.timeout(30):
            while message not in self.sent:
                await asyncio.sleep(0.001)


@pytest.fixture
async def bench() -> Bench:
    return Bench()


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair()
    yield ours
    ours.close()
    theirs.close()


# --- prepare --------------------------------------------------------------------------------------------------------


async def test_a_prepared_generation_gets_no_requests_yet(bench: Bench, listening):
    fd = listening.fileno()
    service = await bench.prepared(2, listening)
    assert bench.sent == [Prepared(2)]
    assert service.config.model == "other"
    service.dispatcher.start.assert_called_once_with(fd)
    assert listening.fileno() == -1, "the dispatcher owns it"
    os.close(fd)
    assert bench.app.active.generation == 1
    assert sorted(bench.app.all) == [1, 2]
    assert not service.dispatcher.activate.called


async def test_the_listening_socket_of_a_message_is_taken_as_a_copy(bench: Bench, listening):
    bench.app.on_message(Prepare(2, dump(planned_config())), [listening.fileno()])
    await bench.reported(Prepared(2))
    [fd] = bench.made[2].dispatcher.start.call_args.args
    assert fd != listening.fileno()
    assert os.fstat(fd).st_ino == os.fstat(listening.fileno()).st_ino
    os.close(fd)


async def test_a_tokenizer_that_cannot_be_read_is_reported_and_nothing_changes(bench: Bench, listening):
    bench.read = Mock(side_effect=ModelError("tokenizer.json is damaged"))
    bench.order(2, listening)
    await bench.reported(Prepared(2, "tokenizer.json is damaged"))
    assert [*bench.app.all] == [1]
    assert not bench.made
    assert listening.fileno() != -1, "whoever ordered it still owns it"


class NoException(BaseException):
    """As libraries in Rust raise it."""


@pytest.mark.parametrize("error", [OSError("no descriptor left"), NoException()])
async def test_whatever_fails_is_reported_by_its_kind_alone(bench: Bench, listening, error):
    bench.make = lambda service: setattr(service.dispatcher.start, "side_effect", error)
    bench.order(2, listening)
    await bench.reported(Prepared(2, f"a gateway failed with {type(error).__name__}"))
    assert [*bench.app.all] == [1]
    bench.make = lambda service: None
    await bench.prepared(3, listening)


async def test_a_configuration_that_is_not_understood_is_reported(bench: Bench, listening):
    bench.app.prepare(Prepare(2, {"model": "without the rest"}), listening)
    await bench.reported(Prepared(2, "a gateway failed with TypeError"))


# --- activate and retire --------------------------------------------------------------------------------------------


async def test_the_newest_keys_and_what_was_used_are_those_of_the_active_generation(bench: Bench, listening):
    service = await bench.prepared(2, listening)
    bench.app.on_message(NewKeys([asdict(key) for key in KEYS]), [])
    before = bench.app.principals.with_keys
    bench.app.on_message(Activate(2), [])
    assert service.dispatcher.activate.called
    assert (bench.app.principals.with_keys, [principal.name for principal in before]) == (before, ["a"])
    assert bench.activated == [service.config]


@IN_VIRTUAL_TIME
async def test_a_generation_is_retired_when_its_last_request_is_answered(bench: Bench):
    bench.app.all[2] = cast(Service, FakeService(planned_config(), 2))
    bench.first.num_handled = 1
    bench.app.on_message(Activate(2), [])
    await asyncio.sleep(60)
    assert bench.sent == []
    bench.first.admission.num_requests = 1
    bench.first.num_handled = 0
    await asyncio.sleep(60)
    assert bench.sent == [], "a request that was admitted still holds its permit"
    bench.first.admission.num_requests = 0
    await asyncio.sleep(1)
    assert bench.sent == [Retired(1)]
    await asyncio.sleep(60)
    assert bench.sent == [Retired(1)], "it is reported once"


# --- discard --------------------------------------------------------------------------------------------------------


async def test_a_discarded_generation_answers_what_it_still_has_and_stops(bench: Bench, listening):
    service = await bench.prepared(2, listening)
    bench.app.on_message(Discard(2), [])
    [error] = service.errors
    assert isinstance(error, Unavailable)
    assert error.headers == {"retry-after": "1"}
    assert service.dispatcher.stop.called
    bench.app.on_message(Discard(9), [])  # which is not known
    assert [*bench.app.all] == [1]
    assert not bench.first.dispatcher.stop.called


async def test_a_generation_that_is_being_prepared_can_be_discarded(bench: Bench, listening):
    is_reading, may_go_on = threading.Event(), threading.Event()

    def wait() -> None:
        is_reading.set()
        may_go_on.wait(30)

    bench.read = wait
    bench.order(2, listening)
    await asyncio.to_thread(is_reading.wait, 30)
    bench.app.on_message(Discard(2), [])
    may_go_on.set()
    bench.read = lambda: None
    await bench.prepared(3, listening)
    assert bench.sent == [Prepared(3)], "nothing is said of the one that was discarded"
    assert sorted(bench.app.all) == [1, 3]
    # `Prepared` is sent before the task has ended, and the task is forgotten only after that.
    await asyncio.gather(*bench.app.preparing.values(), return_exceptions=True)
    assert not bench.app.preparing


# --- what is told of workers ----------------------------------------------------------------------------------------


async def test_a_worker_is_its_generation_s_but_its_death_is_told_to_all(bench: Bench, listening):
    service = await bench.prepared(2, listening)
    fd = create_arena(planned_config().arena)
    try:
        bench.app.on_message(WorkerUp(2, Incarnation(0, 7), {"pid": 1}), [fd])
    finally:
        os.close(fd)
    service.dispatcher.worker_up.assert_called_once_with(Incarnation(0, 7), ANY, {"pid": 1})
    assert not bench.first.dispatcher.worker_up.called
    assert bench.shared_metrics.worker_life(0) == 0, "the lives that are shown are the active generation's"
    bench.app.on_message(WorkerDown(Incarnation(0, 7), "killed", has_crashed=True), [])
    for each in (bench.first, service):
        each.dispatcher.worker_down.assert_called_once_with(
            Incarnation(0, 7), "killed", has_crashed=True, is_planned=False
        )


async def test_only_the_generation_without_workers_is_broken_and_poison_is_refused_by_all(bench: Bench, listening):
    service = await bench.prepared(2, listening, planned_config().model)
    bench.app.on_message(ModelBroken(2, "it does not start"), [])
    model = planned_config().model
    messages = [
        Quarantined(model, "ab"), InputDeaths(model, ["ab"], is_isolated=True, has_crashed=False),
        InputsCleared(model, ["ab"]),
    ]  # fmt: skip
    for message in (*messages, Quarantined("another", "ab")):
        bench.app.on_message(message, [])
    assert not bench.first.dispatcher.set_broken.called
    service.dispatcher.set_broken.assert_called_once_with("it does not start")
    assert bench.first.errors == []
    assert [str(error) for error in service.errors] == ["it does not start"]
    for each in (bench.first, service):
        assert each.known.note.call_args_list == [call(message) for message in messages]


async def test_identity_and_changed_files_are_those_of_a_generation(bench: Bench, listening):
    service = await bench.prepared(2, listening)
    bench.app.on_message(ModelIdentity(2, 32 * "a"), [])
    assert (bench.first.info.identity.digest, service.info.identity.digest) == ("", 32 * "a")
    bench.app.on_message(ModelIdentity(2, "", problem="no file"), [])
    assert (service.info.identity.digest, service.info.identity.problem) == ("", "no file"), "it may be withdrawn"
    assert bench.first.info.identity.problem == ""
    bench.app.on_message(ModelFiles(1, "a.json has changed"), [])
    assert (bench.first.known.changed_files, service.known.changed_files) == ("a.json has changed", "")


# --- the drain ------------------------------------------------------------------------------------------------------


class FakeServer:
    def __init__(self) -> None:
        self.calls: list[tuple[float, float, float]] = []

    async def drain(self, deadline_s: float, grace_s: float) -> bool:
        self.calls.append((asyncio.get_running_loop().time(), deadline_s, grace_s))
        await asyncio.sleep(deadline_s)
        return False


@IN_VIRTUAL_TIME
@pytest.mark.parametrize(
    ("deadline_s", "grace_s", "called_at", "quiet_s", "gives_up_at"),
    [
        (30, 5, 4.5, 0.5, 29),
        (30, 0, 0, 0, 29),
        (2, 1, 0.5, 0.5, 1.5),
    ],
)
async def test_a_drain(deadline_s, grace_s, called_at, quiet_s, gives_up_at):
    """The server closes within the deadline; shortly before, what still waits is answered with a 503."""
    bench, server = Bench(), FakeServer()
    everything_answered = await drain(bench.app, cast(Server, server), deadline_s, grace_s)
    assert not everything_answered
    assert bench.app.process.is_draining
    assert server.calls == [(called_at, deadline_s - called_at, quiet_s)]
    assert asyncio.get_running_loop().time() == deadline_s
    assert bench.first.has_ended_at == gives_up_at


# --- one generation's wiring ----------------------------------------------------------------------------------------


class NoTexts:
    """Enough of a tokenizer to be wired."""

    def __init__(self, max_chars: int = 16) -> None:
        self.threads = Threads(1)
        self.max_chars = self.max_ids = max_chars
        self.max_tokens = 16
        self.least_tokens = 3
        self.vocabulary = NO_VOCABULARY

    def estimate_tokens(self, inputs: list[str], tokenizing: object) -> int:
        return len(inputs)

    def id_of(self, token: str) -> None:
        """No token is in its vocabulary."""


def made(**changes: Any) -> tuple[App, list[Message]]:
    sent: list[Message] = []
    tokenizer = NoTexts()
    tokenizer.threads.close()  # nothing is tokenized
    config = replace(planned_config(), **changes)
    return app_of(config, tokenizer, sent=sent), sent


@IN_VIRTUAL_TIME
async def test_a_reload_is_requested_from_the_supervisor() -> None:
    app, sent = made()
    asked = http_request("/admin/reload", is_admin=True)
    assert (await app.handle(asked)).status == 202
    assert sent == [ReloadAsked()]


@IN_VIRTUAL_TIME
async def test_a_model_has_its_weight_and_needs_no_core_on_a_gpu() -> None:
    share = made(weight=3.0)[0].active.dispatcher._share
    assert (share.needs_cores, share.clock.weight) == (True, 3.0)
    assert not made(weight=3.0, compute_type="gpu")[0].active.dispatcher._share.needs_cores


@IN_VIRTUAL_TIME
@pytest.mark.parametrize(("who", "is_shared"), [("tenant", False), ("all", True)])
async def test_what_is_computed_is_shared_by_tenants_only_if_the_operator_wants_it(who, is_shared):
    app, _ = made(share_computed=who)
    app.process.vector_cache = cast(VectorCacheMemory, SimpleNamespace())
    dispatcher = Service(app.active.config, 2, app.active.tokenizer, app.process).dispatcher
    cache = dispatcher.vector_cache
    assert cache is not None
    assert cache._is_shared_by_tenants is dispatcher._flights._is_shared_by_tenants is is_shared
    assert (dispatcher._scope_key is None) is is_shared


@IN_VIRTUAL_TIME
async def test_health_says_why_there_is_no_worker_and_that_the_server_drains() -> None:
    async def health() -> tuple[int, bytes]:
        response = await app.handle(http_request("/health", method="GET"))
        assert isinstance(response.body, bytes)
        return response.status, response.body

    app, _ = made()
    status, body = await health()
    assert status == 503
    assert b"shutting down" not in body
    app.active.dispatcher.set_broken("no worker stays alive")
    assert b"no worker stays alive" in (await health())[1]
    app.process.is_draining = True
    assert (await health()) == (503, b'{"status":"unavailable","reason":"the server is shutting down"}')
