"""The gateway's life: start → listen → serve → drain → stop.

Owns the event loop and the control channel to the supervisor, and wires the parts together. Called by
`vecd.launch.child` in a process of its own, which never imports torch.
"""

import asyncio
import faulthandler
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import uvloop

from vecd.gateway.admission.admission import Admission
from vecd.gateway.dispatch.dispatcher import Dispatcher
from vecd.gateway.http.contract import Timeouts
from vecd.gateway.http.server import Server
from vecd.gateway.http.tls import ServerTls, TlsError
from vecd.gateway.memory import keep_freed_memory
from vecd.gateway.pipeline import Pipeline
from vecd.gateway.scheduling.policy import BatchingPolicy
from vecd.gateway.telemetry.access_log import AccessLog
from vecd.gateway.telemetry.on_finished import Observer
from vecd.gateway.telemetry.shared_metrics import SharedMetrics
from vecd.gateway.telemetry.spans import Facts, SpanSender
from vecd.gateway.telemetry.tei_metrics import TeiCounts
from vecd.gateway.telemetry.tracing import Tracing
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.gateway.types.config import ApiKey, GatewayConfig
from vecd.gateway.types.errors import ApiError, Unavailable
from vecd.gateway.types.messages import HttpRequest, Limits, Response
from vecd.gateway.types.request import Overflow
from vecd.shm import logs
from vecd.shm.card import ModelError
from vecd.shm.control import (
    Activate,
    Channel,
    ChildFailed,
    Discard,
    Drain,
    GatewayReady,
    GatewayStart,
    Heartbeat,
    Message,
    ModelBroken,
    NewKeys,
    Prepare,
    Prepared,
    Quarantined,
    ReloadAsked,
    Retired,
    WorkerDown,
    WorkerMet,
    WorkerStuck,
    WorkerUp,
)
from vecd.shm.output import Output
from vecd.shm.shared_metrics import Counter, Gauge, Histogram
from vecd.shm.socketfile import file_id, remove_if_ours
from vecd.shm.views import map_arena
from vecd.shm.wire import Incarnation

log = logging.getLogger("vecd.gateway")

_START_TIMEOUT_S = 10.0
_GC_THRESHOLD = 50_000
_SWITCH_INTERVAL_S = 0.0005
_BUSY_TICK_S, _IDLE_TICK_S = 0.02, 0.25
_PUBLISH_S = 0.2
_BEAT_S = 1.0
_TELL_AGAIN_S = 0.5
_RETIRE_POLL_S = 0.02
_QUIET_S = 0.5
"""Without a byte for so long, an idle connection is closed while the server drains."""
_LAST_SPANS_S = 1.0
"""So long at the end, spans of requests that are over are still sent."""
_LAST_ANSWERS_S = 1.0
"""So long before the drain's deadline, what is not answered yet is told that it will not be."""


def run(channel: Channel) -> int:
    """Serve until told to drain; returns the exit code. `channel` is the inherited end of the control connection."""
    # The terminal's Ctrl-C reaches the whole process group; only the supervisor acts on it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    received = channel.receive(_START_TIMEOUT_S)
    if received is None:
        return 0
    start, (board_fd, zmq_fd, *listening_fds) = received
    assert isinstance(start, GatewayStart)
    with suppress(RuntimeError, OSError, ValueError):  # there may be no stderr
        # A supervisor that does not hear of this process any more asks with SIGABRT where it hangs.
        faulthandler.enable()
    config = GatewayConfig.from_json(start.config)
    name = "gateway" if config.num_gateways == 1 else f"gateway-{start.gateway}"
    logs.configure(name, config.log_level, config.log_format)
    shared_metrics = SharedMetrics.mapped(board_fd, config.shared_metrics, start.gateway)
    logs.count_lost(lambda: shared_metrics.add(Counter.LINES_LOST))
    os.close(board_fd)
    _end_with_supervisor(channel, [path for path in (config.uds, config.admin_uds) if path is not None])
    try:
        gateway = Gateway(config, start, channel, shared_metrics)
    except (ModelError, TlsError) as error:
        channel.send(ChildFailed(str(error)))
        return 3
    keep_freed_memory()
    # Of the threads that parse and tokenize, some steps are plain Python: the loop must not wait 5 ms for the GIL.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # What has been set up stays; and a body of millions of values must not be walked through again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 50, 100)
    public, admin, *_ = [*(socket.socket(fileno=fd) for fd in listening_fds), None]
    assert public is not None
    return uvloop.run(gateway.serve(zmq_fd, public, admin))


