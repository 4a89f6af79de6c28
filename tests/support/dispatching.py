"""A dispatcher over real ZeroMQ, and workers that a test plays.

Owns their making and their end. Most tests take the fixture `bench`, whose dispatcher has been started.
"""

import asyncio
import os
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import zmq

from vecd.gateway.dispatch.dispatcher import Dispatcher
from vecd.gateway.dispatch.residence import Residence
from vecd.gateway.encoding.pending import ChunkedInput, PendingResult
from vecd.gateway.scheduling.policy import BatchingPolicy
from vecd.gateway.scheduling.queue import QueuedSequence, RequestQueue
from vecd.gateway.telemetry.shared_metrics import SharedMetrics
from vecd.gateway.types.request import Chunk, Priority, TokenizedInput
from vecd.launch.processes.sockets import make_zmq_endpoint
from vecd.shm.arena import ArenaSpec, create_arena
from vecd.shm.control import InputDeaths, Message, Quarantined, WorkerConnected, WorkerStuck
from vecd.shm.output import Output
from vecd.shm.shared_metrics import ServiceKey
from vecd.shm.views import map_arena
from vecd.shm.wire import Alive, Batch, Done, Incarnation, Probe, decode_to_worker, encode

SPEC = ArenaSpec(num_slots=2, rows_per_slot=8, dim=4)
EPOCH = 7
SERVICE = ServiceKey(1)
DEADLINE_S = 10.0


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
        outputs = batch.outputs_bytes or bytes(batch.num_sequences)
        numbers: list[int] = []
        for ids, output in zip(sequences_of(batch), outputs, strict=True):
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


class Rows:
    """Of each row its first number."""

    def __init__(self, num_rows: int) -> None:
        self.fragments = [b""] * num_rows
        self.num_rows_left: list[int] = []

    def put(self, index, rows) -> None:
        for row in rows:
            self.fragments[index] = b"%d" % row[0]
            index += 1

    def put_tokens(self, index, rows, num_left) -> None:
        """Of each row its numbers."""
        assert rows.flags.c_contiguous
        self.num_rows_left.append(num_left)
        numbers = b" ".join(b"%d" % number for number in rows.flat)
        self.fragments[index] += (b"," if self.fragments[index] else b"") + numbers


class Request(PendingResult):
    request_queue: RequestQueue

    def __init__(self, num_rows: int) -> None:
        self._rows = Rows(num_rows)
        super().__init__(num_rows, (self._rows,), asyncio.get_running_loop())

    @property
    def fragments(self) -> list[bytes]:
        return self._rows.fragments

    @property
    def num_rows_left(self) -> list[int]:
        """As each delivery of tokens' rows said it."""
        return self._rows.num_rows_left


def _report(reported: list[Message], others: list[Dispatcher], message: Message) -> None:
    # Not a method of the bench: a cycle would keep a closed dispatcher's arenas.
    reported.append(message)
    if isinstance(message, InputDeaths):
        for other in others:
            other.note_deaths(message)


def tokenized(ids: list[int]) -> TokenizedInput:
    return TokenizedInput(array("i", ids).tobytes(), len(ids), False)


