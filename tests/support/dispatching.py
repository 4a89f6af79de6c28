"""A dispatcher over real ZeroMQ, and workers that a test plays.

Owns their making and their end. Most tests take the fixture `bench`, whose dispatcher has been started.
"""

import asyncio
import os
import threading
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq

from vecd.gateway.app.routes import ENDPOINTS
from vecd.gateway.dispatch.dispatcher import Dispatcher
from vecd.gateway.dispatch.residence import Residence
from vecd.gateway.encoding.result import Result
from vecd.gateway.request import Make, Priority, TokenizedInput
from vecd.gateway.scheduling.admission import Admission
from vecd.gateway.scheduling.cores import Cores
from vecd.gateway.scheduling.policy import BatchingPolicy
from vecd.gateway.scheduling.queue import QueuedSequence, RequestQueue
from vecd.gateway.telemetry.finished import FinishedRequests
from vecd.gateway.telemetry.measures import SharedMetrics
from vecd.launch.sockets import make_zmq_endpoint
from vecd.model.card import ModelCard
from vecd.shm.arena import ArenaSpec, create_arena
from vecd.shm.control import Channel, InputDeaths, Message, Quarantined, WorkerStuck
from vecd.shm.output import Output
from vecd.shm.shared_metrics import SharedMetricsSpec
from vecd.shm.vector_cache import VectorCacheMemory
from vecd.shm.views import map_arena
from vecd.shm.wire import Alive, Batch, Done, Incarnation, Probe, decode_to_worker, encode
from vecd.workers.process.loop import EngineLost, Loop, connected

SPEC = ArenaSpec(num_slots=2, rows_per_slot=8, dim=4)
EPOCH = 7
CONFIG: dict[str, Any] = {
    "model": "", "gateways": 1, "share_computed": "tenant", "compute_type": "cpu", "weight": 1.0,
    "max_batch_tokens": 16, "batch_timeout_s": 60, "model_index": 0,
}  # fmt: skip
"""What a dispatcher reads of the configuration, but the card."""


def batching(max_tokens: int, max_rows: int, longest: int, num_gateways: int = 1) -> Any:
    """What a batching policy reads of the configuration."""
    arena = SimpleNamespace(rows_per_slot=max_rows)
    return SimpleNamespace(max_batch_tokens=max_tokens, arena=arena, max_tokens=longest, gateways=num_gateways)


def admitting(max_requests: int, max_wait: float, policy: Any, workers: Any) -> Admission:
    config: Any = SimpleNamespace(max_requests=max_requests, max_wait=max_wait, share=int)
    return Admission(config, policy, workers)


DEADLINE_S = 10.0


def private_metrics() -> SharedMetrics:
    """Of a gateway without a supervisor."""
    spec = SharedMetricsSpec(num_gateways=1, num_workers=64)
    return SharedMetrics(memoryview(bytearray(spec.nbytes)).cast("q"), spec, 0)


def finished_requests(shared_metrics: SharedMetrics, trace_ratio: float = 0, sender: Any = None) -> FinishedRequests:
    """Logs nothing."""
    config: Any = SimpleNamespace(log_requests=0, log_format="text", trusted_proxies="", trace_ratio=trace_ratio)
    made = FinishedRequests(config, shared_metrics, ENDPOINTS)
    made.sender = sender
    return made