class Service:
    """All that a request goes through, for one generation of the configuration."""

    def __init__(
        self,
        config: GatewayConfig,
        generation: int,
        tokenizer: Tokenizer,
        dispatcher: Dispatcher,
        policy: BatchingPolicy,
        shared_metrics: SharedMetrics,
    ) -> None:
        self.config = config
        self.generation = generation
        self.tokenizer = tokenizer
        self.dispatcher = dispatcher
        self.policy = policy
        self._board = shared_metrics
        self.admission = Admission(
            max_requests=config.share(config.max_requests),
            max_wait_s=config.max_wait_s,
            policy=policy,
            workers=dispatcher,
        )
        self.app = Pipeline(
            config,
            admission=self.admission,
            tokenizer=tokenizer,
            policy=policy,
            dispatcher=dispatcher,
            shared_metrics=shared_metrics,
        )
        self.num_handled = 0
        """Requests that are being handled."""

    def stop(self) -> None:
        self.dispatcher.stop()
        # Waits for the turn that is being taken, which on a huge text may be a second.
        asyncio.get_running_loop().run_in_executor(None, self.tokenizer.threads.close)


class Services:
    """What the server serves: the app of the active generation. A request stays with the one that it began with."""

    def __init__(self, first: Service) -> None:
        self.active = first
        self.all = {first.generation: first}
        """Those that have requests, or may get them, by generation."""
        self.tracing: Tracing | None = None

    def check_head(self, request: HttpRequest) -> Response | None:
        return self.active.app.check_head(request)

    async def handle(self, request: HttpRequest) -> Response:
        service = self.active
        service.num_handled += 1
        if self.tracing is not None:
            self.tracing.begin(request)
        try:
            return await service.app.handle(request)
        finally:
            service.num_handled -= 1

    def render_error(self, error: ApiError, path: str | None) -> Response:
        return self.active.app.render_error(error, path)

    def add_headers(self, response: Response, request: HttpRequest | None) -> None:
        self.active.app.add_headers(response, request)

    def total(self, value: Callable[[Service], int]) -> int:
        return sum(map(value, self.all.values()))


