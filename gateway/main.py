"""The life of a gateway process: start → listen → serve → drain → stop.

Owns the event loop, the HTTP server, the control channel to the supervisor, and what all generations of the
configuration share: certificates, the access log, tracing. Never imports torch.
"""

import asyncio
import faulthandler
import gc
import logging
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import uvloop

from vecd.base import logs
from vecd.base.files import load
from vecd.base.kernel import leave_signals_to_parent
from vecd.base.tasks import NoTasks, Pool, naming_limit
from vecd.gateway.app.app import App
from vecd.gateway.app.routes import ENDPOINTS
from vecd.gateway.app.table import ROUTES, StartingApp
from vecd.gateway.config import GatewayConfig
from vecd.gateway.encoding.forms import RangesError
from vecd.gateway.http.forwarded import TrustedProxies
from vecd.gateway.http.listeners import Server
from vecd.gateway.http.tls import ServerTls, TlsError
from vecd.gateway.request import Limits
from vecd.gateway.scheduling.cores import CoreClaim, Cores, OtherPrograms
from vecd.gateway.service import GatewayProcess
from vecd.gateway.telemetry.finished import FinishedRequests, make_sender
from vecd.gateway.telemetry.measures import SharedMetrics
from vecd.model.card import ModelError
from vecd.shm.control import (
    Channel,
    ChildFailed,
    CoresGranted,
    Drain,
    GatewayListen,
    GatewayStart,
    Heartbeat,
    Message,
    Progress,
    Ready,
    file_id,
    remove_if_ours,
)
from vecd.shm.shared_metrics import Counter, Gauge, Histogram
from vecd.shm.vector_cache import VectorCacheMemory

log = logging.getLogger("vecd.gateway")

_HEARTBEAT_S = 1.0
_SEND_AGAIN_S = 0.5


class Control:
    def __init__(self, channel: Channel, exit: Callable[[int], object] = os._exit) -> None:
        self._channel = channel
        self._exit = exit
        self._unsent: deque[Message] = deque()

    def start(self, on_message: Callable[[Message, list[int]], None]) -> None:
        """Obey messages and send heartbeats from now on. `on_message` takes a message and its descriptors, which are
        closed afterwards. Call on the running loop."""
        self._on_message = on_message
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self.read)
        self._beat()

    def stop(self) -> None:
        self._heartbeat.cancel()
        asyncio.get_running_loop().remove_reader(self._channel.fileno())

    def send(self, message: Message) -> None:
        """Report to the supervisor. While it does not read, messages wait, in their order, and the loop does not."""
        self._unsent.append(message)
        if len(self._unsent) == 1:
            self._send_unsent()

    def _send_unsent(self) -> None:
        while self._unsent:
            try:
                self._channel.send(self._unsent[0], waits=False)
                self._unsent.popleft()
            except BlockingIOError:
                asyncio.get_running_loop().call_later(_SEND_AGAIN_S, self._send_unsent)
                return
            except OSError:
                self._unsent.clear()  # it is gone; the watching thread of `vecd.gateway.main` ends this process

    def _beat(self) -> None:
        with suppress(OSError):
            self._channel.send(Heartbeat(), waits=False)
        self._heartbeat = asyncio.get_running_loop().call_later(_HEARTBEAT_S, self._beat)

    def read(self) -> None:
        """Obey all messages that have come. Side effect: the process ends when one cannot be understood, or was lost
        because there were no descriptors left: a new gateway gets every message again."""
        try:
            while (received := self._channel.receive(0)) is not None:
                message, fds = received
                try:
                    self._on_message(message, fds)
                finally:
                    for fd in fds:
                        os.close(fd)
        except BlockingIOError:
            return
        except Exception as error:
            log.critical("ends by a control message: %s", error, exc_info=not isinstance(error, OSError))
            self._exit(70)
        # The supervisor is gone; the watching thread of `vecd.gateway.main` ends this process.
        asyncio.get_running_loop().remove_reader(self._channel.fileno())


_LAST_EARLY_RESPONSES_S = 0.5
_GC_THRESHOLD = 50_000
_SWITCH_INTERVAL_S = 0.0005
_BUSY_TICK_S, _IDLE_TICK_S = 0.02, 0.25
_PUBLISH_S = 0.2
_NUM_THREADS = 2
"""For `asyncio.to_thread`: metrics, and what may take a second, such as the tokenizer of a reload."""
_QUIET_S = 0.5
"""While the server drains, a connection that has been idle for so long is closed."""
_LARGEST_COUNTED_BYTES = 31 * 1024 * 1024
_LAST_SPANS_S = 1.0
"""For so long at the end, spans of finished requests are still sent."""
_LAST_RESPONSES_S = 1.0
"""Requests that are not answered so long before the drain's deadline are answered with a 503."""