class Worker:
    """A worker as the gateway sees it. A sequence's row is filled with its first token id; where it asks for rows of
    its tokens, each is filled with that token's."""

    def __init__(self, address_fd: int, index: int = 0, life: int = 1, spec: ArenaSpec = SPEC) -> None:
        self.incarnation = Incarnation(index, life)
        self.fd = create_arena(spec)
        [views] = map_arena(self.fd, spec, writable=True)
        self.slots, self.begun = views.rows, views.begun
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, self.incarnation.identity)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"ipc:///proc/self/fd/{address_fd}")

    async def receive(self) -> Batch:
        """The next batch. Probes are answered on the way."""
        async with asyncio.timeout(DEADLINE_S):
            while (batch := self.receive_nowait()) is None:
                await asyncio.sleep(0.001)
            return batch

    def receive_nowait(self) -> Batch | None:
        """The next batch, if one has come. Probes are answered on the way."""
        while True:
            try:
                message = decode_to_worker(self._socket.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                return None
            if isinstance(message, Batch):
                if not self.begun.any():
                    self.begun[message.slot] = message.number
                return message
            assert message == Probe(EPOCH)
            self.send(Alive(EPOCH))

    def send(self, message) -> None:
        self.send_frames(encode(message))

    def send_frames(self, frames: list[bytes]) -> None:
        self._socket.send_multipart(frames)

    def compute(self, batch: Batch) -> int:
        """Write the rows. How many there are."""
        numbers: list[int] = []
        for ids, output in zip(sequences_of(batch), batch.outputs_bytes or bytes(batch.num_sequences), strict=True):
            numbers += ids if output == Output.TOKENS else ids[:1]
        self.slots[batch.slot][: len(numbers)] = np.array(numbers)[:, None]
        return len(numbers)

    def answer(self, batch: Batch) -> None:
        num_rows = self.compute(batch)
        self.begun[batch.slot] = 0
        self.send(Done(EPOCH, batch.number, batch.slot, num_rows, 1))

    def close(self) -> None:
        self._context.destroy(linger=0)
        os.close(self.fd)


def sequences_of(batch: Batch) -> list[list[int]]:
    """The token ids of each."""
    ends = np.cumsum(np.frombuffer(batch.lengths_bytes, dtype="<i4"))
    ids = np.frombuffer(batch.token_ids_bytes, dtype="<i4")
    return [part.tolist() for part in np.split(ids, ends[:-1])]


class Rows(Make):
    """Of each row its first number; of rows of tokens all numbers."""

    def __init__(self, num_rows: int, output: Output) -> None:
        self.fragments = [b""] * num_rows
        self.num_rows_left: list[int] = []
        self.output = output

    def put(self, index, rows, num_left) -> None:
        assert rows.flags.c_contiguous
        if self.output.is_per_token:
            self.num_rows_left.append(num_left)
            numbers = b" ".join(b"%d" % number for number in rows.flat)
            self.fragments[index] += (b"," if self.fragments[index] else b"") + numbers
        else:
            self.fragments[index : index + len(rows)] = [b"%d" % row[0] for row in rows]


class Request(Result):
    request_queue: RequestQueue

    def __init__(self, num_rows: int, output: Output = Output.VECTORS) -> None:
        super().__init__(num_rows, (Rows(num_rows, output),), asyncio.get_running_loop())

    @property
    def fragments(self) -> list[bytes]:
        return self.made[0].fragments

    @property
    def num_rows_left(self):
        """As each delivery of tokens' rows said it."""
        return self.made[0].num_rows_left


def _report(reported: list[Message], others: list[Dispatcher], message: Message) -> None:
    # Not a method of the bench: a cycle would keep a closed dispatcher's arenas.
    reported.append(message)
    if isinstance(message, InputDeaths):
        for other in others:
            other.known.note(message)


def tokenized(ids: list[int]) -> TokenizedInput:
    return TokenizedInput(array("i", ids).tobytes(), len(ids), False)


class Dispatched:
    """A dispatcher, and requests that are given to it."""

    def __init__(
        self,
        *,
        generation: int = 1,
        shared_metrics: SharedMetrics | None = None,
        spec: ArenaSpec = SPEC,
        card: ModelCard | None = None,
        cores: Cores | None = None,
        vector_memory: VectorCacheMemory | None = None,
        **changes: Any,
    ) -> None:
        """`card`: one of the rows of `spec`, without. `changes` are those of CONFIG."""
        dim = spec.dim
        card = card or ModelCard("", "", "bert", dim, dim, 16, dim, ("mean",), (), False, "", num_labels=dim)
        self.spec = spec
        self.policy = BatchingPolicy(batching(16, spec.rows_per_slot, longest=16))
        self.shared_metrics = shared_metrics or private_metrics()
        self.reported: list[Message] = []
        """What the dispatcher has reported to the supervisor."""
        self.others: list[Dispatcher] = []
        """Dispatchers of other gateways, which the deaths of inputs are passed on to."""
        start: Any = SimpleNamespace(epoch=EPOCH, quarantine_key=b"key".hex())
        config: Any = SimpleNamespace(card=card, **{**CONFIG, **changes})
        self.dispatcher = Dispatcher(
            config,
            generation,
            self.policy,
            start=start,
            report=partial(_report, self.reported, self.others),
            shared_metrics=self.shared_metrics,
            cores=cores or Cores(1),
            vector_memory=vector_memory,
        )

    def request(
        self,
        *first_ids: int,
        length: int = 2,
        output: Output = Output.VECTORS,
        priority: Priority = Priority.NORMAL,
        tenant: str = "",
    ) -> Request:
        return self._request([[n] * length for n in first_ids], output, priority, tenant)

    def tokens_of(self, *inputs: list[int]) -> Request:
        """A request for the rows of all tokens, of inputs with these ids."""
        return self._request(inputs, Output.TOKENS)

    def chunked(self, *inputs: list[int]) -> Request:
        """A request of inputs in chunks, each of two tokens with one of these ids and of the same weight; an input of
        one id is no chunk."""
        request = self._open(len(inputs))
        sequences: list[QueuedSequence] = []
        for index, ids in enumerate(inputs):
            chunks = [tokenized([n, n])._replace(weight=1) for n in ids]
            parts = chunks if len(ids) > 1 else [tokenized(ids * 2)]
            if len(ids) > 1:
                chunked = TokenizedInput(b"", len(ids), False, chunks=tuple(chunks))
                request.count(index, [chunked], wants_report=False)
            sequences += [QueuedSequence(request.request_queue, index, part) for part in parts]
        self.queue(request.request_queue, sequences)
        return request

    def _request(
        self, inputs: Sequence[list[int]], output: Output, priority: Priority = Priority.NORMAL, tenant: str = ""
    ) -> Request:
        request = self._open(len(inputs), priority, tenant, output)
        queue = request.request_queue
        self.queue(queue, [QueuedSequence(queue, i, tokenized(ids), output) for i, ids in enumerate(inputs)])
        return request

    def _open(
        self,
        num_inputs: int,
        priority: Priority = Priority.NORMAL,
        tenant: str = "",
        output: Output = Output.VECTORS,
    ) -> Request:
        request = Request(num_inputs, output)
        request.request_queue = RequestQueue(request, priority, tenant=tenant)
        return request

    def queue(self, request_queue: RequestQueue, sequences: list[QueuedSequence]) -> None:
        self.dispatcher.submit(request_queue, sequences)


class Bench(Dispatched):
    """A dispatcher and its workers, for the length of one test."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.listening, self.address_fd = make_zmq_endpoint()
        self.residence = Residence(
            options.get("generation", 1), keep_alive_s=None, num_gateways=1, send=self.reported.append
        )
        self.workers: list[Worker] = []

    @property
    def stuck(self) -> list[Incarnation]:
        """The workers that were reported so."""
        return [each.incarnation for each in self.reported if isinstance(each, WorkerStuck)]

    @property
    def quarantined(self) -> list[str]:
        return [message.digest for message in self.reported if isinstance(message, Quarantined)]

    def add_worker(self, index: int = 0, life: int = 1, facts: dict[str, Any] | None = None) -> Worker:
        worker = Worker(self.address_fd, index, life, self.spec)
        self.workers.append(worker)
        self.dispatcher.worker_up(worker.incarnation, map_arena(worker.fd, self.spec, writable=False)[0], facts or {})
        return worker

    async def replace(self, worker: Worker) -> Worker:
        """Let a worker be killed, and another one answer its batch."""
        self.dispatcher.worker_down(worker.incarnation, "was killed")
        heir = self.add_worker(worker.incarnation.worker, worker.incarnation.life + 1)
        heir.answer(await heir.receive())
        return heir

    async def one_is_stuck(self) -> None:
        """Wait until a worker is reported that is not believed any more."""
        async with asyncio.timeout(DEADLINE_S):
            while not self.stuck:
                await asyncio.sleep(0.001)

    async def all_connected(self) -> None:
        """Answer probes until the dispatcher may use every worker."""
        while not all(link.is_usable for link in self.dispatcher.links):
            for worker in self.workers:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(worker.receive(), 0.05)

    async def settled(self, batch: Batch) -> None:
        """Wait until the batch that was answered has been delivered, or queued again."""
        dispatcher = self.dispatcher
        while dispatcher._delivery.num_rows or any(batch.number in link.in_flight for link in dispatcher.links):
            await asyncio.sleep(0.001)

    def close(self) -> None:
        self.dispatcher.stop()
        for worker in self.workers:
            worker.close()
        self.listening.close()
        os.close(self.address_fd)


@asynccontextmanager
async def running_bench(**options) -> AsyncIterator[Bench]:
    """A bench whose dispatcher runs. `options` are the bench's."""
    bench = Bench(**options)
    bench.dispatcher.start(bench.listening.detach())
    try:
        yield bench
    finally:
        bench.close()


@contextmanager
def live_worker(bench: Bench, engine: Any, card: ModelCard, life: int = 1) -> Iterator[threading.Thread]:
    """A worker's real loop in a thread, in place of one that a test plays; afterwards it has ended."""
    who = Incarnation(0, life)
    fd = create_arena(bench.spec)
    supervisor, theirs = Channel.pair()
    loop = asyncio.get_running_loop()

    def live() -> None:
        with connected([bench.address_fd], who) as sockets:
            try:
                Loop(sockets, theirs, engine, map_arena(fd, bench.spec, writable=True), bench.spec, card).run()
            except EngineLost:
                loop.call_soon_threadsafe(bench.dispatcher.worker_down, who, "has ended")

    thread = threading.Thread(target=live)
    thread.start()
    try:
        bench.dispatcher.worker_up(who, map_arena(fd, bench.spec, writable=False)[0], {})
        yield thread
    finally:
        supervisor.close()
        thread.join(DEADLINE_S)
        theirs.close()
        os.close(fd)
        assert not thread.is_alive()
