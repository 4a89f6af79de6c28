"""The way of an embedding request, from its parsed body to its rows.

Owns the order of that way (the principal's limits, admission, tokenizer, batching policy, dispatcher) and the requests
that are waiting on it. Each generation has one. Knows no HTTP, no dialect, no socket.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

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


class _MaxSims:
    """Which rows a request for MaxSim keeps: those of its queries, and of documents until all queries have come; with a
    long query, of documents until there is no room for more."""

    def __init__(self, rows: MaxSimRows, num_queries: int, share: Share) -> None:
        """`share`: of the room for rows of tokens."""
        self.rows = rows
        self.keeps_documents = True
        self._num_queries = num_queries
        self._share = share
        self._has_long_query = False
        self._has_come = asyncio.Event()
        """Set when all rows of an input have come."""
        self._num_query_tokens = 0
        rows.on_come = self._note_come

    def check(self, start: int, tokenized: list[TokenizedInput], most: int) -> None:
        """Count the inputs from `start` on. Raises BadRequest for queries with more than `most` tokens."""
        for query in tokenized[: max(0, self._num_queries - start)]:
            self._num_query_tokens += query.num_tokens
            self._has_long_query |= query.num_tokens > MAX_SHORT_QUERY
        if self._num_query_tokens > most:
            raise BadRequest(
                f"The queries have {self._num_query_tokens} tokens or more: their vectors are kept, of at most {most} "
                "in a request",
                param="input",
            )

    async def make_room(self, num_queued: int) -> None:
        """Wait until the documents that were queued no longer have to be kept, if all queries are among the
        `num_queued` inputs."""
        if num_queued >= self._num_queries:
            await self._until(lambda: not self.rows.num_queries_left)
            if self._has_long_query:
                await self._until(lambda: self.rows.num_come == num_queued)
                await asyncio.to_thread(self.rows.compare_held)
                self._share.keep(self.rows.num_floats)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._has_come.clear()
            await self._has_come.wait()

    def _note_come(self) -> None:
        """With all rows of the queries, documents need no room from now on."""
        self._has_come.set()
        if self.keeps_documents and not self.rows.num_queries_left and not self._has_long_query:
            self.keeps_documents = False
            self._share.keep(self.rows.num_floats)


@dataclass(eq=False)
class Pipeline:
    config: GatewayConfig
    admission: Admission
    tokenizer: Tokenizer
    policy: BatchingPolicy
    dispatcher: Dispatcher
    residence: Residence
    shared_metrics: SharedMetrics
    vector_cache: VectorCache | None = None
    query_weights: QueryWeights | None = None
    """Those of a sparse model whose queries need no worker."""

    def __post_init__(self) -> None:
        config = self.config
        self._made_at = time.monotonic()
        self._make_end: Callable[[], ApiError] | None = None
        """Makes the error of each request that still comes, once this has ended."""
        self.encoder = Encoder(config.card, config.ranges)
        self._max_priority = Priority[config.max_priority.upper()]
        self.pending: set[PendingResult] = set()
        self._inspected: set[PendingResult] = set()
        self.tokenizer_room = TenantRoom(MAX_SIZE, "Texts and ids of {} characters are with the tokenizer")
        self.chat = None if config.chat_template is None else ChatProcess(config.chat_template)
        self.token_room = TenantRoom(MAX_RUNNING_TOKEN_FLOATS, "One vector for each token: {} numbers are being made")
        self.deadlines = Deadlines(self._expire)
        self.span = span_of(config.card)
        floats_of_each = config.card.dim if self.query_weights is None else _FLOATS_OF_A_QUERY
        self.max_per_turn = max(1, FLOATS_PER_TURN // floats_of_each)

    # --- its end --------------------------------------------------------------------------------------------

    def end(self, make_error: Callable[[], ApiError]) -> None:
        """Fail every request that waits for rows, now or later, each with an error of its own."""
        self._make_end = make_error
        self.fail_all(make_error)
        self.residence.end(make_error)
        for pending in list(self._inspected):
            pending.fail(make_error())

    def fail_all(self, make_error: Callable[[], ApiError]) -> None:
        """Fail every request that waits for rows, each with an error of its own."""
        for pending in list(self.pending):
            pending.fail(make_error())

    def _expire(self, pending: PendingResult) -> None:
        if not pending.is_over:
            self.shared_metrics.add(Counter.EXPIRED)
            waits_for_load = self.residence.is_awaited and pending in self.pending
            pending.fail(
                self.residence.late_error() if waits_for_load else DeadlinePassed(self.dispatcher.why_unavailable())
            )

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
        deadline = deadline_of(self.config, request.timeout_s, timeline.arrived_at)
        priority = Priority.NORMAL if request.priority is None else request.priority
        priority = max(self._max_priority, principal.max_priority, priority)
        with principal.reserve(num_estimated) as reservation:
            try:
                permit = await self.admission.enter(num_estimated, priority, deadline, principal.tenant)
            except TooManyRequests:
                self.shared_metrics.add(Counter.REFUSED)
                raise
            with permit:
                if self._make_end is not None:
                    raise self._make_end()
                self.dispatcher.raise_if_broken()  # it may have been found out while this request waited for admission
                if self.residence.is_awaited:
                    self.residence.let_wait(self.admission.num_requests - 1, permit.deadline)
                timeline.entered_at = time.monotonic()
                return await _Run(self, request, permit, principal.tenant).rows(reservation, timeline)

    # --- requests of the tokenizer alone --------------------------------------------------------------------

    async def describe(self, parsed: ParsedTokenize, deadline: float, principal: Principal) -> None:
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
            reservation.settle(await self._unless_late(tokenizing, deadline))

    async def decode(self, parsed: ParsedDecode, deadline: float, principal: Principal) -> list[str]:
        """The texts of lists of token ids. Raises as `describe`."""
        num_ids = sum(map(len, parsed.lists))
        with principal.reserve(num_ids) as reservation, self._inspecting(size_of(parsed.lists), principal):
            steps = self.tokenizer.api.decode_steps(parsed.lists, parsed.skip_special_tokens)
            next(steps)
            reservation.note_sent(num_ids)
            return await self._unless_late(self.tokenizer.threads.run(steps, principal.tenant), deadline)

    async def render(self, parsed: ParsedMessages, deadline: float, principal: Principal) -> list[str]:
        """The texts that the model's chat template makes of conversations. Raises as `describe`."""
        assert self.chat is not None
        with self._inspecting(_SIZE_OF_RENDERING + len(parsed.payload), principal):
            return await self._unless_late(self.chat.render(parsed.payload), deadline)

    @contextmanager
    def _inspecting(self, size: int, principal: Principal) -> Iterator[None]:
        """Reserve room for a request that needs the tokenizer alone, and so no permit."""
        if self._make_end is not None:
            raise self._make_end()
        with self.tokenizer_room.share(principal.tenant) as share:
            self.take(share, size, most_of_one_caller(size))
            yield

    def take(self, share: Share, num: int, most: int | None = None) -> None:
        """As `Share.take`. Side effect: a refusal is counted."""
        try:
            share.take(num, most)
        except TooManyRequests:
            self.shared_metrics.add(Counter.REFUSED)
            raise

    async def _unless_late(self, work: Coroutine[Any, Any, T], deadline: float) -> T:
        """The result of `work`, which is cancelled at the deadline. Raises DeadlinePassed."""
        pending = PendingResult(1, (), asyncio.get_running_loop())
        self._inspected.add(pending)
        tick = self.deadlines.set(pending, deadline)
        try:
            return await _unless_over(pending, work)
        finally:
            self.deadlines.drop(pending, tick)
            self._inspected.discard(pending)
            pending.abandon()