class Bench:
    """A dispatcher and its workers, for the length of one test."""

    def __init__(
        self,
        *,
        batch_timeout_s: float = 60,
        service: ServiceKey = SERVICE,
        shared_metrics: SharedMetrics | None = None,
        spec: ArenaSpec = SPEC,
        **options,
    ) -> None:
        """`options` are the dispatcher's."""
        self.spec = spec
        self.policy = BatchingPolicy(16, spec.rows_per_slot, max_sequence_tokens=16)
        self.shared_metrics = shared_metrics or SharedMetrics.private()
        self.reported: list[Message] = []
        """What the dispatcher has reported to the supervisor."""
        self.others: list[Dispatcher] = []
        """Dispatchers of other gateways, which the deaths of inputs are passed on to."""
        self.listening, self.address_fd = make_zmq_endpoint()
        self.dispatcher = Dispatcher(
            policy=self.policy,
            epoch=EPOCH,
            service=service,
            max_batch_tokens=16,
            batch_timeout_s=batch_timeout_s,
            report=partial(_report, self.reported, self.others),
            shared_metrics=self.shared_metrics,
            **options,
        )
        self.residence = Residence(service.generation, keep_alive_s=None, num_gateways=1, send=self.reported.append)
        self.workers: list[Worker] = []

    def incarnations(self, kind: type[WorkerStuck] | type[WorkerConnected]) -> list[Incarnation]:
        """The workers that were reported by messages of this kind."""
        return [Incarnation(message.worker, message.life) for message in self.reported if isinstance(message, kind)]

    @property
    def stuck(self) -> list[Incarnation]:
        return self.incarnations(WorkerStuck)

    @property
    def quarantined(self) -> list[str]:
        return [message.digest for message in self.reported if isinstance(message, Quarantined)]

    def add_worker(self, index: int = 0, life: int = 1, facts: dict[str, Any] | None = None) -> Worker:
        worker = Worker(self.address_fd, index, life, self.spec)
        self.workers.append(worker)
        self.dispatcher.worker_up(worker.incarnation, map_arena(worker.fd, self.spec, writable=False)[0], facts or {})
        return worker

    async def all_connected(self) -> None:
        """Answer probes until the dispatcher may use every worker."""
        while not all(link.is_usable for link in self.dispatcher.links):
            for worker in self.workers:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(worker.receive(), 0.05)

    def request(
        self,
        *first_ids: int,
        length: int = 2,
        output: Output = Output.VECTORS,
        priority: Priority = Priority.NORMAL,
        tenant: str = "",
    ) -> Request:
        request = self._open(len(first_ids), priority, tenant)
        inputs = [tokenized([n] * length) for n in first_ids]
        self._queue(
            request.request_queue,
            [QueuedSequence(request.request_queue, i, item, output) for i, item in enumerate(inputs)],
        )
        return request

    def tokens_of(self, *inputs: list[int]) -> Request:
        """A request for the rows of all tokens, of inputs with these ids."""
        request = self._open(len(inputs))
        request_queue = request.request_queue
        self._queue(
            request_queue,
            [QueuedSequence(request_queue, i, tokenized(ids), Output.TOKENS) for i, ids in enumerate(inputs)],
        )
        return request

    def chunked(self, *inputs: list[int]) -> Request:
        """A request of inputs in chunks, each of two tokens with one of these ids and of the same weight; an input of
        one id is no chunk."""
        request = self._open(len(inputs))
        sequences: list[QueuedSequence] = []
        for index, ids in enumerate(inputs):
            chunked = ChunkedInput(len(ids), is_normalized=False) if len(ids) > 1 else None
            chunks = [Chunk(tokenized([n, n]).token_ids, 2, 1) for n in ids]
            sequences += [QueuedSequence(request.request_queue, index, chunk, chunked=chunked) for chunk in chunks]
        self._queue(request.request_queue, sequences)
        return request

    async def settled(self, batch: Batch) -> None:
        """Wait until the batch that was answered has been delivered, or queued again."""
        dispatcher = self.dispatcher
        while dispatcher._delivery.num_rows or any(batch.number in link.in_flight for link in dispatcher.links):
            await asyncio.sleep(0.001)

    def _open(self, num_inputs: int, priority: Priority = Priority.NORMAL, tenant: str = "") -> Request:
        request = Request(num_inputs)
        request.request_queue = RequestQueue(request, priority, tenant=tenant)
        return request

    def _queue(self, request_queue: RequestQueue, sequences: list[QueuedSequence]) -> None:
        self.dispatcher.submit(request_queue, sequences)

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


def run(test: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    """For tests that hypothesis runs: each example has a bench and an event loop of its own."""

    async def main() -> None:
        async with running_bench() as bench, asyncio.timeout(3 * DEADLINE_S):
            await test(bench)

    asyncio.run(main())