def run(channel: Channel) -> int:
    """Serve until told to drain; returns the exit code."""
    leave_signals_to_parent()
    received = channel.receive()  # this process may be started before the supervisor knows the model
    if received is not None and isinstance(received[0], GatewayListen):
        received = uvloop.run(_await_start(channel, received[0], [socket.socket(fileno=fd) for fd in received[1]]))
    if received is None:
        return 0
    start, (metrics_fd, zmq_fd, *other_fds) = received
    assert isinstance(start, GatewayStart)
    with suppress(RuntimeError, OSError, ValueError):  # there may be no stderr
        # The supervisor sends SIGABRT when the heartbeats stop: the trace shows where this process hangs.
        faulthandler.enable()
    config = load(GatewayConfig, start.config)
    name = "gateway" if config.gateways == 1 else f"gateway-{start.gateway}"
    logs.configure(name, config.log_level, config.log_format)
    shared_metrics = SharedMetrics.mapped(metrics_fd, config.shared_metrics, start.gateway)
    logs.count_lost(lambda: shared_metrics.add(Counter.LINES_LOST))
    os.close(metrics_fd)
    vector_cache, listening_fds = None, other_fds
    if config.vector_cache:
        cache_fd, *listening_fds = other_fds
        vector_cache = VectorCacheMemory.mapped(
            cache_fd, config.vector_cache_spec, start.gateway, bytes.fromhex(start.quarantine_key)
        )
        os.close(cache_fd)
    try:
        _end_with_supervisor(channel, [str(path) for path in (config.uds, config.admin_uds) if path is not None])
        control = Control(channel)
        process = GatewayProcess(start, shared_metrics, control.send, Cores(config.num_cores), vector_cache)
        gateway = Gateway(config, process, control)
    except (ModelError, TlsError, NoTasks) as error:
        channel.send(ChildFailed(str(error), is_configuration=isinstance(error, (RangesError, TlsError))))
        return 3
    keep_freed_memory()
    # Threads parse and tokenize, partly in plain Python: the event loop must not wait 5 ms for the GIL.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # The objects made so far stay; and the collector must not walk through a body of millions of values repeatedly.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 50, 100)
    public, admin, *_ = [*(socket.socket(fileno=fd) for fd in listening_fds), None]
    assert public is not None
    return uvloop.run(gateway.serve(zmq_fd, public, admin))


async def _await_start(
    channel: Channel, order: GatewayListen, sockets: list[socket.socket]
) -> tuple[Message, list[int]] | None:
    """Answer what the start is doing until there is a configuration; returns the message that brings it, or None when
    the supervisor is gone. Then the files of its unix sockets are removed."""
    logs.configure("gateway", order.log_level, order.log_format)
    files = [(sock.getsockname(), file_id(sock.getsockname())) for sock in sockets if sock.family == socket.AF_UNIX]
    app = StartingApp(order.stage)
    started: asyncio.Future[tuple[Message, list[int]] | None] = asyncio.get_running_loop().create_future()

    def read() -> None:
        with suppress(BlockingIOError):
            while not started.done():
                match channel.receive(0):
                    case Progress() as progress, _:
                        app.stage = progress.stage
                    case received:
                        started.set_result(received)

    read()
    if not started.done():
        server = Server(
            app, Limits(max_body_bytes=order.max_body_bytes), trusted_proxies=TrustedProxies(order.trusted_proxies)
        )
        server.is_draining = True  # each response ends its connection: the next is for the gateway that listens then
        with suppress(TlsError):  # which the supervisor reports
            tls = ServerTls(order.tls_cert, order.tls_key) if order.tls_cert and order.tls_key else None
            for sock, is_admin in zip(sockets, (False, True), strict=False):
                await server.start(
                    sock, tls=None if is_admin else tls, is_admin=is_admin, keeps_listening=True,
                )  # fmt: skip
        asyncio.get_running_loop().add_reader(channel.fileno(), read)
        await started
        asyncio.get_running_loop().remove_reader(channel.fileno())
        await server.drain(_LAST_EARLY_RESPONSES_S, 0)
    for sock in sockets:
        sock.close()
    if started.result() is None:
        for path, ours in files:
            remove_if_ours(path, ours)
    return started.result()