class Gateway:
    def __init__(
        self, config: GatewayConfig, start: GatewayStart, channel: Channel, shared_metrics: SharedMetrics
    ) -> None:
        """Raises ModelError for a tokenizer that cannot be read, and TlsError for a certificate."""
        self._config = config
        self._board = shared_metrics
        self._channel = channel
        self._epoch = start.epoch
        self._keys = config.keys
        """The newest that this gateway has been told of."""
        self._quarantine_key = bytes.fromhex(start.quarantine_key)
        self._services = Services(self._make_service(config, start.generation, _read_tokenizer(config)))
        self._tls = ServerTls(config.tls_cert, config.tls_key) if config.tls_cert and config.tls_key else None
        self._preparing: dict[int, asyncio.Task[None]] = {}
        self._observer = Observer(shared_metrics)
        self._access_log = AccessLog(config, shared_metrics)
        self._address: tuple[str, int | None] = "", None
        self._server = Server(
            self._services,
            limits=Limits(max_body_bytes=config.max_body_bytes),
            timeouts=Timeouts(),
            on_answer=self._observer.note_over,
            is_ahead=self._is_ahead if config.num_gateways > 1 else None,
            max_connections=config.share(config.max_connections),
            max_connections_per_address=config.share(config.max_connections_per_address),
        )
        services = self._services
        shared_metrics.poll(
            {
                Gauge.REQUESTS: lambda: services.total(lambda service: service.admission.num_requests),
                Gauge.QUEUED_SEQUENCES: lambda: services.total(lambda service: service.policy.queued_sequences),
                Gauge.QUEUED_TOKENS: lambda: services.total(lambda service: service.policy.queued_tokens),
                Gauge.ARENA_ROWS: lambda: services.total(lambda service: service.dispatcher.num_rows),
                Gauge.ARENA_ROWS_IN_USE: lambda: services.total(lambda service: service.dispatcher.num_rows_in_use),
                Gauge.QUEUE_AGE_US: self._queue_age_us,
                Gauge.IN_FLIGHT_TOKENS: lambda: services.total(lambda service: service.dispatcher.in_flight_tokens),
                Gauge.CONNECTIONS: lambda: self._server.num_connections,
                Gauge.WORKERS: lambda: sum(link.is_usable for link in services.active.dispatcher.links),
            }
        )

    def _make_service(self, config: GatewayConfig, generation: int, tokenizer: Tokenizer) -> Service:
        policy = BatchingPolicy(
            config.max_batch_tokens,
            config.arena.rows_per_slot,
            config.max_tokens,
            num_gateways=config.num_gateways,
            queued_elsewhere=lambda: self._board.others(Gauge.QUEUED_TOKENS),
        )
        dispatcher = Dispatcher(
            policy=policy,
            epoch=self._epoch,
            max_batch_tokens=config.max_batch_tokens,
            batch_timeout_s=config.batch_timeout_s,
            num_gateways=config.num_gateways,
            widths={output: output.width_of(config.card) for output in Output},
            on_stuck=lambda who: self._tell(WorkerStuck(who.worker, who.life)),
            on_connected=lambda who: self._tell(WorkerMet(who.worker, who.life)),
            on_quarantined=lambda digest: self._tell(Quarantined(digest)),
            on_broken=lambda make_error: service.app.fail_all(make_error),  # noqa: PLW0108 (it is made below)
            on_sending=TeiCounts(self._board).count_batch if config.has_tei_metrics else None,
            quarantine_key=self._quarantine_key,
            shared_metrics=self._board,
        )
        service = Service(config, generation, tokenizer, dispatcher, policy, self._board)
        service.app.on_reload = lambda: self._tell(ReloadAsked())
        return service

    def _queue_age_us(self) -> int:
        now = time.monotonic()
        oldest_s = max(service.policy.oldest_wait_s(now) for service in self._services.all.values())
        return int(oldest_s * 1e6)

    def _is_ahead(self) -> bool:
        """Whether a gateway that serves has fewer connections than this one; by more than an eighth, if they are many.

        Side effect: the others are told of ours, because each goes by what the others have at the moment.
        """
        ours, others = self._server.num_connections, self._board.others(Gauge.CONNECTIONS)
        self._board.set(Gauge.CONNECTIONS, ours)
        serving = self._board.others(Gauge.WORKERS)
        fewest = min((theirs for theirs, num in zip(others, serving, strict=True) if num), default=ours)
        return ours > fewest + fewest // 8

    async def serve(self, zmq_fd: int, listening: socket.socket, admin: socket.socket | None) -> int:
        loop = asyncio.get_running_loop()
        self._drained: asyncio.Future[bool] = loop.create_future()
        self._services.active.dispatcher.start(zmq_fd)
        config = self._config
        self._address = _address_of(listening)
        self._listen_to_requests(config)
        await self._server.start(listening, tls=self._tls, keeps_listening=config.keeps_listening)
        if admin is not None:
            await self._server.start(admin, is_admin=True, keeps_listening=config.keeps_admin_listening)
        loop.add_reader(self._channel.fileno(), self._read_control)
        self._watch = LoopWatch(self._board, loop, lambda: self._server.num_requests_in_flight > 0)
        self._tell(GatewayReady())
        self._beat()
        everything_answered = await self._drained
        self._beating.cancel()
        loop.remove_reader(self._channel.fileno())
        self._watch.stop()
        for service in self._services.all.values():
            service.dispatcher.stop()
        self._access_log.tell_dropped()
        if self._services.tracing is not None:
            self._services.tracing.sender.close(_LAST_SPANS_S)
        if not everything_answered:
            log.warning("the drain's deadline has passed: connections that waited for an answer were cut")
        return 0

    def _tell(self, message: Message) -> None:
        """Tell the supervisor. One that is stopped does not hold up the loop: it is told later."""
        try:
            self._channel.send(message, waits=False)
        except BlockingIOError:
            asyncio.get_running_loop().call_later(_TELL_AGAIN_S, self._tell, message)
        except OSError:
            pass  # it is gone; the watching thread ends this process

    def _beat(self) -> None:
        """Tell the supervisor that the loop turns."""
        with suppress(OSError):
            self._channel.send(Heartbeat(), waits=False)
        self._beating = asyncio.get_running_loop().call_later(_BEAT_S, self._beat)

    # --- what the supervisor says ---------------------------------------------------------------------------

    def _read_control(self) -> None:
        """Obey all that has been said. A message half understood, or lost for want of descriptors, is worse than a new
        gateway, which is told everything again."""
        try:
            while (received := self._channel.receive(0)) is not None:
                message, fds = received
                try:
                    self._on_control(message, fds)
                finally:
                    for fd in fds:
                        os.close(fd)
        except BlockingIOError:
            return
        except Exception as error:
            log.critical("ends by a control message: %s", error, exc_info=not isinstance(error, OSError))
            os._exit(70)
        # The supervisor is gone; the watching thread ends this process.
        asyncio.get_running_loop().remove_reader(self._channel.fileno())

    def _on_control(self, message: object, fds: list[int]) -> None:
        match message:
            case WorkerUp():
                service = self._services.all[message.generation]
                slots = map_arena(fds[0], service.config.arena, writable=False)[self._board.gateway]
                self._board.worker_up(message.worker, message.life)
                service.dispatcher.worker_up(Incarnation(message.worker, message.life), slots, message.facts)
            case WorkerDown():
                for service in self._services.all.values():
                    who = Incarnation(message.worker, message.life)
                    service.dispatcher.worker_down(who, message.reason, has_crashed=message.has_crashed)
            case ModelBroken():
                self._services.all[message.generation].dispatcher.set_broken(message.reason)
            case Quarantined():
                for service in self._services.all.values():
                    service.dispatcher.quarantine.add(message.digest)
            case NewKeys():
                self._keys = tuple(ApiKey.from_json(key) for key in message.keys)
                for service in self._services.all.values():
                    service.app.set_keys(self._keys)
            case Prepare():
                # A socket object, because it closes itself should the task be cancelled before it begins.
                zmq_listening = socket.socket(fileno=os.dup(fds[0]))
                task = self._preparing[message.generation] = asyncio.ensure_future(
                    self._prepare(message, zmq_listening)
                )
                task.add_done_callback(lambda _: self._preparing.pop(message.generation, None))
            case Activate():
                self._activate(message.generation)
            case Discard():
                self._discard(message.generation)
            case Drain():
                self._draining = asyncio.ensure_future(self._drain(message.deadline_s, message.grace_s))

    async def _prepare(self, order: Prepare, zmq_listening: socket.socket) -> None:
        """Make ready for another generation beside those there are."""
        try:
            config = GatewayConfig.from_json(order.config)
            tokenizer = await asyncio.get_running_loop().run_in_executor(None, _read_tokenizer, config)
            service = self._make_service(config, order.generation, tokenizer)
            service.dispatcher.start(zmq_listening.fileno())
        except asyncio.CancelledError:
            raise
        except ModelError as error:
            self._tell(Prepared(order.generation, str(error)))
        except BaseException as error:  # libraries in Rust raise what is no Exception
            log.error("generation %d cannot be prepared", order.generation, exc_info=True)
            self._tell(Prepared(order.generation, f"a gateway failed with {type(error).__name__}"))
        else:
            zmq_listening.detach()  # the dispatcher's from now on
            service.app.is_draining = self._services.active.app.is_draining
            self._services.all[order.generation] = service
            self._tell(Prepared(order.generation))

    def _activate(self, generation: int) -> None:
        before = self._services.active
        service = self._services.active = self._services.all[generation]
        config = service.config
        service.app.callers = before.app.callers  # what they have used stays used
        service.app.set_keys(self._keys)
        logs.change(config.log_level, config.log_format)
        self._access_log.change(config)
        self._listen_to_requests(config)
        self._server.change_limits(
            Limits(max_body_bytes=config.max_body_bytes),
            config.share(config.max_connections),
            config.share(config.max_connections_per_address),
        )
        if self._tls is not None:
            try:
                self._tls.reload()
            except TlsError as error:
                log.error("the certificate of before is used on: %s", error)
        self._retire(before)

    def _listen_to_requests(self, config: GatewayConfig) -> None:
        """Who is told of requests that are over, by this configuration."""
        before = self._services.tracing
        if config.otlp_endpoint is None:
            tracing = None
        else:
            # Also where only the model's name has changed: it is in the spans.
            facts = Facts(
                config.version, config.model, self._board.gateway, "https" if self._tls else "http", *self._address
            )
            tracing = Tracing(SpanSender(config.otlp_endpoint, facts), config.trace_ratio)
        self._services.tracing = tracing
        self._observer.listeners = [self._access_log.note_over]
        if tracing is not None:
            self._observer.listeners.append(tracing.note_over)
        if before is not None:
            asyncio.get_running_loop().run_in_executor(None, before.sender.close, _LAST_SPANS_S)

    def _retire(self, service: Service) -> None:
        """Say so as soon as its last request is answered."""
        if service.num_handled or service.admission.num_requests:
            asyncio.get_running_loop().call_later(_RETIRE_POLL_S, self._retire, service)
        else:
            self._tell(Retired(service.generation))

    def _discard(self, generation: int) -> None:
        if (preparing := self._preparing.get(generation)) is not None:
            preparing.cancel()
        service = self._services.all.pop(generation, None)
        if service is not None:
            service.app.end(lambda: Unavailable("The server has changed its configuration", retry_after_s=1))
            service.stop()
            gc.collect()  # a tokenizer, and views of arenas

    async def _drain(self, deadline_s: float, grace_s: float) -> None:
        for service in self._services.all.values():
            service.app.is_draining = True
        last_answers_s = min(_LAST_ANSWERS_S, deadline_s / 4)
        asyncio.get_running_loop().call_later(deadline_s - last_answers_s, self._give_up)
        # The last moments of the grace are the server's, for connections that are under way.
        quiet_s = min(grace_s, _QUIET_S)
        try:
            await asyncio.sleep(grace_s - quiet_s)
            self._drained.set_result(await self._server.drain(deadline_s - (grace_s - quiet_s), quiet_s))
        except Exception as error:
            self._drained.set_exception(error)

    def _give_up(self) -> None:
        for service in self._services.all.values():
            service.app.give_up()