def deadline_of(config: GatewayConfig, timeout_s: float | None, arrived_at: float) -> float:
    """`timeout_s`: the client's."""
    limit_s = config.request_timeout
    return arrived_at + (limit_s if timeout_s is None else min(timeout_s, limit_s))


class _Run:
    """An embedding request that was admitted, until its rows have come."""

    def __init__(self, pipeline: Pipeline, request: EmbedRequest, permit: Permit, tenant: str) -> None:
        if pipeline.query_weights is not None and request.tokenizing.role is Role.QUERY:
            request = request._replace(output=Output.LEXICAL)  # weights of its own tokens, and not of the vocabulary
        self._pipeline = pipeline
        self._permit = permit
        self._share = pipeline.token_room.share(tenant)
        """Of the room for rows of tokens."""
        self._embedded = embedded = Embedded(num_chars=_num_chars(request.inputs))
        self._late_chunks: list[LateChunks] = []
        self._num_late_chunks = 0
        embedded.collectors = pipeline.encoder.make_collectors(request, embedded.token_ids, self._late_chunks)
        self._request = request if request.late is None else request._replace(output=Output.TOKENS)
        self._pending = PendingResult(len(request.inputs), embedded.collectors, asyncio.get_running_loop())
        self._queue = RequestQueue(self._pending, permit.priority, permit.deadline, tenant)
        self._max_sims: _MaxSims | None = None
        if isinstance(rows := embedded.collectors[0], MaxSimRows):
            self._max_sims = _MaxSims(rows, request.tokenizing.num_queries, self._share)

    async def rows(self, reservation: Reservation, timeline: RequestTimeline) -> Embedded:
        pipeline, request, pending, queue = self._pipeline, self._request, self._pending, self._queue
        embedded, permit = self._embedded, self._permit
        queue.batches = timeline.batches
        permit.request_queue = queue
        pipeline.pending.add(pending)
        tick = pipeline.deadlines.set(pending, permit.deadline)
        try:
            take_room, timeline.take_room = timeline.take_room, None  # which refers to the connection
            num_bytes = _response_bytes(request, permit.num_tokens, pipeline.config.card)
            num_held_bytes = embedded.num_chars or permit.num_tokens * _BYTES_OF_AN_ID
            if take_room is not None and (waiting := take_room(num_bytes, num_held_bytes)) is not None:
                permit.note_queued()  # it waits for a client that reads, not for a worker: others must not count it
                await _unless_over(pending, waiting)
            tokenized = pipeline.tokenizer.tokenize_now(request.inputs, request.tokenizing)
            if tokenized is None:
                await _unless_over(pending, self._queue_runs())
            later = [] if tokenized is None else self._queue_run(0, tokenized)
            permit.note_queued()  # the estimate no longer counts
            if later:
                await _unless_over(pending, _in_turns(later))
            request.inputs.clear()  # frees up to megabytes before the response is there
            tokenized_at = timeline.tokenized_at = time.monotonic()
            reservation.settle(embedded.num_tokens)
            await pending.finished
        finally:
            pipeline.deadlines.drop(pending, tick)
            pipeline.pending.discard(pending)
            pending.abandon()
            pipeline.policy.close(queue)
            self._share.keep(0)
            if self._max_sims is not None:
                self._max_sims.rows.on_come = None  # refers to this request, and so to the rows
            reservation.note_sent(queue.num_sent_tokens)
            timeline.num_tokens = embedded.num_tokens
        sent_at = timeline.sent_at = queue.first_sent_at or tokenized_at
        timeline.done_at = max(queue.last_done_at, sent_at)
        embedded.durations = partial(timeline.durations, time.monotonic())
        return embedded

    async def _queue_runs(self) -> None:
        """Workers compute the first inputs while the last are being tokenized."""
        pipeline, request, num_queued = self._pipeline, self._request, 0
        most = len(request.inputs) if request.late is None else _LATE_INPUTS_PER_TURN
        tokenizing = pipeline.tokenizer.tokenize(request.inputs, request.tokenizing, self._queue.tenant)
        async with aclosing(tokenizing) as runs:
            async for tokenized in runs:
                if self._max_sims is not None and pipeline.token_room.num >= MAX_TOKEN_FLOATS:
                    await self._max_sims.make_room(num_queued)
                for at in range(0, len(tokenized), most):
                    if at:
                        await asyncio.sleep(0)
                    part, num_tokens = tokenized[at : at + most], self._embedded.num_tokens
                    later = self._queue_run(num_queued, part)
                    self._permit.note_queued(self._embedded.num_tokens - num_tokens)
                    await _in_turns(later)
                    num_queued += len(part)

    def _queue_run(self, start: int, tokenized: list[TokenizedInput]) -> list[Callable[[], None]]:
        """Queue the sequences of the inputs from `start` on, or deliver their rows where these are known. Returns what
        is left to do in later turns of the event loop."""
        pipeline, request = self._pipeline, self._request
        self._count(tokenized)
        most, output = pipeline.config.max_request_tokens, request.output
        if most is not None and self._embedded.num_tokens > most:
            least = "" if start + len(tokenized) == len(request.inputs) else "at least "
            message = f"Requested {least}{self._embedded.num_tokens} tokens, max {most} tokens per request"
            raise TooManyTokens(message, param="input")
        if output.is_per_token:
            self._take_room_for_tokens(start, tokenized)
        elif self._embedded.num_chunked and not output.is_plain:
            self._check_whole(start, tokenized, pipeline.config.max_tokens, "scores and sparse vectors are given")
        if self._embedded.num_chunked:
            sequences = self._sequences_with_chunks(start, tokenized)
        else:
            sequences = [
                QueuedSequence(self._queue, index, item, output, span=pipeline.span)
                for index, item in enumerate(tokenized, start)
            ]
        take: Callable[[list[QueuedSequence]], None]
        if output is Output.LEXICAL and pipeline.query_weights is not None:
            take = partial(self._deliver_query_weights, pipeline.query_weights)
        elif pipeline.vector_cache is not None and output.is_plain:
            take = partial(self._queue_unknown, pipeline.vector_cache)
        else:
            pipeline.dispatcher.submit(self._queue, sequences)
            return []
        most = pipeline.max_per_turn
        take(sequences[:most])
        return [partial(take, sequences[at : at + most]) for at in range(most, len(sequences), most)]

    def _count(self, tokenized: list[TokenizedInput]) -> None:
        embedded = self._embedded
        for _, num, is_truncated, source, chunks, _, offsets in tokenized:
            embedded.num_tokens += num
            if offsets is not None:
                embedded.offsets.append(offsets)
            embedded.num_truncated += is_truncated
            embedded.num_chunked += chunks != ()
            embedded.sources.add(source)
            if self._request.wants_report:
                embedded.reports.append(InputReport(num, is_truncated, max(1, len(chunks)), source))

    def _deliver_query_weights(self, query_weights: QueryWeights, sequences: list[QueuedSequence]) -> None:
        for sequence in sequences:
            token_ids = np.frombuffer(sequence.token_ids, dtype="<i4")
            added = self._pipeline.tokenizer.num_added(token_ids.tolist())
            sequence.pending.deliver_one(sequence, query_weights.of_tokens(token_ids, *added))

    def _queue_unknown(self, vector_cache: VectorCache, sequences: list[QueuedSequence]) -> None:
        unknown = vector_cache.deliver_known(sequences, self._request.output, self._queue.tenant)
        if unknown:
            self._pipeline.dispatcher.submit(self._queue, unknown)

    def _sequences_with_chunks(self, start: int, tokenized: list[TokenizedInput]) -> list[QueuedSequence]:
        sequences, request, queue = [], self._request, self._queue
        is_normalized = request.normalize or request.output.is_normalized_by(self._pipeline.config.card)
        for index, item in enumerate(tokenized, start):
            if not item.chunks:
                sequences.append(QueuedSequence(queue, index, item, request.output))
                continue
            chunked = ChunkedInput(len(item.chunks), is_normalized=is_normalized)
            sequences += [QueuedSequence(queue, index, chunk, request.output, chunked) for chunk in item.chunks]
        return sequences

    # --- rows of tokens -------------------------------------------------------------------------------------

    def _take_room_for_tokens(self, start: int, tokenized: list[TokenizedInput]) -> None:
        """Raises BadRequest for inputs whose rows do not fit into one slot, or into the memory of a request;
        TooManyRequests while other requests have that memory."""
        config, max_sims = self._pipeline.config, self._max_sims
        width, rows_per_slot = self._request.output.width_of(config.card), config.arena.rows_per_slot
        most = MAX_TOKEN_FLOATS // width
        if self._request.late is not None:
            self._check_whole(start, tokenized, rows_per_slot, "late chunks are made")
            num_rows = self._find_late_chunks(self._request.late, start, tokenized, most)
        else:
            if max_sims is not None:
                max_sims.check(start, tokenized, most)
            elif (num_tokens := self._embedded.num_tokens) > most and start + len(tokenized) > 1:
                raise BadRequest(
                    f"The inputs have {num_tokens} tokens or more: one vector for each token is given of at most "
                    f"{most} in a request",
                    param="input",
                )
            self._check_whole(start, tokenized, rows_per_slot, "one vector for each token is given")
            self._embedded.token_ids += [np.frombuffer(item.token_ids, dtype="<i4") for item in tokenized]
            keeps_rows = max_sims is None or max_sims.keeps_documents
            num_rows = sum(item.num_tokens for item in tokenized) if keeps_rows else 0
        self._pipeline.take(self._share, self._share.num + num_rows * width)

    def _check_whole(self, start: int, tokenized: list[TokenizedInput], limit: int, what: str) -> None:
        """Raises BadRequest for inputs in chunks, and for those of more than `limit` tokens."""
        for index, item in enumerate(tokenized, start):
            if item.num_tokens > limit or item.chunks:
                raise BadRequest(
                    f"'input[{index}]' has {item.num_tokens} tokens: {what} of at most "
                    f"{min(limit, self._pipeline.config.max_tokens)}, which are not split",
                    param="input",
                )

    def _find_late_chunks(self, late: LateChunking, start: int, tokenized: list[TokenizedInput], most: int) -> int:
        """Find the chunks of some inputs, and return their number. Raises BadRequest as `find_chunks`, and for more
        chunks than have room in a response, which is `most`."""
        num_before, tokenizer = self._num_late_chunks, self._pipeline.tokenizer
        for index, item in enumerate(tokenized, start):
            num_prefix, _ = tokenizer.num_added(np.frombuffer(item.token_ids, dtype="<i4").tolist())
            text = self._request.inputs[index]
            assert isinstance(text, str)
            is_whole = len(text) <= tokenizer.max_chars
            chunks = find_chunks(text, item, late, index, num_prefix, is_whole=is_whole)
            self._late_chunks.append(chunks)
            self._num_late_chunks += len(chunks.ranges)
        if self._num_late_chunks > most:
            raise BadRequest(
                f"'late_chunking': {self._num_late_chunks} chunks or more, at most {most} are made in one request",
                param="late_chunking",
            )
        return self._num_late_chunks - num_before


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
