"""What a request leaves behind that has no answer: of its key's limits, and of what its worker died of."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

from tests.support.described import Collected
from tests.support.dispatching import EPOCH, SPEC, Bench, Worker
from tests.support.pipelines import SPLIT, Ids, Piped, app_of, planned_config
from vecd.gateway.api.operation import ParsedDecode, ParsedTokenize
from vecd.gateway.config import ApiKey
from vecd.gateway.dialects import tei
from vecd.gateway.encoding import streams
from vecd.gateway.errors import (
    ApiError,
    BadRequest,
    DeadlinePassed,
    NotReady,
    RateLimited,
    ServerError,
    TooManyRequests,
    Unavailable,
)
from vecd.gateway.request import Embedded, HttpRequest, LateChunking, RequestTimeline, Response, TokenizedInput
from vecd.gateway.scheduling.keys import BURST_S, Principal, Principals
from vecd.gateway.tokenization.fair_pool import Threads
from vecd.gateway.tokenization.late_chunks import find_chunks
from vecd.gateway.tokenization.tokenize_api import MAX_IDS, TokenizeApi
from vecd.shm.output import Output
from vecd.shm.wire import Failed, FailureCode

FAR_S = 60.0
ESTIMATE = 1_000_000


class Letters(Ids):
    """A tokenizer of which each letter is a token."""

    def tokenize_now(self, inputs, tokenizing) -> list[TokenizedInput]:
        places = [np.array([[n, n + 1] for n in range(len(text))], np.int32) for text in inputs]
        return [
            TokenizedInput(bytes(4 * len(text)), len(text), False, offsets=of_text)
            for text, of_text in zip(inputs, places, strict=True)
        ]

    def num_added(self, token_ids) -> tuple[int, int]:
        return 0, 0


class Service(Piped):
    """A pipeline in front of a bench's dispatcher, and a key with limits."""

    def __init__(self, bench: Bench, *, normalizes: bool = True) -> None:
        """`normalizes`: the model's last step does."""
        planned = planned_config().card
        steps = planned.steps if normalizes else ()
        card = replace(planned, dim=SPEC.dim, hidden_size=SPEC.dim, steps=steps)
        super().__init__(bench, card=card, request_timeout=FAR_S)
        [self.key] = Principals([ApiKey("a", sha256(b"secret").hexdigest(), tokens_per_s=1e6)], 1).with_keys
        self.principal = self.key

    def embed(self, *inputs: Any, **options: Any) -> asyncio.Task[Embedded]:
        return super().embed(*inputs, num_estimated=ESTIMATE, **options)

    def num_paid(self) -> int:
        """Tokens, as counted; those that the key may send now say the same."""
        paid = self.key.describe()["use"]["tokens"]
        assert self.key.tokens_per_s is not None
        assert self.key.level == self.key.tokens_per_s * BURST_S - paid
        return paid


def crash(bench: Bench, worker: Worker) -> None:
    bench.dispatcher.worker_down(worker.incarnation, "was killed by SIGSEGV", has_crashed=True)


def inputs_of(batch) -> list[int]:
    """The first id of each."""
    lengths = np.frombuffer(batch.lengths_bytes, dtype="<i4")
    ids = np.frombuffer(batch.token_ids_bytes, dtype="<i4")
    return [int(ids[start]) for start in np.cumsum(lengths) - lengths]


@pytest.fixture
async def service(bench: Bench) -> Service:
    return Service(bench)


async def test_what_never_came_to_a_worker_costs_nothing(bench, service):
    with pytest.raises(DeadlinePassed):
        await service.embed([1, 1], timeout_s=0.01)
    gone = service.embed([1, 1])
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait([gone])
    bench.dispatcher.broken = "it is broken"
    with pytest.raises(Unavailable):
        await service.embed([1, 1])
    assert service.num_paid() == 0


