"""Generations: which is prepared, takes new requests, is retired and discarded; and the drain of all of them."""

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.virtualtime import run_in_virtual_time
from vecd.gateway.http.server import Server
from vecd.gateway.main import drain
from vecd.gateway.service import GatewayFacts, Service, Services
from vecd.gateway.telemetry.shared_metrics import SharedMetrics
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.gateway.tokenization.vocabulary import NO_VOCABULARY
from vecd.gateway.types.config import ApiKey, GatewayConfig
from vecd.gateway.types.errors import ApiError, Unavailable
from vecd.gateway.types.identity import Identity
from vecd.gateway.types.messages import HttpRequest, Response
from vecd.launch.config.plan import make_plan
from vecd.launch.config.settings import load_settings
from vecd.shm.arena import create_arena
from vecd.shm.card import ModelError
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

KEYS = (ApiKey("a", "00"),)


@cache
def planned_config() -> GatewayConfig:
    return make_plan(load_settings(["--port", "0"])).gateway


class FakeDispatcher:
    def __init__(self) -> None:
        self.started_with: int | None = None
        self.is_stopped = False
        self.is_activated = False
        self.deaths: list[InputDeaths] = []
        self.cleared: list[str] = []
        self.changed_files = ""
        self.fails: BaseException | None = None
        self.ups: list[tuple[Incarnation, dict[str, Any]]] = []
        self.downs: list[tuple[Incarnation, str, bool]] = []
        self.broken: list[str] = []
        self.quarantine: set[str] = set()

    def start(self, fd: int) -> None:
        if self.fails is not None:
            raise self.fails
        self.started_with = fd

    def stop(self) -> None:
        self.is_stopped = True

    def note_deaths(self, message: InputDeaths) -> None:
        self.deaths.append(message)

    def note_cleared(self, digests: list[str]) -> None:
        self.cleared += digests

    def activate(self) -> None:
        self.is_activated = True

    def worker_up(self, who: Incarnation, slots: object, facts: dict[str, Any]) -> None:
        self.ups.append((who, facts))

    def worker_down(self, who: Incarnation, reason: str, *, has_crashed: bool, is_planned: bool) -> None:
        self.downs.append((who, reason, has_crashed))

    def set_broken(self, reason: str) -> None:
        self.broken.append(reason)

    def broken_error(self) -> Unavailable:
        return Unavailable(self.broken[-1], retry_after_s=1)


class FakeApi:
    """Answers with the generation's number, once it is let."""

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self.principals: object = f"principals of {generation}"
        self.keys: tuple[ApiKey, ...] = ()
        self.answers = asyncio.Event()

    async def handle(self, request: HttpRequest) -> Response:
        await self.answers.wait()
        return Response(200, b"%d" % self._generation)

    def set_keys(self, keys: tuple[ApiKey, ...]) -> None:
        self.keys = keys

    def adopt(self, principals: object, keys: tuple[ApiKey, ...]) -> None:
        self.principals = principals
        self.keys = keys


class FakeService:
    def __init__(self, config: GatewayConfig, generation: int) -> None:
        self.identity = Identity()
        self.config = config
        self.generation = generation
        self.api = FakeApi(generation)
        self.dispatcher = FakeDispatcher()
        self.errors: list[ApiError] = []
        self.pipeline = SimpleNamespace(
            end=lambda make: self.errors.append(make()),
            fail_all=lambda make: self.errors.append(make()),
            give_up=self._give_up,
        )
        self.admission = SimpleNamespace(num_requests=0)
        self.residence = SimpleNamespace(is_awaited=False)
        self.is_draining = False
        self.num_handled = 0
        self.has_given_up_at: float | None = None

    is_in_use = Service.is_in_use

    def _give_up(self) -> None:
        self.has_given_up_at = asyncio.get_running_loop().time()

    def stop(self) -> None:
        self.dispatcher.stop()