def _address_of(sock: socket.socket) -> tuple[str, int | None]:
    """Where a socket listens: address and port, or path and None."""
    name = sock.getsockname()
    return (str(name), None) if sock.family == socket.AF_UNIX else (name[0], name[1])


def _read_tokenizer(config: GatewayConfig) -> Tokenizer:
    return Tokenizer(
        config.card,
        config.max_tokens,
        config.token_ids,
        overflow=Overflow(config.overflow),
        literal_special_tokens=config.literal_special_tokens,
    )


class LoopWatch:
    """Records how late the event loop comes to what is due, and publishes the board's polled gauges.

    Looks often while requests are being answered, and seldom while none is: to wake a process that sleeps costs much
    more than to be one more thing that its loop does. Measured: of a core, an idle gateway takes 1 % to look 50 times a
    second and 0.1 % to look 4 times.
    """

    def __init__(
        self, shared_metrics: SharedMetrics, loop: asyncio.AbstractEventLoop, is_busy: Callable[[], bool]
    ) -> None:
        """Call on the running loop."""
        self._board = shared_metrics
        self._loop = loop
        self._is_busy = is_busy
        self._published_at = 0.0
        self._tick_in(_BUSY_TICK_S)

    def stop(self) -> None:
        self._timer.cancel()

    def _tick_in(self, seconds: float) -> None:
        self._due = time.perf_counter() + seconds
        self._timer = self._loop.call_later(seconds, self._tick)

    def _tick(self) -> None:
        now = time.perf_counter()
        self._board.observe(Histogram.LOOP_LAG, max(0.0, now - self._due))
        self._tick_in(_BUSY_TICK_S if self._is_busy() else _IDLE_TICK_S)
        if now - self._published_at >= _PUBLISH_S:
            self._published_at = now
            self._board.publish()


def _end_with_supervisor(channel: Channel, uds_paths: Sequence[str]) -> None:
    """End this process when the supervisor dies, even while the event loop is blocked.

    Its death hangs up the control channel, which a thread waits for. Nothing is left behind: unix sockets' files are
    the only things with a name.
    """
    ids = {path: file_id(path) for path in uds_paths}

    def watch() -> None:
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLRDHUP)
        poll.poll()
        for path, ours in ids.items():
            remove_if_ours(path, ours)
        os._exit(1)

    try:
        threading.Thread(target=watch, name="supervisor-watch", daemon=True).start()
    except RuntimeError as error:  # a limit on processes
        log.critical("%s", error)
        os._exit(70)