async def test_vectors_are_computed_once_there_is_room_for_the_response(bench, service):
    """Meanwhile the request counts as no work that delays others, and has its deadline as ever."""
    rooms: list[asyncio.Future[None]] = []
    asked: list[int] = []
    held: list[int] = []

    def take_room(num_bytes: int, num_input_bytes: int) -> asyncio.Future[None]:
        held.append(num_input_bytes)
        asked.append(num_bytes // service.pipeline.config.card.dim)
        rooms.append(asyncio.get_running_loop().create_future())
        return rooms[-1]

    def timeline() -> RequestTimeline:
        made = RequestTimeline()
        made.take_room = take_room
        return made

    worker = bench.add_worker()
    await bench.all_connected()
    waiting = service.embed([1, 1], [2], timeline=timeline())
    late = service.embed([1, 1], timeout_s=0.01, timeline=timeline())
    other = service.embed([3])
    batch = await worker.receive()
    assert inputs_of(batch) == [3]
    worker.answer(batch)
    assert (await other).num_tokens == 1
    with pytest.raises(DeadlinePassed):
        await late
    assert (service.admission.num_requests, service.admission.num_unqueued) == (1, 0)
    assert [room.cancelled() for room in rooms] == [False, True]
    assert not waiting.done()
    rooms[0].set_result(None)
    worker.answer(await worker.receive())
    assert (await waiting).num_tokens == 3
    assert (asked, held) == ([26, 13], [4_000_000, 4_000_000])


async def test_requests_are_refused_until_a_worker_serves_for_the_first_time_and_wait_afterwards(bench, service):
    bench.dispatcher.start_stage = "loading weights"
    with pytest.raises(NotReady, match="starting; loading weights") as caught:
        await service.embed([1, 1])
    assert caught.value.headers == {"retry-after": "1"}
    worker = bench.add_worker()
    await bench.all_connected()
    bench.dispatcher.worker_down(worker.incarnation, "died")
    waiting = service.embed([1, 1])
    successor = bench.add_worker(life=2)
    successor.answer(await successor.receive())
    assert (await waiting).num_tokens == 2


async def test_requests_on_a_socket_that_systemd_holds_wait_for_the_first_worker(bench, service):
    bench.dispatcher.start_stage = "loading weights"
    service.pipeline.config = replace(service.pipeline.config, keeps_listening=True)
    waiting = service.embed([1, 1])
    worker = bench.add_worker()
    worker.answer(await worker.receive())
    assert (await waiting).num_tokens == 2


async def test_what_the_engine_fails_on_or_a_dying_worker_loses_costs_nothing(bench, service):
    worker = bench.add_worker()
    failing = service.embed([1, 1])
    batch = await worker.receive()
    worker.send(Failed(EPOCH, batch.number, batch.slot, FailureCode.ENGINE_ERROR))
    with pytest.raises(ServerError):
        await failing
    assert service.num_paid() == 0

    lost = service.embed([1, 1])
    await worker.receive()
    crash(bench, worker)
    lost.cancel()
    await asyncio.wait([lost])
    assert service.num_paid() == 0


async def test_what_a_worker_has_is_paid_for_by_whoever_does_not_wait(bench, service):
    """Else a caller who never waits would embed for nothing."""

    worker = bench.add_worker()
    embedding = service.embed([1, 1], [2])
    await worker.receive()
    embedding.cancel()
    await asyncio.wait([embedding])
    assert service.num_paid() == 3


async def test_an_input_that_has_been_computed_is_not_isolated_any_more(bench, service):
    first = bench.add_worker(0, 1)
    embedding = service.embed([1], [2])
    await first.receive()
    second = await bench.replace(first)
    await embedding
    for _ in range(4):  # each alone; counted together with the first death, they would be enough for a rejection
        embedding = service.embed([1])
        await second.receive()
        second = await bench.replace(second)
        await embedding


async def test_a_caller_who_leaves_amid_chunks_leaves_nothing_behind(bench, service):
    worker = bench.add_worker()
    embedding = service.embed([SPLIT, *range(1, 31)])
    sent = [await worker.receive()]
    worker.answer(sent[0])
    sent.append(await worker.receive())
    embedding.cancel()
    await asyncio.wait([embedding])
    assert (bench.policy.queued_sequences, service.principal.num_running) == (0, 0)
    assert (service.admission.num_requests, service.admission.num_tenants) == (0, 0)
    worker.answer(sent[1])
    [link] = bench.dispatcher.links
    while len(link.free_slots) < SPEC.num_slots:
        if set(link.in_flight) - {batch.number for batch in sent}:
            sent.append(await worker.receive())
            worker.answer(sent[-1])
        await asyncio.sleep(0.001)
    assert service.num_paid() == sum(batch.num_sequences for batch in sent) < 30
    after = service.embed([7])
    worker.answer(await worker.receive())
    assert (await after).num_tokens == 1


@pytest.mark.parametrize("output", [Output.VECTORS, Output.TOKENS])
async def test_an_input_that_ends_workers_is_found_out_though_nobody_waits_and_refused_whatever_is_asked(
    output, bench, service
):
    for life in range(1, 4):
        worker = bench.add_worker(0, life)
        embedding = service.embed([13], [life], principal=Principal("anybody"), output=output)
        batch = await worker.receive()
        assert inputs_of(batch) == ([13, life] if life < 3 else [13]), "the third time it is isolated"
        embedding.cancel()
        await asyncio.wait([embedding])
        crash(bench, worker)
    for again in ([13],), ([SPLIT, 5, 13],):
        with pytest.raises(ServerError, match=r"'input\[0\]'") as caught:
            await service.embed(*again, principal=Principal("anybody"))
        assert caught.value.code == "poison_input"
    assert bench.policy.queued_sequences == 0


async def test_a_text_has_no_more_rows_than_a_slot(bench, service):
    worker = bench.add_worker()
    fits, too_long = [1] * SPEC.rows_per_slot, [1] * (SPEC.rows_per_slot + 1)
    embedding = service.embed(fits, output=Output.TOKENS)
    worker.answer(await worker.receive())
    assert len((await embedding).made[0][0]) == SPEC.rows_per_slot
    with pytest.raises(BadRequest, match=r"'input\[1\]' has 9 tokens"):
        await service.embed([1], too_long, output=Output.TOKENS)


class Superseded(ApiError):
    """An error of the test's own."""

    def __init__(self) -> None:
        super().__init__("another is in its place")


async def test_an_app_that_has_ended_answers_with_the_error_that_it_was_given(bench, service):
    waiting = [service.embed([1]) for _ in range(2)]
    await asyncio.sleep(0)
    service.pipeline.end(Superseded)
    results = await asyncio.gather(*waiting, service.embed([1]), return_exceptions=True)
    assert [type(result) for result in results] == [Superseded] * 3
    assert len(set(map(id, results))) == 3
    assert service.num_paid() == 0


async def test_vectors_of_tokens_are_bounded_in_one_request_and_in_all(monkeypatch, bench, service):
    """5 tokens of a request, 8 of one caller's and 16 of all that run: what is over leaves room for others."""
    monkeypatch.setattr(streams, "MAX_TOKEN_FLOATS", 5 * SPEC.dim)
    service.pipeline.token_room.total = 16 * SPEC.dim
    with pytest.raises(BadRequest, match=r"6 tokens or more: .* at most 5"):
        await service.embed([1, 1, 1], [2, 2, 2], output=Output.TOKENS)
    running = service.embed([1] * 5, output=Output.TOKENS)
    await asyncio.sleep(0)
    others = [service.embed([1] * 4, output=Output.TOKENS, principal=Principal("b")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(TooManyRequests, match=f"at most {16 * SPEC.dim} may be .* and {8 * SPEC.dim} of one caller"):
        await service.embed([2] * 4, output=Output.TOKENS)
    assert dict(service.pipeline.token_room.num_of) == {service.principal.tenant: 5 * SPEC.dim, "b": 8 * SPEC.dim}
    for embedding in (running, *others):
        assert not embedding.done()
        embedding.cancel()
        with suppress(asyncio.CancelledError):
            await embedding
    assert not service.pipeline.token_room.num
    worker = bench.add_worker()
    after = service.embed([3] * 4, output=Output.TOKENS)
    worker.answer(await worker.receive())
    assert (await after).num_tokens == 4
    failing = service.embed([4] * 4, output=Output.TOKENS)
    await asyncio.sleep(0)
    service.pipeline.end(Superseded)
    with pytest.raises(Superseded):
        await failing
    assert not service.pipeline.token_room.num_of


async def test_late_chunks_are_bounded_by_their_number_and_not_by_their_tokens(monkeypatch, bench, service):
    """3 chunks of a request, 4 of one caller's that run."""
    monkeypatch.setattr(streams, "MAX_TOKEN_FLOATS", 3 * SPEC.dim)
    service.pipeline.token_room.total = 8 * SPEC.dim
    service.pipeline.tokenizer = service.pipeline.encoder.tokenizer = Letters()

    def embed(*texts: str, max_tokens: int) -> asyncio.Task[Embedded]:
        return service.embed(*texts, late=LateChunking(max_tokens=max_tokens))

    with pytest.raises(BadRequest, match=r"'late_chunking': 4 chunks or more, at most 3"):
        await embed("abc", "d", max_tokens=1)
    with pytest.raises(BadRequest, match=r"'input\[1\]' has 9 tokens: late chunks are made of at most 8"):
        await embed("a", "b" * 9, max_tokens=9)
    running = embed("aaaaaaaa", "bbbb", max_tokens=4)
    await asyncio.sleep(0)
    with pytest.raises(TooManyRequests, match="12 numbers are being made, 12 of them yours, and this request has 8"):
        await embed("ab", max_tokens=1)
    worker = bench.add_worker()
    for _ in range(2):  # a slot has room for one of them
        worker.answer(await worker.receive())
    [made] = (await running).made
    assert [len(list(made.fragments(index))) for index in range(2)] == [2, 1]
    assert (await running).num_tokens == 12
    assert not service.pipeline.token_room.num_of


async def test_late_chunks_of_many_inputs_are_found_in_turns_of_the_event_loop(monkeypatch, bench, service):
    """Those of one run of the tokenizer: 800 short texts took 45 ms in one turn."""

    class OneRun(Letters):
        def tokenize_now(self, inputs, tokenizing):
            return None

        async def tokenize(self, inputs, tokenizing, tenant):
            yield super().tokenize_now(inputs, tokenizing)

    turn, turns = 0, []

    def find(text, item, late, index, *others, **options):
        turns.append((index, turn))
        return find_chunks(text, item, late, index, *others, **options)

    monkeypatch.setattr(streams, "find_chunks", find)
    service.pipeline.tokenizer = service.pipeline.encoder.tokenizer = OneRun()
    rooms: list[int] = []
    timeline = RequestTimeline()
    timeline.take_room = lambda num_bytes, num_input_bytes: rooms.append(num_bytes)
    running = service.embed(*["ab"] * 100, late=LateChunking(max_tokens=1), timeline=timeline)
    while len(turns) < 100:
        await asyncio.sleep(0)
        turn += 1
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert [index for index, _ in turns] == list(range(100))
    in_each = Counter(turn for _, turn in turns)
    assert max(in_each.values()) <= streams.LateChunkRows.inputs_per_turn
    assert rooms == [0], "how many chunks there are is known when the response is made"


async def test_many_rows_of_tokens_are_written_in_a_thread_and_few_are_not(monkeypatch):
    threads: list[int] = []

    def pieces(*_: Any) -> list[bytes]:
        threads.append(threading.get_ident())
        return []

    monkeypatch.setattr(tei, "matrix_pieces", pieces)
    app = app_of(planned_config())
    for num_tokens in (85, 86):
        app.active.pipeline.run = AsyncMock(return_value=Embedded(([None],), num_tokens))  # type: ignore[method-assign]
        request = HttpRequest("POST", "/embed_all", b"", {}, 1, True, "id", body=b'{"inputs": "a"}')
        await app.handle(request)
    few, many = threads
    assert few == threading.get_ident() != many


# --- what is asked of the tokenizer itself ---------------------------------------------------------------------


class Endless(Ids):
    """A tokenizer that is not done with a text before it is told so."""

    def __init__(self) -> None:
        self.api = self
        self.threads = Threads()
        self.is_done = threading.Event()

    def estimate_tokens(self, inputs, how) -> int:
        return 100

    def describe_steps(self, texts, prompt, add_special_tokens, collector):
        while not self.is_done.wait(0.001):
            yield
        return 7

    def decode_steps(self, lists, skip_special_tokens):
        yield
        return ["decoded"]


@pytest.fixture
async def tokenizer(service: Service) -> AsyncIterator[Endless]:
    tokenizer = service.pipeline.inspection.tokenizer = Endless()  # type: ignore[assignment]
    yield tokenizer
    tokenizer.is_done.set()
    tokenizer.threads.close()


def describe(
    service: Service, timeout_s: float = FAR_S, num_chars: int = 10, principal: Principal | None = None
) -> asyncio.Task[None]:
    ask = ParsedTokenize(["a" * num_chars], True, "", Collected(), lambda: Response(200, b""))
    now = asyncio.get_running_loop().time()
    return asyncio.ensure_future(
        service.pipeline.inspection.describe(ask, now + timeout_s, principal or service.principal)
    )


async def test_who_asks_the_tokenizer_pays_for_the_tokens(service, tokenizer):
    asking = describe(service)
    await asyncio.sleep(0)
    assert service.principal.num_running == 1
    assert service.num_paid() == 100
    tokenizer.is_done.set()
    await asking
    assert service.principal.num_tokens == 7
    now = asyncio.get_running_loop().time()
    ask = ParsedDecode([[1, 2], [3]], True, lambda texts: Response(200, b""))
    assert await service.pipeline.inspection.decode(ask, now + FAR_S, service.principal) == ["decoded"]
    assert service.principal.num_tokens == 10
    service.principal.charge(10**9)
    for asked in (describe(service), service.pipeline.inspection.decode(ask, now + FAR_S, service.principal)):
        with pytest.raises(RateLimited):
            await asked
    assert service.principal.num_running == 0


async def test_what_the_tokenizer_refuses_costs_nothing(service, tokenizer):
    anything: Any = SimpleNamespace(max_chars=4)
    tokenizer.api = TokenizeApi(anything, anything, {}, vocab_size=0)
    ask = ParsedDecode([[0] * (MAX_IDS + 1)], True, lambda texts: Response(200, b""))
    now = asyncio.get_running_loop().time()
    for asked in (describe(service), service.pipeline.inspection.decode(ask, now + FAR_S, service.principal)):
        with pytest.raises(BadRequest):
            await asked
        assert service.num_paid() == 0


async def test_the_tokenizer_is_asked_with_a_deadline(service, tokenizer):
    """And what it has done until then is paid for: else whoever has a short one tokenizes for nothing."""

    with pytest.raises(DeadlinePassed):
        await describe(service, timeout_s=0.01)
    assert service.num_paid() == 100
    with pytest.raises(DeadlinePassed):
        await describe(service, timeout_s=0.01)


async def test_short_requests_and_conversations_of_one_caller_leave_room_for_another(service, tokenizer):
    """Whether they end, are cancelled or fail, all is given back. A rejected request costs nothing."""

    class Chat:
        async def render(self, payload: bytes) -> list[str]:
            await asyncio.Event().wait()
            return []

    service.pipeline.inspection.chat = Chat()
    payload = b"a" * 16 * 1024

    def render(principal: Principal) -> asyncio.Task[list[str]]:
        parsed: Any = SimpleNamespace(payload=payload)
        return asyncio.ensure_future(
            service.pipeline.inspection.render(parsed, asyncio.get_running_loop().time() + FAR_S, principal)
        )

    a, b = service.principal, Principal("b")
    conversations = [render(a) for _ in range(8)]
    short = [describe(service, num_chars=8 * 1024 - 65, principal=a) for _ in range(32)]
    await asyncio.sleep(0)
    assert service.pipeline.inspection.room.num_of["a"] == 2**19
    for refused in (render(a), describe(service, principal=a)):
        with pytest.raises(TooManyRequests, match="of them yours"):
            await refused
    assert service.principal.num_tokens == 32 * 100
    others = [render(b), describe(service, principal=b)]
    await asyncio.sleep(0)
    tokenizer.is_done.set()
    await asyncio.gather(*short, others[1])
    for rendering in (*conversations[1:], others[0]):
        rendering.cancel()
    for _ in range(2):
        service.pipeline.end(Superseded)
    results = await asyncio.gather(*conversations, others[0], return_exceptions=True)
    assert [type(result) for result in results] == [Superseded] + 8 * [asyncio.CancelledError]
    with pytest.raises(Superseded):
        await describe(service)
    assert not service.pipeline.inspection.room.num_of
