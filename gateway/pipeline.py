"""The way of an embedding request, from its parsed body to its rows.

Owns the order of that way (the principal's limits, admission, tokenizer, batching policy, dispatcher) and the requests
that are waiting on it. It is the `embedder` of one generation. Knows no HTTP, no dialect, no socket.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from vecd.gateway.api.operation import ParsedDecode, ParsedMessages, ParsedTokenize
from vecd.gateway.config import GatewayConfig
from vecd.gateway.dispatch.dispatcher import Dispatcher
from vecd.gateway.dispatch.residence import Residence
from vecd.gateway.dispatch.vector_cache import VectorCache
from vecd.gateway.encoding.forms import width_of
from vecd.gateway.encoding.fragments import Encoder
from vecd.gateway.encoding.result import MAX_SHORT_QUERY, ChunkedInput, MaxSimRows, PendingResult
from vecd.gateway.encoding.sparse import QueryWeights
from vecd.gateway.errors import (
    ApiError,
    BadRequest,
    DeadlinePassed,
    NotReady,
    TooManyRequests,
    TooManyTokens,
    Unavailable,
)
from vecd.gateway.request import (
    Embedded,
    EmbedRequest,
    Encoding,
    InputReport,
    Inputs,
    LateChunking,
    Overflow,
    Pair,
    Priority,
    RequestTimeline,
    Role,
    Source,
    Stages,
    TokenizedInput,
    Tokenizing,
)
from vecd.gateway.scheduling.admission import Admission, Deadlines, Permit, Share, TenantRoom
from vecd.gateway.scheduling.keys import Principal, Reservation
from vecd.gateway.scheduling.policy import BatchingPolicy
from vecd.gateway.scheduling.queue import QueuedSequence, RequestQueue
from vecd.gateway.telemetry.measures import SharedMetrics
from vecd.gateway.tokenization.chat_process import ChatProcess
from vecd.gateway.tokenization.late_chunks import LateChunks, find_chunks
from vecd.gateway.tokenization.tokenize_api import MAX_SIZE, most_of_one_caller, size_of
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.model.card import ModelCard
from vecd.shm.output import Output, span_of
from vecd.shm.shared_metrics import Counter

T = TypeVar("T")

_SIZE_OF_RENDERING = 16 * 1024
"""What conversations count besides their length, in characters: 16 requests of one caller may wait for the chat
template, because each may take a second."""
FLOATS_PER_TURN = 32 * 1024
"""Of known rows, in one turn of the event loop: 85 rows of 384 take 0.6 ms, and 1.4 ms more as JSON numbers."""
_FLOATS_OF_A_QUERY = 1024
"""What a query that needs no worker counts as: to make its sparse vector of static weights takes 0.06 ms."""
_BYTES_OF_A_FLOAT, _BYTES_OF_4 = 13, 6
"""In a response: as a JSON number with its comma, and as base64."""
_BYTES_OF_AN_ID = 4
_LATE_INPUTS_PER_TURN = 32
"""Inputs whose late chunks are found in one turn of the event loop: 2 ms for short ones."""
MAX_TOKEN_FLOATS = 8 * 2**20
"""Of one response with a vector for each token: 32 MiB, and 180 MB as JSON. A request for MaxSim keeps as much of its
queries, and of documents that cannot be compared yet."""
MAX_RUNNING_TOKEN_FLOATS = 4 * MAX_TOKEN_FLOATS
"""Of all such requests that are being computed; one caller gets half."""


@dataclass(slots=True)
class _Counts:
    """What is counted of a request's inputs, as they are tokenized."""

    share: Share
    """Of the room for rows of tokens."""
    wants_reports: bool
    num_tokens: int = 0
    num_truncated: int = 0
    num_chunked: int = 0
    num_late_chunks: int = 0
    sources: set[Source] = field(default_factory=set)
    reports: list[InputReport] = field(default_factory=list)
    offsets: list[NDArray[np.int32]] = field(default_factory=list)
    token_ids: list[NDArray[np.int32]] = field(default_factory=list)
    """As in `Embedded.token_ids`."""
    late_chunks: list[LateChunks] = field(default_factory=list)
    max_sims: "_MaxSims | None" = None

    def add(self, tokenized: list[TokenizedInput]) -> int:
        """Returns the number of the inputs' tokens."""
        num_tokens = 0
        for _, num, is_truncated, source, chunks, _, offsets in tokenized:
            num_tokens += num
            if offsets is not None:
                self.offsets.append(offsets)
            self.num_truncated += is_truncated
            self.num_chunked += chunks != ()
            self.sources.add(source)
            if self.wants_reports:
                self.reports.append(InputReport(num, is_truncated, max(1, len(chunks)), source))
        self.num_tokens += num_tokens
        return num_tokens


