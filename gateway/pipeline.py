"""The way of an embedding request, from its parsed body to its rows.

Owns the order of that way (the principal's limits, admission, tokenizer, batching policy, dispatcher) and the requests
that are waiting on it. Each generation has one. Knows no HTTP, no dialect, no socket.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import numpy as np

from vecd.gateway.config import GatewayConfig
from vecd.gateway.dispatch.delivery import FLOATS_PER_TURN
from vecd.gateway.dispatch.dispatcher import Dispatcher
from vecd.gateway.dispatch.residence import Residence
from vecd.gateway.dispatch.vector_cache import VectorCache
from vecd.gateway.encoding.result import Encoder, Result
from vecd.gateway.encoding.sparse import QueryWeights
from vecd.gateway.encoding.streams import MAX_TOKEN_FLOATS
from vecd.gateway.errors import (
    ApiError,
    BadRequest,
    DeadlinePassed,
    NotReady,
    TooManyRequests,
    TooManyTokens,
)
from vecd.gateway.inspection import Inspection, unless_over
from vecd.gateway.request import (
    Embedded,
    EmbedRequest,
    Inputs,
    Ints,
    Pair,
    Priority,
    RequestTimeline,
    Role,
    TokenizedInput,
)
from vecd.gateway.scheduling.admission import Admission, Deadlines, Permit, TenantRoom
from vecd.gateway.scheduling.keys import Principal
from vecd.gateway.scheduling.policy import BatchingPolicy
from vecd.gateway.scheduling.queue import QueuedSequence, RequestQueue
from vecd.gateway.telemetry.measures import SharedMetrics
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.shm.output import Output, span_of
from vecd.shm.shared_metrics import Counter

_FLOATS_OF_A_QUERY = 1024
"""What a query that needs no worker counts as: to make its sparse vector of static weights takes 0.06 ms."""
_BYTES_OF_AN_ID = 4
MAX_RUNNING_TOKEN_FLOATS = 4 * MAX_TOKEN_FLOATS
"""Of all requests for rows of tokens that are being computed; one caller gets half."""


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
        self.encoder = Encoder(config.card, config.ranges, self.tokenizer)
        self._max_priority = Priority[config.max_priority.upper()]
        self.pending: set[Result] = set()
        self.inspection = Inspection(config, self.tokenizer, self.shared_metrics, self.dispatcher.why_unavailable)
        self._note_refused = partial(self.shared_metrics.add, Counter.REFUSED)
        self.token_room = TenantRoom(
            MAX_RUNNING_TOKEN_FLOATS,
            "One vector for each token: {} numbers are being made",
            on_refused=self._note_refused,
        )
        self.deadlines = Deadlines(self._expire)
        self.span = span_of(config.card)
        # Of known rows in one turn of the event loop: 85 of 384 floats take 0.6 ms, and 1.4 ms more as JSON numbers.
        floats_of_each = config.card.dim if self.query_weights is None else _FLOATS_OF_A_QUERY
        self.max_per_turn = max(1, FLOATS_PER_TURN // floats_of_each)

    # --- its end --------------------------------------------------------------------------------------------

    def end(self, make_error: Callable[[], ApiError]) -> None:
        """Fail every request that waits for rows, now or later, each with an error of its own."""
        self._make_end = make_error
        self.fail_all(make_error)
        self.residence.end(make_error)
        self.inspection.end(make_error)

    def fail_all(self, make_error: Callable[[], ApiError]) -> None:
        """Fail every request that waits for rows, each with an error of its own."""
        for result in list(self.pending):
            result.fail(make_error())

    def _expire(self, result: Result) -> None:
        if not result.is_over:
            self.shared_metrics.add(Counter.EXPIRED)
            residence = self.residence
            late = residence.late_error() if residence.is_awaited else DeadlinePassed(self.dispatcher.why_unavailable())
            result.fail(late)

    # --- embeddings -----------------------------------------------------------------------------------------

    async def admit(self, request: EmbedRequest, num_estimated: int, arrived_at: float, principal: Principal) -> Permit:
        """A permit for a request of about `num_estimated` tokens. Raises as `run`."""
        stage = self.dispatcher.start_stage
        if stage is not None and not self.config.keeps_listening:  # else no client is to notice a restart
            raise NotReady(stage, time.monotonic() - self._made_at)
        self.dispatcher.raise_if_broken()
        deadline = deadline_of(self.config, request.timeout_s, arrived_at)
        priority = Priority.NORMAL if request.priority is None else request.priority
        priority = max(self._max_priority, principal.max_priority, priority)
        try:
            return await self.admission.enter(num_estimated, priority, deadline, principal.tenant)
        except TooManyRequests:
            self._note_refused()
            raise

    async def run(
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
        with (
            principal.reserve(num_estimated) as reservation,
            await self.admit(request, num_estimated, timeline.arrived_at, principal) as permit,
        ):
            if self._make_end is not None:
                raise self._make_end()
            self.dispatcher.raise_if_broken()  # it may have been found out while this request waited for admission
            if self.residence.is_awaited:
                self.residence.let_wait(self.admission.num_requests - 1, permit.deadline)
            timeline.entered_at = time.monotonic()
            queueing = _Queueing(self, request, permit, principal.tenant)
            result, queue = queueing.result, queueing.queue
            queue.batches = timeline.batches
            self.pending.add(result)
            tick = self.deadlines.set(result, permit.deadline)
            try:
                take_room, timeline.take_room = timeline.take_room, None  # which refers to the connection
                num_bytes = self.encoder.response_bytes(request, permit.num_tokens)
                num_held_bytes = result.num_chars or permit.num_tokens * _BYTES_OF_AN_ID
                if take_room is not None and (waiting := take_room(num_bytes, num_held_bytes)) is not None:
                    permit.note_queued()  # it waits for a client that reads, not for a worker: others must not count it
                    await unless_over(result.finished, waiting)
                tokenized = self.tokenizer.tokenize_now(request.inputs, request.tokenizing)
                if tokenized is None:
                    await unless_over(result.finished, queueing.tokenize())
                else:
                    rest = queueing.begin(tokenized)
                    permit.note_queued()  # the estimate no longer counts
                    if rest:
                        await unless_over(result.finished, queueing.queue_in_turns(rest))
                request.inputs.clear()  # frees up to megabytes before the response is there
                tokenized_at = timeline.tokenized_at = time.monotonic()
                reservation.settle(result.num_tokens)
                await result.finished
            finally:
                self.deadlines.drop(result, tick)
                self.pending.discard(result)
                result.abandon()
                self.policy.close(queue)
                if queueing.share.num:
                    queueing.share.keep(0)
                reservation.note_sent(queue.num_sent_tokens)
                timeline.num_tokens = result.num_tokens
            sent_at = timeline.sent_at = queue.first_sent_at or tokenized_at
            timeline.done_at = max(queue.last_done_at, sent_at)
            result.durations = partial(timeline.durations, time.monotonic())
            return result


def deadline_of(config: GatewayConfig, timeout_s: float | None, arrived_at: float) -> float:
    """`timeout_s`: the client's."""
    limit_s = config.request_timeout
    return arrived_at + (limit_s if timeout_s is None else min(timeout_s, limit_s))