class Gateway:
    def __init__(self, config: GatewayConfig, process: GatewayProcess, control: Control) -> None:
        """Raises ModelError for a tokenizer that cannot be read, RangesError for ranges, TlsError for a certificate,
        NoTasks without threads."""
        self._pool = Pool(_NUM_THREADS, "gateway")
        self._config = config
        self._shared_metrics = shared_metrics = process.shared_metrics
        self._control = control
        self._cores = process.cores
        self._other_programs = OtherPrograms()
        self._published_at = 0.0
        self._app = App(ROUTES, config, process)
        self._app.active.dispatcher.start_stage = process.start.start_stage
        self._app.on_activated = self._change
        self._core_claim: CoreClaim | None = None
        if config.gateways > 1:
            self._core_claim = CoreClaim(
                self._cores,
                num_waiting=self._app.num_waiting,
                send=control.send,
                call_later=lambda seconds, look: asyncio.get_running_loop().call_later(seconds, look),
            )
        self._tls = ServerTls(str(config.tls_cert), str(config.tls_key)) if config.tls_cert and config.tls_key else None
        self._finished = FinishedRequests(config, shared_metrics, ENDPOINTS)
        self._server = Server(
            self._app,
            _limits_of(config),
            trusted_proxies=TrustedProxies(config.trusted_proxies),
            on_finished=self._finished.on_finished,
            is_ahead=self._is_ahead if config.gateways > 1 else None,
        )
        shared_metrics.read_gauges = self._gauges
        shared_metrics.read_gauges_of_models = self._app.gauges_of_models

    def _gauges(self) -> dict[Gauge, int]:
        return {
            **self._app.gauges(),
            Gauge.CORES_LEASED: self._cores.leased,
            Gauge.OTHERS_USE: self._read_others_use(),
            Gauge.CONNECTIONS: self._server.num_connections,
        }

    def _read_others_use(self) -> int:
        """Thousandths of a core. Side effect: no core that other programs use is lent."""
        links = [link for service in self._app.all.values() for link in service.dispatcher.links]
        pids = {os.getpid(), os.getppid(), *self._shared_metrics.others(Gauge.PID)}
        pids.update(link.facts[name] for link in links for name in ("pid", "parent_pid"))
        used = self._other_programs.read(time.monotonic(), pids)
        # With a quota of some of the machine's cores, others may use the rest.
        self._cores.others_use = max(0.0, used - (self._other_programs.num_cpus - self._cores.num_cores))
        return int(self._cores.others_use * 1000)

    def _is_ahead(self) -> bool:
        """Whether another gateway that serves has fewer connections than this one, by more than an eighth. Side effect:
        the number of connections is published, for the others."""
        ours, others = self._server.num_connections, self._shared_metrics.others(Gauge.CONNECTIONS)
        self._shared_metrics.set(Gauge.CONNECTIONS, ours)
        serving = self._shared_metrics.others(Gauge.WORKERS)
        fewest = min((theirs for theirs, num in zip(others, serving, strict=True) if num), default=ours)
        return ours > fewest + fewest // 8

    async def serve(self, zmq_fd: int, listening: socket.socket, admin: socket.socket | None) -> int:
        """Listen until the supervisor says drain, and drain. Returns the exit code."""
        loop = asyncio.get_running_loop()
        config = self._config
        try:
            self._app.active.dispatcher.start(zmq_fd)
        except NoTasks as error:
            self._control.send(ChildFailed(str(error)))
            return 3
        loop.set_default_executor(self._pool)
        self._app.active.dispatcher.activate()
        name = listening.getsockname()
        self._address = (str(name), None) if listening.family == socket.AF_UNIX else (name[0], name[1])
        self._start_tracing(config)
        await self._server.start(listening, tls=self._tls, keeps_listening=config.keeps_listening)
        if admin is not None:
            await self._server.start(admin, is_admin=True, keeps_listening=config.keeps_admin_listening)
        self._tick_in(_BUSY_TICK_S)
        self._control.send(Ready())
        self._drain_order: asyncio.Future[Drain] = loop.create_future()
        self._control.start(self._on_message)
        order = await self._drain_order
        everything_answered = await drain(self._app, self._server, order.deadline_s, order.grace_s)
        self._control.stop()
        self._timer.cancel()
        self._shared_metrics.publish()
        self._app.stop()
        self._finished.report_dropped()
        if self._finished.sender is not None:
            self._finished.sender.close(_LAST_SPANS_S)
        self._pool.shutdown()  # the loop's own way to do it needs one more thread
        if not everything_answered:
            log.warning("the drain's deadline has passed: connections that waited for a response were cut")
        return 0

    def _on_message(self, message: Message, fds: list[int]) -> None:
        match message:
            case Drain():
                if not self._drain_order.done():
                    self._drain_order.set_result(message)
            case CoresGranted():
                assert self._core_claim is not None
                self._core_claim.grant(message.num)
                self._app.schedule_dispatch()  # batches may have waited for a core
            case _:
                self._app.on_message(message, fds)

    def _tick_in(self, seconds: float) -> None:
        self._due = time.perf_counter() + seconds
        self._timer = asyncio.get_running_loop().call_later(seconds, self._tick)

    def _tick(self) -> None:
        """Record the lag of the event loop, and publish the polled gauges. Ticks seldom while no request is being
        handled: idle, 50 ticks a second take 1 % of a core, 4 take 0.1 %."""
        now = time.perf_counter()
        self._shared_metrics.observe(Histogram.LOOP_LAG, max(0.0, now - self._due))
        self._tick_in(_BUSY_TICK_S if self._server.num_requests_in_flight else _IDLE_TICK_S)
        if now - self._published_at >= _PUBLISH_S:
            self._published_at = now
            self._shared_metrics.publish()

    def _change(self, config: GatewayConfig) -> None:
        """Apply the first model's configuration to what all generations share."""
        logs.change(config.log_level, config.log_format)
        self._finished.change(config)
        self._start_tracing(config)
        self._server.change(_limits_of(config), TrustedProxies(config.trusted_proxies))
        if self._tls is not None:
            try:
                self._tls.reload()
            except TlsError as error:
                log.error("the certificate of before is used on: %s", error)

    def _start_tracing(self, config: GatewayConfig) -> None:
        """The sender is made anew even if only the model's name has changed, because spans have the name."""
        before = self._finished.sender
        self._finished.sender = make_sender(config, self._shared_metrics.gateway, self._address, ENDPOINTS)
        self._app.begin_trace = self._finished.begin_trace if self._finished.sender is not None else None
        if before is not None:
            asyncio.get_running_loop().run_in_executor(None, before.close, _LAST_SPANS_S)


