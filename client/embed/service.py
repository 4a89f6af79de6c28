"""Texts → results, by a server that may be busy, restart, or refuse one of them.

Owns the reaction to each kind of failure, the model of a run, and the measurement of the server's throughput. What is
sent and repeated is `vecd.client`'s: all requests of a run are one call of an `AsyncClient`, and so of one identity.
Reads and writes no file.

- Busy, restarting, out of reach: the call repeats the request, until the server has served none for `--retry-for`.
- Refused because of its texts (400, 413, 422): the request is halved, down to the row that is refused.
- Failed because of its texts, perhaps (500, no response in time): repeated, then halved. A single row that fails is
  rejected only if the server serves a sample right after it. If not, the server is ill, and the request is repeated.
- Not allowed, or not found (401, 403, 404, …): the run ends.
- Of another identity (412, or a response that says so): the request is repeated, as a proxy may pick another node. If
  all responses are such for some seconds, and none was right between them, there is no other node: the run ends.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from vecd.base.files import JsonMapping, JsonObject
from vecd.base.target import Target
from vecd.client import calls
from vecd.client.aio import AsyncClient
from vecd.client.embed.inputs import RowBatch
from vecd.client.embed.options import EmbedError, EmbedOptions, OtherIdentity, ServerLost
from vecd.client.embed.results import Found, Item, ResultKind
from vecd.client.embed.rows import ThroughputEstimate
from vecd.client.exchanges import (
    FIRST,
    ClientCall,
    IdentityMismatch,
    Piece,
    Reaction,
    RequestLimits,
    Send,
    ServerError,
    Steps,
    VecdError,
    error_of,
)
from vecd.client.http import BadResponse, ServerResponse

_RESPONSE_S = 10.0
"""As `Pace.first_response_s`, later."""
_LOST = (Reaction.BUSY, Reaction.AWAY)
_OTHER_FORM = (LookupError, TypeError, ValueError, AttributeError)
"""Raised when the results in a response are not as they should be."""
_FIRST_PAUSE_S, _MAX_NODE_PAUSE_S, _MAX_PAUSE_S = 0.02, 1.0, 10.0
"""Before a request is sent anew. A node of another identity, the second, has computed nothing."""
_IDENTITY_PAUSE_S = 0.2
_MAX_DETAIL_CHARS = 500
_UNLIMITED = RequestLimits(1 << 40, 1 << 40)
"""Rows come in requests of the right size."""

_T = TypeVar("_T")


class RunModel(NamedTuple):
    """What all results of a run are of. Its fields are in the journal."""

    dim: int
    columns: dict[str, str]
    """As in `ResultKind`."""
    identity: str
    """Of files, settings and number format, as the server says."""

    def why_other(self, journaled: JsonMapping) -> str:
        """How it differs from the model in a journal; "" when it does not."""
        if (columns := journaled.get("columns", {})) != self.columns:
            return f"its results are {_described(self.columns)}, not {_described(columns)}"
        if (identity := journaled.get("identity")) != self.identity:
            was = f"that was of {identity}" if identity else "the unfinished run knew none"
            return f"its identity is {self.identity}, and {was}"
        return ""


def _described(columns: JsonMapping) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in columns.items()) or "dense vectors"


class _Refused(Exception):
    """Raised when the texts of a request are found to be at fault."""


class EmbeddingService:
    """`connect` first."""

    def __init__(self, target: Target, options: EmbedOptions, why_gone: Callable[[], str | None]) -> None:
        """`why_gone` returns why the server will not come back, or None."""
        self.target = target
        self.client = AsyncClient.of_command(
            target, "vecd-embed", api_key=options.api_key, identity=FIRST, retry_for=options.retry_for
        )
        self.client.limits = _UNLIMITED
        self.client.why_gone = why_gone  # type: ignore[method-assign]
        self.client.silence_s, self.client.counts_silence = options.timeout, True
        self.estimate = ThroughputEstimate(options.concurrency)
        self.kind: ResultKind
        self.model: RunModel | None = None
        self.max_texts = self.max_bytes = 1 << 40
        """Of a request."""
        self.num_tokens = 0
        """Of all that was served."""
        self._options = options
        self._call: ClientCall
        self._trouble = ""
        self._other_since: float | None = None
        """When the first response of another identity came since one was right."""
        self._has_nodes = False
        """Whether a response was right after one of another identity."""
        self._served_at = self._silent_since = time.monotonic()
        """When results came; when any response came, or the first of the requests under way was sent."""
        self._num_exchanges = 0
        self._response_due_s = options.pace.first_response_s

    @property
    def trouble(self) -> str:
        """Why requests wait at the moment, or ""."""
        silent_s = time.monotonic() - self._silent_since
        if not self._trouble and self._num_exchanges and silent_s > self._response_due_s:
            return f"no response for {silent_s:.0f} s"
        return self._trouble

    # --- the model ----------------------------------------------------------------------------------------

    async def connect(self, identity: str | None = None) -> RunModel:
        """Find out which model the server has, the first time. `identity`: what it has to be.

        Raises ServerLost, EmbedError when the server says no identity, or the model or a flag does not go with the
        results that are to be written.
        """
        self.client.identity = identity or self.client.identity
        began_at = time.monotonic()
        while self.model is None:
            self._call = ClientCall(self.client)  # what was answered without an identity has no part in the run
            info = await self._info()
            served = info.get("model") or {}
            try:
                self.kind = ResultKind(self._options, served.get("capabilities") or ())
                found = await self._serve([self.kind.sample], is_sample=True)
            except ValueError as error:
                raise EmbedError(f"{self.target}: {error}") from error
            except _Refused as error:
                raise ServerLost(f"{self.target} refuses: {error}") from error
            if self.client.identity is None:
                await self._await_identity(began_at, is_known_later="identity" in served)
                continue
            self.kind.learn(found)
            self.model = RunModel(self.kind.dim, self.kind.columns, self.client.identity)
            self.max_texts = info.get("max_client_batch_size") or self.max_texts
            self.max_bytes = (info.get("limits") or {}).get("max_body_bytes") or self.max_bytes
            max_tokens = served.get("max_tokens") or info.get("max_input_length")
            if max_tokens and self._options.overflow != "chunk":
                self.estimate.set_max_tokens(max_tokens)
        return self.model

    async def _await_identity(self, began_at: float, *, is_known_later: bool) -> None:
        """At its first start with a model, a server reads the weights for it, and answers meanwhile without one.

        Raises EmbedError when it is not known after --retry-for, or the server knows of none."""
        self._trouble = "it does not say the identity of its model (x-vecd-identity)"
        if not is_known_later or time.monotonic() - began_at >= self._options.retry_for:
            raise EmbedError(f"{self.target}: {self._trouble}, by which a run knows that all its rows are of one model")
        await asyncio.sleep(min(_IDENTITY_PAUSE_S, self._options.retry_for))

    async def _info(self) -> JsonObject:
        """{} from a server that has none, or does not show it."""
        began_at = time.monotonic()
        try:
            info = await self._run(calls.info(self.client))
        except VecdError as error:
            if error.reaction in _LOST or (error.reaction is Reaction.FATAL and error.status is None):
                raise self._lost(error, began_at) from error
            return {}
        return info if isinstance(info, dict) else {}

    # --- texts --------------------------------------------------------------------------------------------

    async def embed(self, batch: RowBatch) -> None:
        """Fill in the results of `batch`, all of the model of `connect`. Raises ServerLost."""
        batch.results = self.kind.blank(len(batch.rows))
        if indices := [index for index, row in enumerate(batch.rows) if row.texts]:
            await self._fill(batch, indices)

    async def _fill(self, batch: RowBatch, indices: list[int]) -> None:
        try:
            found = await self._serve([batch.rows[index].texts for index in indices])
        except _Refused as error:
            if len(indices) == 1:
                batch.reasons[indices[0]] = str(error)
                return
            middle = len(indices) // 2
            await self._fill(batch, indices[:middle])
            await self._fill(batch, indices[middle:])
        else:
            batch.results[indices] = found

    async def _serve(self, items: Sequence[Item], *, is_sample: bool = False) -> Found:
        """`is_sample`: failures are never the fault of its texts. Raises _Refused, ServerLost."""
        cost = 0.0 if is_sample else sum(self.estimate.cost(text) for item in items for text in item)
        began_at, pause_s = time.monotonic(), _FIRST_PAUSE_S
        while True:
            sent_at, max_pause_s = time.monotonic(), _MAX_PAUSE_S
            try:
                served = await self._run(self.kind.steps(self.client, items), cost)
                self._note_served(sent_at)
                return served
            except VecdError as error:
                if error.reaction is Reaction.REFUSED:
                    self._note_served(sent_at)
                    raise _Refused(_in_a_line(error)) from error
                if error.reaction is Reaction.OTHER_MODEL:
                    max_pause_s = _MAX_NODE_PAUSE_S
                elif error.reaction in (*_LOST, Reaction.FATAL):
                    raise self._lost(error, began_at) from error
                elif not is_sample and (len(items) > 1 or await self._serves_sample()):
                    raise _Refused(_why(error)) from error
                else:
                    self._trouble = _why(error)
                if time.monotonic() - max(self._served_at, began_at) >= self._options.retry_for:
                    raise self._lost(error, began_at) from error
            await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))
            pause_s = min(2 * pause_s, max_pause_s)

    def _note_served(self, sent_at: float) -> None:
        """Note that a response to a request of `sent_at` was right."""
        self._trouble, self._response_due_s = "", _RESPONSE_S
        self._served_at = time.monotonic()
        if self._other_since is not None and sent_at > self._other_since:
            self._has_nodes, self._other_since = True, None

    def _note_other(self, identity: str | None) -> None:
        """Note a response of another identity. Raises OtherIdentity when there seems to be no other node."""
        why = f"its identity is {identity or 'not known'}, and this run began with {self.client.demanded_identity}"
        self._trouble, now, options = why, time.monotonic(), self._options
        self._other_since = self._other_since or now
        if not self._has_nodes and now - self._other_since >= min(options.pace.only_node_s, options.retry_for):
            raise OtherIdentity(f"{self.target} has another model: {why}")

    def _lost(self, error: VecdError, began_at: float) -> ServerLost:
        if error.reaction is Reaction.FATAL:
            status = error.status
            return ServerLost(f"{self.target} answers {status}: {_in_a_line(error)}" if status else str(error))
        why = self._trouble if isinstance(error, IdentityMismatch) else _why(error)
        silent_s = time.monotonic() - max(self._served_at, began_at)
        return ServerLost(f"{self.target} has served nothing for {silent_s:.0f} s: {why}")

    # --- requests -----------------------------------------------------------------------------------------

    async def _serves_sample(self) -> bool:
        try:
            await self._run(self.kind.steps(self.client, [self.kind.sample]), is_once=True)
        except VecdError:
            return False
        return True

    async def _run(self, steps: Steps[_T], cost: float = 0.0, *, is_once: bool = False) -> _T:
        """The result of a call. `is_once`: nothing is repeated. Raises VecdError."""
        try:
            while True:
                for piece in next(steps):
                    await self._answer(piece, cost, is_once=is_once)
        except StopIteration as done:
            result: _T = done.value
            return result
        except _OTHER_FORM as error:
            is_said = isinstance(error, ValueError)
            words = _in_a_line(error) if is_said else f"results of another form ({type(error).__name__}: {error})"
            failed = ServerError(words)
            failed.reaction = Reaction.FAILED
            raise failed from error

    async def _answer(self, piece: Piece, cost: float, *, is_once: bool) -> None:
        """Send `piece` until it has its answer. Side effects: counts its tokens."""
        # A sample is one short text. Behind the run's own texts, it would come a second of work later.
        piece.headers = {"x-vecd-priority": self._options.priority if cost else "interactive"}
        outcome: ServerResponse | Exception | None = None
        try:
            for step in self._call.attempts(piece):
                if isinstance(step, Send):
                    outcome = await self._send(step, cost)
                    continue
                self._trouble = _why(outcome)
                if is_once:
                    raise VecdError(self._trouble)
                await asyncio.sleep(step)
        except IdentityMismatch:
            self._note_other(outcome.identity if isinstance(outcome, ServerResponse) else None)
            raise
        said = outcome.num_tokens if isinstance(outcome, ServerResponse) else None
        usage = piece.answer.get("usage") if isinstance(piece.answer, dict) else None
        self.num_tokens += said or int((usage or {}).get("prompt_tokens") or 0)

    async def _send(self, step: Send, cost: float) -> ServerResponse | Exception | None:
        began_at, took_s, work = time.monotonic(), None, self.estimate.begin(cost)
        if not self._num_exchanges:
            self._silent_since = began_at
        self._num_exchanges += 1
        try:
            await self.client.send(step)
            if isinstance(step.outcome, ServerResponse):
                self._silent_since = time.monotonic()
                if step.outcome.status == 200 and cost:
                    took_s = self._silent_since - began_at
        finally:
            self._num_exchanges -= 1
            self.estimate.end(cost, work, took_s)
        return step.outcome


def _why(outcome: ServerResponse | Exception | None) -> str:
    """What went wrong with a request, in a few words."""
    error = error_of(outcome, "") if isinstance(outcome, ServerResponse) else outcome
    cause = error.__cause__ if error is not None and isinstance(error.__cause__, OSError | BadResponse) else error
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    words = _in_a_line(cause) or type(cause).__name__
    return f"status {cause.status}: {words}" if isinstance(cause, VecdError) and cause.status is not None else words


def _in_a_line(error: Exception | None) -> str:
    return " ".join(str(error).split())[:_MAX_DETAIL_CHARS]
