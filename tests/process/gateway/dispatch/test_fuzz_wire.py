"""Frames that no peer of ours sends. With VECD_SOAK in the environment, many more of them."""

import asyncio
import os
import struct
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.dispatching import DEADLINE_S, EPOCH, SPEC, Bench, Request, Worker, running_bench
from vecd.model.card import ModelCard
from vecd.shm.arena import ArenaSpec
from vecd.shm.output import Output
from vecd.shm.wire import (
    Alive,
    Batch,
    Done,
    Failed,
    FailureCode,
    Probe,
    ToGateway,
    WireError,
    decode_to_gateway,
    decode_to_worker,
    encode,
)
from vecd.workers.batch import BadBatch, read_batch

IS_LONG = bool(os.environ.get("VECD_SOAK"))
pytestmark = pytest.mark.timeout(1800 if IS_LONG else 240)
VOCAB_SIZE, MAX_TOKENS = 100, 16
CARD = ModelCard("", "", "bert", SPEC.dim, SPEC.dim, MAX_TOKENS, VOCAB_SIZE, ("mean",), (), False, "")
ARENA = ArenaSpec(num_slots=2, rows_per_slot=4, dim=SPEC.dim)

small = st.integers(0, 9)
uint16 = small | st.integers(0, 2**16 - 1)
uint32 = small | st.just(EPOCH) | st.integers(0, 2**32 - 1)
uint64 = small | st.integers(0, 2**64 - 1)
int32s = st.lists(small | st.integers(-(2**31), 2**31 - 1), max_size=8).map(lambda n: struct.pack(f"<{len(n)}i", *n))

headers = st.builds(struct.Struct("<BBHIQ").pack, small, small | st.just(1), uint16, uint32, uint64)
tails = st.one_of(
    st.just(b""),
    st.binary(max_size=9),
    st.builds(struct.Struct("<II").pack, uint32, uint32),
    st.builds(struct.Struct("<H").pack, uint16),
)
likely_frames = st.tuples(
    st.builds(bytes.__add__, headers, tails), st.lists(int32s | st.binary(max_size=4), max_size=4)
).map(lambda parts: [parts[0], *parts[1]])
any_frames = st.lists(st.binary(max_size=40), max_size=4) | likely_frames


def examples(short: int, long: int):
    return settings(
        max_examples=long if IS_LONG else short, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )


# --- decoding ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decode", "kinds"), [(decode_to_worker, Probe | Batch), (decode_to_gateway, Alive | Done | Failed)]
)
@examples(100, 10_000)
@given(any_frames)
def test_what_is_decoded_encodes_to_the_same_or_is_refused(decode, kinds, frames):
    with suppress(WireError):
        message = decode(frames)
        assert isinstance(message, kinds)
        if not isinstance(message, Probe | Alive):
            assert encode(message) == frames


@st.composite
def batches(draw) -> Batch:
    """Of the sizes that decoding has checked, with anything in them."""
    lengths = draw(st.lists(small | st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=6))
    num_tokens = draw(st.just(max(1, min(50, sum(lengths)))) | st.integers(len(lengths), 50))
    ids = draw(st.lists(st.integers(0, VOCAB_SIZE) | st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=3))
    token_ids = (ids * num_tokens)[:num_tokens]
    lengths_bytes, ids_bytes = (struct.pack(f"<{len(n)}i", *n) for n in (lengths, token_ids))
    outputs = draw(st.just(b"") | st.lists(small, min_size=len(lengths), max_size=len(lengths)).map(bytes))
    return Batch(EPOCH, draw(uint64), draw(uint16), len(lengths), num_tokens, lengths_bytes, ids_bytes, outputs)


@examples(150, 10_000)
@given(batches())
def test_a_batch_that_is_taken_indexes_nothing_outside(message):
    with suppress(BadBatch):
        batch = read_batch(message, ARENA, CARD)
        assert message.slot < ARENA.num_slots
        assert 1 <= batch.lengths.size <= batch.num_rows <= ARENA.rows_per_slot
        assert batch.outputs is None or batch.outputs.max() <= max(Output)
        assert batch.lengths.min() >= 1
        assert batch.lengths.max() <= MAX_TOKENS
        assert batch.lengths.sum() == batch.token_ids.size
        assert 0 <= batch.token_ids.min() <= batch.token_ids.max() < VOCAB_SIZE