async def drain(app: App, server: Server, deadline_s: float, grace_s: float) -> bool:
    """Answer what has been sent, and close everything within `deadline_s`. True when everything was answered. For the
    first `grace_s` everything is served as before, but `/health` says 503."""
    app.process.is_draining = True
    last_responses_s = min(_LAST_RESPONSES_S, deadline_s / 4)
    asyncio.get_running_loop().call_later(deadline_s - last_responses_s, app.give_up)
    # The server spends the last part of the grace on connections that are being opened.
    quiet_s = min(grace_s, _QUIET_S)
    await asyncio.sleep(grace_s - quiet_s)
    return await server.drain(deadline_s - (grace_s - quiet_s), quiet_s)


def _limits_of(config: GatewayConfig) -> Limits:
    return Limits(
        max_body_bytes=config.max_body_bytes,
        max_connections=config.share(config.max_connections),
        max_connections_per_address=config.share(config.max_connections_per_address),
    )


def _end_with_supervisor(channel: Channel, uds_paths: Sequence[str]) -> None:
    """End this process when the supervisor dies, even while the event loop is blocked: a thread waits until the control
    channel hangs up. Unix sockets' files are all that could be left behind. Raises NoTasks."""
    ids = {path: file_id(path) for path in uds_paths}

    def watch() -> None:
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLRDHUP)
        poll.poll()
        for path, ours in ids.items():
            remove_if_ours(path, ours)
        os._exit(1)

    with naming_limit():
        threading.Thread(target=watch, name="supervisor-watch", daemon=True).start()


def keep_freed_memory() -> None:
    """Keep up to some 62 MB of freed memory for the next answers.

    glibc gives freed memory at the end of its heap back at 128 KB, and with every answer of megabytes the kernel has to
    hand out fresh pages: 4,000 page faults for 2,048 × 384 floats, half of the cost of their encoding. It stops once a
    large block has been freed, and this frees one that was never touched. Measured: 128 × 1024 floats as JSON 6.1 → 3.1
    ms, 2,048 × 384 30.6 → 20.0 ms. With another C library it does nothing. Source: mallopt(3), M_MMAP_THRESHOLD,
    "dynamic mmap threshold"; 32 MB is the largest that it adjusts to.
    """
    bytes(_LARGEST_COUNTED_BYTES)