class _Queueing:
    """Queues the inputs of an admitted request, some in each turn of the event loop."""

    def __init__(self, pipeline: Pipeline, request: EmbedRequest, permit: Permit, tenant: str) -> None:
        is_weighed = pipeline.query_weights is not None and request.tokenizing.role is Role.QUERY
        if is_weighed:
            request = request._replace(output=Output.LEXICAL)  # weights of its own tokens, and not of the vocabulary
        self._pipeline, self._permit, self._request = pipeline, permit, request
        self._output = request.output if request.late is None else Output.TOKENS
        self.share = pipeline.token_room.share(tenant)
        """Of the room for rows of tokens."""
        token_ids: list[Ints] = []
        makes = pipeline.encoder.makes(request, token_ids, self.share.keep)
        self._make = makes[0]
        self.result = Result(len(request.inputs), makes, asyncio.get_running_loop())
        self.result.are_normalized = request.normalize or request.output.is_normalized_by(pipeline.config.card)
        self.result.token_ids, self.result.num_chars = token_ids, _num_chars(request.inputs)
        self.queue = permit.request_queue = RequestQueue(self.result, permit.priority, permit.deadline, tenant)
        self._cache = pipeline.vector_cache if self._output.is_plain else None
        self._weights = pipeline.query_weights if is_weighed else None
        has_known = self._weights is not None or self._cache is not None
        self._max_per_turn = pipeline.max_per_turn if has_known else self._make.inputs_per_turn
        self._num_queued = 0

    async def tokenize(self) -> None:
        """Workers compute the first inputs while the last are being tokenized."""
        pipeline, request = self._pipeline, self._request
        tokenizing = pipeline.tokenizer.tokenize(request.inputs, request.tokenizing, self.queue.tenant)
        async with aclosing(tokenizing) as runs:
            async for tokenized in runs:
                if pipeline.token_room.num >= MAX_TOKEN_FLOATS:
                    await self._make.make_room(self._num_queued)
                num_tokens = self.result.num_tokens
                rest = self.begin(tokenized)
                self._permit.note_queued(self.result.num_tokens - num_tokens)
                await self.queue_in_turns(rest)

    def begin(self, tokenized: list[TokenizedInput]) -> list[TokenizedInput]:
        """Count the next inputs, and queue the first of them. Returns the others, for the next turns. Raises
        TooManyTokens."""
        result, most = self.result, self._pipeline.config.max_request_tokens
        result.count(self._num_queued, tokenized, wants_report=self._request.wants_report)
        if most is not None and result.num_tokens > most:
            least = "" if self._num_queued + len(tokenized) == len(self._request.inputs) else "at least "
            message = f"Requested {least}{result.num_tokens} tokens, max {most} tokens per request"
            raise TooManyTokens(message, param="input")
        self._queue(tokenized[: self._max_per_turn])
        return tokenized[self._max_per_turn :]

    async def queue_in_turns(self, tokenized: list[TokenizedInput]) -> None:
        for at in range(0, len(tokenized), self._max_per_turn):
            await asyncio.sleep(0)
            self._queue(tokenized[at : at + self._max_per_turn])

    def _queue(self, tokenized: list[TokenizedInput]) -> None:
        """Queue the sequences of the next inputs, or deliver their rows where these are known. Raises BadRequest for
        inputs whose rows do not fit into one slot, or into the memory of a request; TooManyRequests while other
        requests have that memory."""
        pipeline, output, start, queue = self._pipeline, self._output, self._num_queued, self.queue
        self._num_queued += len(tokenized)
        if output.is_per_token:
            self._check_whole(start, tokenized, pipeline.config.arena.rows_per_slot)
            self.share.take(self.share.num + self._make.expect(start, tokenized))
        elif self.result.num_chunked and not output.is_plain:
            self._check_whole(start, tokenized, pipeline.config.max_tokens)
        sequences = [
            QueuedSequence(queue, index, part, output, pipeline.span)
            for index, item in enumerate(tokenized, start)
            for part in item.chunks or (item,)
        ]
        if self._weights is not None:
            for sequence in sequences:
                token_ids = np.frombuffer(sequence.token_ids, dtype="<i4")
                added = pipeline.tokenizer.num_added(token_ids.tolist())
                self.result.put(sequence.index, self._weights.of_tokens(token_ids, *added), 0)
            return
        if self._cache is not None:
            sequences = self._cache.deliver_known(sequences, output, queue.tenant)
        if sequences:
            pipeline.dispatcher.submit(queue, sequences)

    def _check_whole(self, start: int, tokenized: list[TokenizedInput], limit: int) -> None:
        """Raises BadRequest for inputs in chunks, and for those of more than `limit` tokens."""
        for index, item in enumerate(tokenized, start):
            if item.num_tokens > limit or item.chunks:
                raise BadRequest(
                    f"'input[{index}]' has {item.num_tokens} tokens: {self._make.kind} of at most "
                    f"{min(limit, self._pipeline.config.max_tokens)}, which are not split",
                    param="input",
                )


def _num_chars(inputs: Inputs) -> int:
    """Of all texts; the query of a pair counts in each pair. 0 for token ids."""
    if isinstance(inputs[0], str):
        return sum(map(len, inputs))
    if isinstance(inputs[0], Pair):
        return sum(len(query) + len(document) for query, document in inputs)
    return 0