class _MaxSims:
    """Which rows a request for MaxSim keeps: those of its queries, and of documents until all queries have come; with a
    long query, of documents until there is no room for more."""

    def __init__(self, rows: MaxSimRows, num_queries: int) -> None:
        self.rows = rows
        self.num_queries = num_queries
        self.has_long_query = False
        self.keeps_documents = True
        self.has_come = asyncio.Event()
        """Set when all rows of an input have come."""
        self._num_query_tokens = 0

    def check(self, start: int, tokenized: list[TokenizedInput], most: int) -> None:
        """Count the inputs from `start` on. Raises BadRequest for queries with more than `most` tokens."""
        for query in tokenized[: max(0, self.num_queries - start)]:
            self._num_query_tokens += query.num_tokens
            self.has_long_query |= query.num_tokens > MAX_SHORT_QUERY
        if self._num_query_tokens > most:
            raise BadRequest(
                f"The queries have {self._num_query_tokens} tokens or more: their vectors are kept, of at most {most} "
                "in a request",
                param="input",
            )

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self.has_come.clear()
            await self.has_come.wait()


class Pipeline:
    def __init__(
        self,
        config: GatewayConfig,
        *,
        admission: Admission,
        tokenizer: Tokenizer,
        policy: BatchingPolicy,
        dispatcher: Dispatcher,
        residence: Residence,
        shared_metrics: SharedMetrics,
        vector_cache: VectorCache | None = None,
        query_weights: QueryWeights | None = None,
    ) -> None:
        """`query_weights`: those of a sparse model whose queries need no worker."""
        self.config = config
        self._made_at = time.monotonic()
        self.admission = admission
        self.tokenizer = tokenizer
        self.policy = policy
        self.dispatcher = dispatcher
        self.residence = residence
        self.shared_metrics = shared_metrics
        self._make_end: Callable[[], ApiError] | None = None
        """Makes the error of each request that still comes, once this has ended."""
        self.encoder = Encoder(config.card, config.quantization_ranges)
        self._max_priority = Priority[config.max_priority.upper()]
        self._pending: set[PendingResult] = set()
        self._inspected: set[PendingResult] = set()
        self.tokenizer_room = TenantRoom(MAX_SIZE, "Texts and ids of {} characters are with the tokenizer")
        self.chat = None if config.chat_template is None else ChatProcess(config.chat_template)
        self.token_room = TenantRoom(MAX_RUNNING_TOKEN_FLOATS, "One vector for each token: {} numbers are being made")
        self._deadlines = Deadlines(self._expire)
        self._vector_cache = vector_cache
        self._query_weights = query_weights
        self._span = span_of(config.card)
        floats_of_each = config.card.dim if query_weights is None else _FLOATS_OF_A_QUERY
        self._max_per_turn = max(1, FLOATS_PER_TURN // floats_of_each)

    # --- its end --------------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """The drain's deadline is near."""
        self.end(lambda: Unavailable("The server is shutting down and did not get to this request", retry_after_s=1))

    def end(self, make_error: Callable[[], ApiError]) -> None:
        """Fail every request that waits for rows, now or later, each with an error of its own."""
        self._make_end = make_error
        self.fail_all(make_error)
        self.residence.end(make_error)
        for pending in list(self._inspected):
            pending.fail(make_error())

    def fail_all(self, make_error: Callable[[], ApiError]) -> None:
        """Fail every request that waits for rows, each with an error of its own."""
        for pending in list(self._pending):
            pending.fail(make_error())

    # --- embeddings -----------------------------------------------------------------------------------------

    async def embed(
        self, request: EmbedRequest, num_estimated: int, timeline: RequestTimeline, principal: Principal
    ) -> Embedded:
        """Compute the rows of a request, once there is room for its response (`timeline.take_room`). `num_estimated`:
        its tokens, guessed from characters.

        Its deadline counts from `timeline.arrived_at`. Raises ApiError: RateLimited for a key that is over its limits,
        TooManyRequests when admission refuses it, BadRequest for an input, Unavailable when the deadline passes or no
        worker stays alive, ServerError when the engine fails. Side effects: its inputs are removed once they are
        tokenized, and times are noted on the timeline; when cancelled, what is still queued is dropped.
        """
        timeline.num_inputs = len(request.inputs)
        stage = self.dispatcher.start_stage
        if stage is not None and not self.config.keeps_listening:  # else no client is to notice a restart
            raise NotReady(stage, time.monotonic() - self._made_at)
        self.dispatcher.raise_if_broken()
        deadline = self._deadline(request.timeout_s, timeline.arrived_at)
        priority = Priority.NORMAL if request.priority is None else request.priority
        priority = max(self._max_priority, principal.max_priority, priority)
        with principal.reserve(num_estimated) as reservation:
            try:
                permit = await self.admission.enter(num_estimated, priority, deadline, principal.tenant)
            except TooManyRequests:
                self.shared_metrics.add(Counter.REFUSED)
                raise
            with permit:
                return await self._gather(request, permit, principal, reservation, timeline)

    async def load(self, timeout_s: float | None, arrived_at: float) -> None:
        """Wait until the model is ready. Raises Unavailable as `vecd.gateway.dispatch.residence`."""
        if self.residence.is_awaited:
            await self.residence.until_ready(self._deadline(timeout_s, arrived_at) - time.monotonic())

    def keep_alive(self, seconds: float | None) -> None:
        self.residence.keep_alive(seconds)

    # --- requests of the tokenizer alone --------------------------------------------------------------------

    async def describe(
        self, parsed: ParsedTokenize, timeout_s: float | None, arrived_at: float, principal: Principal
    ) -> None:
        """Give the tokens of texts to `parsed.collector`. Raises as `embed`, and TooManyRequests while there are too
        many such requests."""
        size = size_of(parsed.texts, parsed.prompt)
        how = Tokenizing(parsed.prompt, Overflow.CHUNK, add_special_tokens=parsed.add_special_tokens)
        num_estimated = self.tokenizer.estimate_tokens(parsed.texts, how)
        with principal.reserve(num_estimated) as reservation, self._inspecting(size, principal):
            steps = self.tokenizer.api.describe_steps(
                parsed.texts, parsed.prompt, parsed.add_special_tokens, parsed.collector
            )
            next(steps)  # which checks
            reservation.note_sent(num_estimated)  # tokenizing is charged, whether it succeeds or not
            tokenizing = self.tokenizer.threads.run(steps, principal.tenant)
            reservation.settle(await self._unless_late(tokenizing, timeout_s, arrived_at))

    async def decode(
        self, parsed: ParsedDecode, timeout_s: float | None, arrived_at: float, principal: Principal
    ) -> list[str]:
        """The texts of lists of token ids. Raises as `describe`."""
        num_ids = sum(map(len, parsed.lists))
        with principal.reserve(num_ids) as reservation, self._inspecting(size_of(parsed.lists), principal):
            steps = self.tokenizer.api.decode_steps(parsed.lists, parsed.skip_special_tokens)
            next(steps)
            reservation.note_sent(num_ids)
            decoding = self.tokenizer.threads.run(steps, principal.tenant)
            return await self._unless_late(decoding, timeout_s, arrived_at)

    async def render(
        self, parsed: ParsedMessages, timeout_s: float | None, arrived_at: float, principal: Principal
    ) -> list[str]:
        """The texts that the model's chat template makes of conversations. Raises as `describe`."""
        assert self.chat is not None
        with self._inspecting(_SIZE_OF_RENDERING + len(parsed.payload), principal):
            return await self._unless_late(self.chat.render(parsed.payload), timeout_s, arrived_at)

    @contextmanager
    def _inspecting(self, size: int, principal: Principal) -> Iterator[None]:
        """Reserve room for a request that needs the tokenizer alone, and so no permit."""
        if self._make_end is not None:
            raise self._make_end()
        with self.tokenizer_room.share(principal.tenant) as share:
            self._take(share, size, most_of_one_caller(size))
            yield

    def _take(self, share: Share, num: int, most: int | None = None) -> None:
        """As `Share.take`."""
        try:
            share.take(num, most)
        except TooManyRequests:
            self.shared_metrics.add(Counter.REFUSED)
            raise

    async def _unless_late(self, work: Coroutine[Any, Any, T], timeout_s: float | None, arrived_at: float) -> T:
        """The result of `work`, which is cancelled at the deadline. Raises DeadlinePassed."""
        pending = PendingResult(1, (), asyncio.get_running_loop())
        self._inspected.add(pending)
        tick = self._deadlines.set(pending, self._deadline(timeout_s, arrived_at))
        try:
            return await _unless_over(pending, work)
        finally:
            self._deadlines.drop(pending, tick)
            self._inspected.discard(pending)
            pending.abandon()

    def _deadline(self, timeout_s: float | None, arrived_at: float) -> float:
        limit_s = self.config.request_timeout_s
        return arrived_at + (limit_s if timeout_s is None else min(timeout_s, limit_s))

    # --- the way of an embedding request --------------------------------------------------------------------

    async def _gather(
        self,
        request: EmbedRequest,
        permit: Permit,
        principal: Principal,
        reservation: Reservation,
        timeline: RequestTimeline,
    ) -> Embedded:
        if self._make_end is not None:
            raise self._make_end()
        self.dispatcher.raise_if_broken()  # it may have been found out while this request waited for admission
        if self.residence.is_awaited:
            self.residence.let_wait(self.admission.num_requests - 1, permit.deadline)
        entered_at = timeline.entered_at = time.monotonic()
        if self._query_weights is not None and request.tokenizing.role is Role.QUERY:
            request = request._replace(output=Output.LEXICAL)  # weights of its own tokens, and not of the vocabulary
        num_chars = _num_chars(request.inputs)
        counts = _Counts(self.token_room.share(principal.tenant), wants_reports=request.wants_report)
        collectors = self.encoder.make_collectors(request, counts.token_ids, counts.late_chunks)
        if request.late is not None:
            request = request._replace(output=Output.TOKENS)
        pending = PendingResult(len(request.inputs), collectors, asyncio.get_running_loop())
        request_queue = RequestQueue(pending, permit.priority, permit.deadline, principal.tenant)
        if isinstance(rows := collectors[0], MaxSimRows):
            counts.max_sims = _MaxSims(rows, request.tokenizing.num_queries)
            rows.on_come = partial(self._note_come, counts.share, counts.max_sims)
        request_queue.batches = timeline.batches
        permit.request_queue = request_queue
        self._pending.add(pending)
        tick = self._deadlines.set(pending, permit.deadline)
        try:
            take_room, timeline.take_room = timeline.take_room, None  # which refers to the connection
            num_bytes = _response_bytes(request, permit.num_tokens, self.config.card)
            num_held_bytes = num_chars or permit.num_tokens * _BYTES_OF_AN_ID
            if take_room is not None and (waiting := take_room(num_bytes, num_held_bytes)) is not None:
                permit.note_queued()  # it waits for a client that reads, not for a worker: others must not count it
                await _unless_over(pending, waiting)
            tokenized = self.tokenizer.tokenize_now(request.inputs, request.tokenizing)
            if tokenized is None:
                await _unless_over(pending, self._queue_runs(request, request_queue, permit, counts))
            later = [] if tokenized is None else self._queue_run(request, request_queue, 0, tokenized, counts)
            permit.note_queued()  # the estimate no longer counts
            if later:
                await _unless_over(pending, _in_turns(later))
            request.inputs.clear()  # frees up to megabytes before the response is there
            tokenized_at = timeline.tokenized_at = time.monotonic()
            reservation.settle(counts.num_tokens)
            await pending.finished
        finally:
            self._deadlines.drop(pending, tick)
            self._pending.discard(pending)
            pending.abandon()
            self.policy.close(request_queue)
            counts.share.keep(0)
            if counts.max_sims is not None:
                counts.max_sims.rows.on_come = None  # refers to this request, and so to the rows
            reservation.note_sent(request_queue.num_sent_tokens)
            timeline.num_tokens = counts.num_tokens
        finished_at = time.monotonic()
        sent_at = timeline.sent_at = request_queue.first_sent_at or tokenized_at
        timeline.done_at = max(request_queue.last_done_at, sent_at)
        return Embedded(
            collectors,
            counts.num_tokens,
            counts.num_truncated,
            counts.num_chunked,
            frozenset(counts.sources),
            tuple(counts.reports),
            num_chars,
            Stages(
                finished_at - timeline.arrived_at,
                tokenized_at - entered_at,
                max(0.0, sent_at - tokenized_at),
                finished_at - sent_at,
            ),
            tuple(counts.token_ids),
            tuple(counts.offsets),
        )

    def _expire(self, pending: PendingResult) -> None:
        if not pending.is_over:
            self.shared_metrics.add(Counter.EXPIRED)
            waits_for_load = self.residence.is_awaited and pending in self._pending
            pending.fail(
                self.residence.late_error() if waits_for_load else DeadlinePassed(self.dispatcher.why_unavailable())
            )

    async def _queue_runs(
        self, request: EmbedRequest, request_queue: RequestQueue, permit: Permit, counts: "_Counts"
    ) -> None:
        """Workers compute the first inputs while the last are being tokenized."""
        num_queued = 0
        most = len(request.inputs) if request.late is None else _LATE_INPUTS_PER_TURN
        async with aclosing(self.tokenizer.tokenize(request.inputs, request.tokenizing, request_queue.tenant)) as runs:
            async for tokenized in runs:
                await self._until_rows_have_room(counts.share, counts.max_sims, num_queued)
                for at in range(0, len(tokenized), most):
                    if at:
                        await asyncio.sleep(0)
                    part, num_tokens = tokenized[at : at + most], counts.num_tokens
                    later = self._queue_run(request, request_queue, num_queued, part, counts)
                    permit.note_queued(counts.num_tokens - num_tokens)
                    await _in_turns(later)
                    num_queued += len(part)

    def _queue_run(
        self,
        request: EmbedRequest,
        request_queue: RequestQueue,
        start: int,
        tokenized: list[TokenizedInput],
        counts: "_Counts",
    ) -> list[Callable[[], None]]:
        """Queue the sequences of some inputs, or deliver their rows where these are known. Returns what is left to do
        in later turns of the event loop."""
        num_tokens = counts.add(tokenized)
        most = self.config.max_request_tokens
        if most is not None and counts.num_tokens > most:
            least = "" if start + len(tokenized) == len(request.inputs) else "at least "
            message = f"Requested {least}{counts.num_tokens} tokens, max {most} tokens per request"
            raise TooManyTokens(message, param="input")
        output = request.output
        if output.is_per_token:
            width = output.width_of(self.config.card)
            if request.late is None:
                self._check_token_rows(start, tokenized, counts, width)
                counts.token_ids += [np.frombuffer(item.token_ids, dtype="<i4") for item in tokenized]
                num_rows = num_tokens if counts.max_sims is None or counts.max_sims.keeps_documents else 0
            else:
                self._check_whole(start, tokenized, self.config.arena.rows_per_slot, "late chunks are made")
                num_rows = self._find_late_chunks(request, request.late, start, tokenized, counts, width)
            self._take(counts.share, counts.share.num + num_rows * width)
        elif counts.num_chunked and not output.is_plain:
            self._check_whole(start, tokenized, self.config.max_tokens, "scores and sparse vectors are given")
        if counts.num_chunked:
            sequences = self._sequences_with_chunks(request, request_queue, start, tokenized)
        else:
            sequences = [
                QueuedSequence(request_queue, index, item, output, span=self._span)
                for index, item in enumerate(tokenized, start)
            ]
        if output is Output.LEXICAL and self._query_weights is not None:
            take = partial(self._deliver_query_weights, self._query_weights)
        elif self._vector_cache is not None and output.is_plain:
            take = partial(self._queue_unknown, self._vector_cache, request_queue)
        else:
            self.dispatcher.submit(request_queue, sequences)
            return []
        take(sequences[: self._max_per_turn])
        later = sequences[self._max_per_turn :]
        return [partial(take, later[at : at + self._max_per_turn]) for at in range(0, len(later), self._max_per_turn)]

    def _deliver_query_weights(self, query_weights: QueryWeights, sequences: list[QueuedSequence]) -> None:
        for sequence in sequences:
            token_ids = np.frombuffer(sequence.token_ids, dtype="<i4")
            added = self.tokenizer.num_added(token_ids.tolist())
            sequence.pending.deliver_one(sequence, query_weights.of_tokens(token_ids, *added))

    def _queue_unknown(
        self, vector_cache: VectorCache, request_queue: RequestQueue, sequences: list[QueuedSequence]
    ) -> None:
        unknown = vector_cache.deliver_known(sequences, sequences[0].output, request_queue.tenant)
        if unknown:
            self.dispatcher.submit(request_queue, unknown)

    def _sequences_with_chunks(
        self, request: EmbedRequest, request_queue: RequestQueue, start: int, tokenized: list[TokenizedInput]
    ) -> list[QueuedSequence]:
        sequences = []
        is_normalized = request.normalize or request.output.is_normalized_by(self.config.card)
        for index, item in enumerate(tokenized, start):
            if not item.chunks:
                sequences.append(QueuedSequence(request_queue, index, item, request.output))
                continue
            chunked = ChunkedInput(len(item.chunks), is_normalized=is_normalized)
            sequences += [QueuedSequence(request_queue, index, chunk, request.output, chunked) for chunk in item.chunks]
        return sequences

    def _check_token_rows(self, start: int, tokenized: list[TokenizedInput], counts: "_Counts", width: int) -> None:
        """Raises BadRequest for inputs whose rows do not fit into one slot, or into the memory of a request. `counts`:
        of all inputs so far. `width`: floats of a row."""
        most, num_tokens = MAX_TOKEN_FLOATS // width, counts.num_tokens
        if counts.max_sims is not None:
            counts.max_sims.check(start, tokenized, most)
        elif num_tokens > most and start + len(tokenized) > 1:
            raise BadRequest(
                f"The inputs have {num_tokens} tokens or more: one vector for each token is given of at most {most} in "
                "a request",
                param="input",
            )
        self._check_whole(start, tokenized, self.config.arena.rows_per_slot, "one vector for each token is given")

    def _check_whole(self, start: int, tokenized: list[TokenizedInput], limit: int, what: str) -> None:
        """Raises BadRequest for inputs in chunks, and for those of more than `limit` tokens."""
        for index, item in enumerate(tokenized, start):
            if item.num_tokens > limit or item.chunks:
                raise BadRequest(
                    f"'input[{index}]' has {item.num_tokens} tokens: {what} of at most "
                    f"{min(limit, self.config.max_tokens)}, which are not split",
                    param="input",
                )

    def _find_late_chunks(
        self,
        request: EmbedRequest,
        late: LateChunking,
        start: int,
        tokenized: list[TokenizedInput],
        counts: "_Counts",
        width: int,
    ) -> int:
        """Find the chunks of some inputs, and return their number. Raises BadRequest as `find_chunks`, and for more
        chunks than have room in a response. `width`: floats of a row."""
        num_before = counts.num_late_chunks
        for index, item in enumerate(tokenized, start):
            num_prefix, _ = self.tokenizer.num_added(np.frombuffer(item.token_ids, dtype="<i4").tolist())
            text = request.inputs[index]
            assert isinstance(text, str)
            is_whole = len(text) <= self.tokenizer.max_chars
            chunks = find_chunks(text, item, late, index, num_prefix, is_whole=is_whole)
            counts.late_chunks.append(chunks)
            counts.num_late_chunks += len(chunks.ranges)
        most = MAX_TOKEN_FLOATS // width
        if counts.num_late_chunks > most:
            raise BadRequest(
                f"'late_chunking': {counts.num_late_chunks} chunks or more, at most {most} are made in one request",
                param="late_chunking",
            )
        return counts.num_late_chunks - num_before

    async def _until_rows_have_room(self, share: Share, max_sims: _MaxSims | None, num_queued: int) -> None:
        """Wait until the documents of a request for MaxSim that were queued no longer have to be kept, if there is
        little room for more, and all queries are among the `num_queued` inputs."""
        if max_sims is None or num_queued < max_sims.num_queries or self.token_room.num < MAX_TOKEN_FLOATS:
            return
        rows = max_sims.rows
        await max_sims.until(lambda: not rows.num_queries_left)
        if max_sims.has_long_query:
            await max_sims.until(lambda: rows.num_come == num_queued)
            await asyncio.to_thread(rows.compare_held)
            share.keep(rows.num_floats)

    def _note_come(self, share: Share, max_sims: _MaxSims) -> None:
        """With all rows of the queries, documents need no room from now on."""
        max_sims.has_come.set()
        if max_sims.keeps_documents and not max_sims.rows.num_queries_left and not max_sims.has_long_query:
            max_sims.keeps_documents = False
            share.keep(max_sims.rows.num_floats)


def _num_chars(inputs: Inputs) -> int:
    """Of all texts; the query of a pair counts in each pair. 0 for token ids."""
    if isinstance(inputs[0], str):
        return sum(map(len, inputs))
    if isinstance(inputs[0], Pair):
        return sum(len(query) + len(document) for query, document in inputs)
    return 0


async def _in_turns(work: Iterable[Callable[[], None]]) -> None:
    """One thing in each turn of the event loop, beginning with the next one."""
    for do in work:
        await asyncio.sleep(0)
        do()


def _response_bytes(request: EmbedRequest, num_tokens: int, card: ModelCard) -> int:
    """The most bytes that a response of vectors has; 0 for one of anything else, which is counted when it is made."""
    if not request.output.is_plain and (request.output is not Output.TOKEN_VECTORS or request.is_max_sim):
        return 0
    num_rows = len(request.inputs) if request.output.is_plain else num_tokens
    per_float = sum(_BYTES_OF_A_FLOAT if form.encoding is Encoding.FLOAT else _BYTES_OF_4 for form in request.forms)
    return num_rows * width_of(request, card) * per_float


async def _unless_over(pending: PendingResult, queueing: Awaitable[T]) -> T:
    """The result of `queueing`. If the request is over before, `queueing` is cancelled. Raises the reason."""
    task = asyncio.ensure_future(queueing)
    try:
        await asyncio.wait((task, pending.finished), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await pending.finished
        return await task
    finally:
        task.cancel()