def run(test: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    """For tests that hypothesis runs: each example has a bench and an event loop of its own."""

    async def main() -> None:
        async with running_bench() as bench, asyncio.timeout(3 * DEADLINE_S):
            await test(bench)

    asyncio.run(main())


# --- the dispatcher ---------------------------------------------------------------------------------------------


@st.composite
def answers(draw) -> list[bytes]:
    """An answer that is right but for what is changed: as `(number, slot, …)` of one of two batches that are held."""
    index = draw(st.integers(0, 1))
    number = draw(st.sampled_from([b"right"] * 4 + [b"other"]))
    return [b"answer", bytes([index]), number, bytes([draw(small) % 3, draw(small)]), draw(st.binary(max_size=3))]


FOREIGN = 666.0


def frames_of(answer: list[bytes], held: list[Batch]) -> list[bytes]:
    """The frames for a drawn answer to the batches that a worker holds."""
    if answer[:1] != [b"answer"]:
        return answer or [b""]
    _, [index], right, [kind, delta], more = answer
    batch = held[index]
    number = batch.number if right == b"right" else batch.number + delta
    slot = batch.slot if delta < 7 else delta - 7
    rows = batch.num_sequences if delta < 8 else delta
    epoch = EPOCH if delta != 3 else EPOCH - 1
    made: list[ToGateway] = [
        Done(epoch, number, slot, rows, delta),
        Failed(epoch, number, slot, FailureCode(1 + delta % 3)),
        Alive(epoch),
    ]
    first, *rest = encode(made[kind])
    return [first + more if delta == 5 else first, *rest]


async def answer_honestly(bench: Bench, requests: list[Request], life: int) -> None:
    """Until every request is over."""
    worker = bench.add_worker(0, life)
    while not all(request.is_over for request in requests):
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                worker.answer(await worker.receive())


@examples(20, 300)
@given(st.lists(answers() | any_frames, max_size=8))
def test_whatever_a_worker_says_rows_are_right_and_every_request_is_over(all_frames):
    async def test(bench: Bench) -> None:
        worker = bench.add_worker()
        requests = [bench.request(1, 2, length=8), bench.request(3, length=16), bench.request(4, 5, length=8)]
        held = [await worker.receive() for _ in range(2)]
        for slot in worker.slots:
            slot[:] = FOREIGN  # what no batch has written
        for batch in held:
            worker.compute(batch)
        for frames in all_frames:
            worker.send_frames(frames_of(frames, held))
        await everything_read(bench, worker)
        bench.dispatcher.worker_down(worker.incarnation, "was killed")
        async with asyncio.timeout(DEADLINE_S):
            await answer_honestly(bench, requests, life=2)
        for request, expected in zip(requests, ([b"1", b"2"], [b"3"], [b"4", b"5"]), strict=True):
            error = request.finished.exception()
            assert error is None or getattr(error, "code", None) in ("engine_error", "out_of_memory", "bad_message")
            assert error is not None or request.fragments == expected
        assert (bench.dispatcher.in_flight_tokens, bench.policy.queued_tokens) == (0, 0)

    run(test)


async def everything_read(bench: Bench, worker: Worker) -> None:
    """Wait until the dispatcher has read all that the worker has sent."""
    read: list[list[bytes]] = []
    transport: Any = bench.dispatcher.transport
    receive, last = transport._receive, [b"last words"]
    transport._receive = lambda who, frames: read.append(frames) if frames == last else receive(who, frames)
    worker.send_frames(last)
    async with asyncio.timeout(DEADLINE_S):
        while not read:
            await asyncio.sleep(0.001)
    transport._receive = receive


def test_a_header_of_any_kind_and_length_is_a_message_or_is_refused():
    for kind in range(256):
        for size in range(40):
            for decode in (decode_to_worker, decode_to_gateway):
                with suppress(WireError):
                    decode([bytes([kind, 1]) + bytes(size)])