class Bench:
    """`Services` with a first generation, 1, whose services are fakes."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.made: dict[int, FakeService] = {}
        self.read: Callable[[], None] = lambda: None
        """Called in the thread in which a tokenizer is read."""
        self.make: Callable[[FakeService], None] = lambda service: None
        """Called with each service that is made."""
        self.activated: list[GatewayConfig] = []
        self.shared_metrics = SharedMetrics.private()
        facts = GatewayFacts(1, b"key", self.shared_metrics, self.sent.append)
        self.first = FakeService(planned_config(), 1)
        self.services = Services(
            cast(Service, self.first), facts, read_tokenizer=self._read_tokenizer, make_service=self._make_service
        )
        self.services.on_activated = self.activated.append

    def _read_tokenizer(self, config: GatewayConfig) -> Tokenizer:
        assert threading.current_thread() is not threading.main_thread(), "it would hold up the loop"
        self.read()
        return cast(Tokenizer, config.model)

    def _make_service(
        self, config: GatewayConfig, generation: int, tokenizer: Tokenizer, gateway: GatewayFacts
    ) -> Service:
        assert cast(str, tokenizer) == config.model
        made = self.made[generation] = FakeService(config, generation)
        self.make(made)
        return cast(Service, made)

    def order(self, generation: int, listening: socket.socket, model: str = "other") -> None:
        config = replace(planned_config(), model=model)
        self.services.prepare(Prepare(generation, config.to_json()), listening)

    async def prepared(self, generation: int, listening: socket.socket, model: str = "other") -> FakeService:
        self.order(generation, listening, model)
        await self.reported(Prepared(generation))
        return self.made[generation]

    async def reported(self, message: Message) -> None:
        async with asyncio.timeout(30):
            while message not in self.sent:
                await asyncio.sleep(0.001)


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair()
    yield ours
    ours.close()
    theirs.close()


def request() -> HttpRequest:
    return HttpRequest(method="POST", path="/", query=b"", headers={}, http_minor=1, keep_alive=True, request_id="")


# --- prepare --------------------------------------------------------------------------------------------------------


def test_a_prepared_generation_gets_no_requests_yet(listening):
    async def test() -> None:
        bench = Bench()
        fd = listening.fileno()
        service = await bench.prepared(2, listening)
        assert bench.sent == [Prepared(2)]
        assert (service.config.model, service.dispatcher.started_with) == ("other", fd)
        assert listening.fileno() == -1, "the dispatcher owns it"
        os.close(fd)
        assert bench.services.active.generation == 1
        assert sorted(bench.services.all) == [1, 2]
        bench.first.api.answers.set()
        assert (await bench.services.handle(request())).body == b"1"

    asyncio.run(test())


def test_the_listening_socket_of_a_message_is_taken_as_a_copy(listening):
    async def test() -> None:
        bench = Bench()
        bench.services.on_message(Prepare(2, planned_config().to_json()), [listening.fileno()])
        await bench.reported(Prepared(2))
        fd = bench.made[2].dispatcher.started_with
        assert fd is not None
        assert fd != listening.fileno()
        assert os.fstat(fd).st_ino == os.fstat(listening.fileno()).st_ino
        os.close(fd)

    asyncio.run(test())


def test_a_generation_that_is_prepared_while_the_server_drains_drains_too(listening):
    async def test() -> None:
        bench = Bench()
        bench.services.begin_drain()
        assert (await bench.prepared(2, listening)).is_draining

    asyncio.run(test())


def test_a_tokenizer_that_cannot_be_read_is_reported_and_nothing_changes(listening):
    async def test() -> None:
        bench = Bench()

        def fail() -> None:
            raise ModelError("tokenizer.json is damaged")

        bench.read = fail
        bench.order(2, listening)
        await bench.reported(Prepared(2, "tokenizer.json is damaged"))
        assert [*bench.services.all] == [1]
        assert not bench.made
        assert listening.fileno() != -1, "whoever ordered it still owns it"

    asyncio.run(test())


class NoException(BaseException):
    """As libraries in Rust raise it."""


@pytest.mark.parametrize("error", [OSError("no descriptor left"), NoException()])
def test_whatever_fails_is_reported_by_its_kind_alone(listening, error):
    async def test() -> None:
        bench = Bench()

        def fail(service: FakeService) -> None:
            service.dispatcher.fails = error

        bench.make = fail
        bench.order(2, listening)
        await bench.reported(Prepared(2, f"a gateway failed with {type(error).__name__}"))
        assert [*bench.services.all] == [1]
        bench.make = lambda service: None
        await bench.prepared(3, listening)

    asyncio.run(test())


def test_a_configuration_that_is_not_understood_is_reported(listening):
    async def test() -> None:
        bench = Bench()
        bench.services.prepare(Prepare(2, {"model": "without the rest"}), listening)
        await bench.reported(Prepared(2, "a gateway failed with KeyError"))

    asyncio.run(test())


# --- activate and retire --------------------------------------------------------------------------------------------


def test_new_requests_go_to_the_active_generation_and_old_ones_stay_where_they_began(listening):
    async def test() -> None:
        bench = Bench()
        service = await bench.prepared(2, listening)
        old = asyncio.ensure_future(bench.services.handle(request()))
        await asyncio.sleep(0)
        assert not service.dispatcher.is_activated
        bench.services.on_message(Activate(2), [])
        assert service.dispatcher.is_activated
        new = asyncio.ensure_future(bench.services.handle(request()))
        await asyncio.sleep(0)
        assert (bench.first.num_handled, service.num_handled) == (1, 1)
        service.api.answers.set()
        assert (await new).body == b"2"
        bench.first.api.answers.set()
        assert (await old).body == b"1"
        assert (bench.first.num_handled, service.num_handled) == (0, 0)

    asyncio.run(test())


def test_what_was_used_and_the_newest_keys_go_over_to_the_active_generation(listening):
    async def test() -> None:
        bench = Bench()
        service = await bench.prepared(2, listening)
        bench.services.on_message(NewKeys([asdict(key) for key in KEYS]), [])
        third = await bench.prepared(3, listening)
        assert (bench.first.api.keys, service.api.keys, third.api.keys) == (KEYS, KEYS, ())
        bench.services.on_message(Activate(3), [])
        assert (third.api.principals, third.api.keys) == ("principals of 1", KEYS)
        assert bench.activated == [third.config]

    asyncio.run(test())


def test_a_generation_is_retired_when_its_last_request_is_answered():
    async def test() -> None:
        bench = Bench()
        bench.services.all[2] = cast(Service, FakeService(planned_config(), 2))
        going = asyncio.ensure_future(bench.services.handle(request()))
        await asyncio.sleep(0)
        bench.services.on_message(Activate(2), [])
        await asyncio.sleep(60)
        assert bench.sent == []
        bench.first.admission.num_requests = 1
        bench.first.api.answers.set()
        await going
        await asyncio.sleep(60)
        assert bench.sent == [], "a request that was admitted still holds its permit"
        bench.first.admission.num_requests = 0
        await asyncio.sleep(1)
        assert bench.sent == [Retired(1)]
        await asyncio.sleep(60)
        assert bench.sent == [Retired(1)], "it is reported once"

    run_in_virtual_time(test)


def test_a_generation_without_requests_is_retired_at_once():
    async def test() -> None:
        bench = Bench()
        bench.services.all[2] = cast(Service, FakeService(planned_config(), 2))
        bench.services.on_message(Activate(2), [])
        assert bench.sent == [Retired(1)]

    run_in_virtual_time(test)


def test_a_request_that_fails_or_is_cancelled_is_not_counted_any_more():
    async def test() -> None:
        bench = Bench()
        going = asyncio.ensure_future(bench.services.handle(request()))
        await asyncio.sleep(0)
        assert bench.first.num_handled == 1
        going.cancel()
        await asyncio.wait([going])
        assert bench.first.num_handled == 0

    run_in_virtual_time(test)


# --- discard --------------------------------------------------------------------------------------------------------


def test_a_discarded_generation_answers_what_it_still_has_and_stops(listening):
    async def test() -> None:
        bench = Bench()
        service = await bench.prepared(2, listening)
        bench.services.on_message(Discard(2), [])
        [error] = service.errors
        assert isinstance(error, Unavailable)
        assert error.headers == {"retry-after": "1"}
        assert service.dispatcher.is_stopped
        assert [*bench.services.all] == [1]
        assert not bench.first.dispatcher.is_stopped

    asyncio.run(test())


def test_a_generation_that_is_being_prepared_can_be_discarded(listening):
    async def test() -> None:
        bench = Bench()
        is_reading, may_go_on = threading.Event(), threading.Event()

        def wait() -> None:
            is_reading.set()
            may_go_on.wait(30)

        bench.read = wait
        bench.order(2, listening)
        await asyncio.to_thread(is_reading.wait, 30)
        bench.services.on_message(Discard(2), [])
        may_go_on.set()
        bench.read = lambda: None
        await bench.prepared(3, listening)
        assert bench.sent == [Prepared(3)], "nothing is said of the one that was discarded"
        assert sorted(bench.services.all) == [1, 3]
        # `Prepared` is sent before the task has ended, and the task is forgotten only after that.
        await asyncio.gather(*bench.services._preparing.values(), return_exceptions=True)
        assert not bench.services._preparing

    asyncio.run(test())


def test_a_generation_that_nobody_knows_can_be_discarded():
    async def test() -> None:
        bench = Bench()
        bench.services.on_message(Discard(9), [])
        assert [*bench.services.all] == [1]

    run_in_virtual_time(test)


# --- what is told of workers ----------------------------------------------------------------------------------------


def test_a_worker_is_its_generation_s_but_its_death_is_told_to_all(listening):
    async def test() -> None:
        bench = Bench()
        service = await bench.prepared(2, listening)
        fd = create_arena(planned_config().arena)
        try:
            bench.services.on_message(WorkerUp(2, 0, 7, {"pid": 1}), [fd])
        finally:
            os.close(fd)
        assert service.dispatcher.ups == [(Incarnation(0, 7), {"pid": 1})]
        assert bench.first.dispatcher.ups == []
        assert bench.shared_metrics.worker_life(0) == 0, "the lives that are shown are the active generation's"
        bench.services.on_message(WorkerDown(0, 7, "killed", has_crashed=True), [])
        for each in (bench.first, service):
            assert each.dispatcher.downs == [(Incarnation(0, 7), "killed", True)]

    asyncio.run(test())


def test_only_the_generation_without_workers_is_broken_and_a_poison_input_is_refused_by_all(listening):
    async def test() -> None:
        bench = Bench()
        service = await bench.prepared(2, listening, planned_config().model)
        bench.services.on_message(ModelBroken(2, "it does not start"), [])
        model = planned_config().model
        bench.services.on_message(Quarantined(model, "ab"), [])
        assert (bench.first.dispatcher.broken, service.dispatcher.broken) == ([], ["it does not start"])
        assert bench.first.errors == []
        assert [str(error) for error in service.errors] == ["it does not start"]
        assert bench.first.dispatcher.quarantine == service.dispatcher.quarantine == {"ab"}
        deaths = InputDeaths(model, ["ab"], is_isolated=True, has_crashed=False)
        bench.services.on_message(deaths, [])
        assert bench.first.dispatcher.deaths == service.dispatcher.deaths == [deaths]
        bench.services.on_message(InputsCleared(model, ["ab"]), [])
        assert bench.first.dispatcher.cleared == service.dispatcher.cleared == ["ab"]

    asyncio.run(test())


def test_an_identity_is_its_generation_s_and_may_be_withdrawn(listening):
    async def test() -> None:
        bench = Bench()
        service = await bench.prepared(2, listening)
        bench.services.on_message(ModelIdentity(2, 32 * "a"), [])
        assert (bench.first.identity.digest, service.identity.digest) == ("", 32 * "a")
        bench.services.on_message(ModelIdentity(2, "", problem="no file"), [])
        assert (service.identity.digest, service.identity.problem) == ("", "no file")
        assert bench.first.identity.problem == ""

    asyncio.run(test())


def test_changed_files_are_those_of_a_generation(listening):
    async def test() -> None:
        bench = Bench()
        service = await bench.prepared(2, listening)
        bench.services.on_message(ModelFiles(1, "a.json has changed"), [])
        assert (bench.first.dispatcher.changed_files, service.dispatcher.changed_files) == ("a.json has changed", "")

    asyncio.run(test())


# --- the drain ------------------------------------------------------------------------------------------------------


class FakeServer:
    def __init__(self) -> None:
        self.calls: list[tuple[float, float, float]] = []

    async def drain(self, deadline_s: float, grace_s: float) -> bool:
        self.calls.append((asyncio.get_running_loop().time(), deadline_s, grace_s))
        await asyncio.sleep(deadline_s)
        return False


@pytest.mark.parametrize(
    ("deadline_s", "grace_s", "called_at", "quiet_s", "gives_up_at"),
    [
        (30, 5, 4.5, 0.5, 29),
        (30, 0, 0, 0, 29),
        (30, 0.2, 0, 0.2, 29),
        (2, 1, 0.5, 0.5, 1.5),
    ],
)
def test_a_drain(deadline_s, grace_s, called_at, quiet_s, gives_up_at):
    """The server closes within the deadline; shortly before, what still waits is answered with a 503."""

    async def test() -> None:
        bench, server = Bench(), FakeServer()
        everything_answered = await drain(bench.services, cast(Server, server), deadline_s, grace_s)
        assert not everything_answered
        assert bench.first.is_draining
        assert server.calls == [(called_at, deadline_s - called_at, quiet_s)]
        assert asyncio.get_running_loop().time() == deadline_s
        assert bench.first.has_given_up_at == gives_up_at

    run_in_virtual_time(test)


# --- one generation's wiring ----------------------------------------------------------------------------------------


class NoTokenizer:
    """Enough of a tokenizer to be wired."""

    threads = SimpleNamespace(num_threads=1)
    max_chars = max_ids = max_tokens = 16
    least_tokens = 3
    vocabulary = NO_VOCABULARY

    def estimate_tokens(self, inputs: list[str], tokenizing: object) -> int:
        return len(inputs)

    def id_of(self, token: str) -> None:
        """No token is in its vocabulary."""


def service(vector_cache: VectorCacheMemory | None = None, **changes: Any) -> tuple[Service, list[Message]]:
    sent: list[Message] = []
    facts = GatewayFacts(1, b"k" * 32, SharedMetrics.private(), sent.append, vector_cache=vector_cache)
    return Service(replace(planned_config(), **changes), 1, cast(Tokenizer, NoTokenizer()), facts), sent


def test_a_reload_is_requested_from_the_supervisor():
    async def test() -> None:
        made, sent = service()
        asked = HttpRequest(
            method="POST", path="/admin/reload", query=b"", headers={}, http_minor=1, keep_alive=True, request_id="",
            is_admin=True,
        )  # fmt: skip
        assert (await made.api.handle(asked)).status == 202
        assert sent == [ReloadAsked()]

    run_in_virtual_time(test)


def test_a_model_has_its_weight_and_needs_no_core_on_a_gpu():
    async def test() -> None:
        share = service(weight=3.0)[0].dispatcher._share
        assert (share.needs_cores, share.clock.weight) == (True, 3.0)
        assert not service(weight=3.0, compute_type="gpu")[0].dispatcher._share.needs_cores

    run_in_virtual_time(test)


@pytest.mark.parametrize(("who", "is_shared"), [("tenant", False), ("all", True)])
def test_what_is_computed_is_shared_by_tenants_only_if_the_operator_wants_it(who, is_shared):
    async def test() -> None:
        made, _ = service(share_computed=who, vector_cache=cast(VectorCacheMemory, SimpleNamespace()))
        dispatcher = made.dispatcher
        cache = dispatcher._vector_cache
        assert cache is not None
        assert cache._is_shared_by_tenants is dispatcher._flights._is_shared_by_tenants is is_shared
        assert (dispatcher._scope_key is None) is is_shared

    run_in_virtual_time(test)


def test_health_says_why_there_is_no_worker_and_that_the_server_drains():
    async def health(made: Service) -> tuple[int, bytes]:
        asked = HttpRequest(
            method="GET", path="/health", query=b"", headers={}, http_minor=1, keep_alive=True, request_id=""
        )
        response = await made.api.handle(asked)
        assert isinstance(response.body, bytes)
        return response.status, response.body

    async def test() -> None:
        made, _ = service()
        status, body = await health(made)
        assert status == 503
        assert b"shutting down" not in body
        made.dispatcher.set_broken("no worker stays alive")
        assert b"no worker stays alive" in (await health(made))[1]
        made.is_draining = True
        assert (await health(made)) == (503, b'{"status":"unavailable","reason":"the server is shutting down"}')

    run_in_virtual_time(test)
