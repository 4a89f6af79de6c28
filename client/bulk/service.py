"""Texts → vectors, by a server that may be busy, restart, or refuse one of them.

Owns the connections, the requests, what is done about each kind of failure, and how a model is told from another. Reads
and writes no file. Called by `vecd.client.bulk.run`.

- Busy, restarting, out of reach (429, 503, 502, 504, 408, no connection): asked again, later each time or when the
  server says, as long as it answers anybody or came back within `retry_for_s`.
- Refused for what was sent (400, 413, 422): the request is halved, down to the row that is refused.
- Failed on what was sent (500, no answer in time): asked again, then halved; a row alone that fails is only rejected
  if the server serves the probe right after it. Else it is the server that is ill, and is waited for.
- Not allowed, or not there (401, 403, 404, …): the run ends.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from vecd.client.bulk.pace import Pace
from vecd.client.connection import (
    Answer,
    BadAnswer,
    ClientConnection,
    Target,
    connect,
    name_failure,
    render_get,
    render_post,
)

_AGENT = "vecd-embed"
_PATH = "/v1/embeddings"
_CONNECT_TIMEOUT_S = 10.0
_FIRST_PAUSE_S = 0.2
_MAX_PAUSE_S = 10.0
_MAX_RETRY_AFTER_S = 60.0
_MAX_FAILURES = 3
"""Of one request, of the kind that might be its own fault."""
_REFUSED = (400, 413, 422)
_BUSY = (408, 425, 429, 502, 503, 504)
PROBE = "The probe of a run: a sentence whose vector tells one model from another."


class ServerLost(Exception):
    """Raised when the server has been out of reach, or ill, for too long."""


class NotServed(Exception):
    """Raised when the server answers, and will never serve what is asked of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What every request says beside its texts. Immutable."""

    dtype: str
    fields: dict[str, Any]
    """Of the body: what the texts are for, what is done with long ones, …"""
    priority: str
    api_key: str | None
    timeout_s: float
    retry_for_s: float


@dataclass(frozen=True, slots=True)
class Model:
    """Whose vectors they are."""

    name: str
    dim: int
    """Of the vectors that are answered."""
    facts: dict[str, Any]
    """What /info says that cannot differ from run to run; empty where it says nothing."""
    probe: list[float]
    """The vector of `PROBE`."""

    _MIN_COSINE = 0.998
    """What vecd promises of any number format against any other. Models that differ are far below."""

    def why_other(self, told: dict[str, Any]) -> str:
        """How it differs from the model of which a journal tells; "" when it does not. Names may change: a folder's
        may be another, and vectors the same."""
        if self.dim != told["dim"]:
            return f"{self.dim} dimensions, not {told['dim']}"
        for name, value in self.facts.items():
            if name in told["facts"] and told["facts"][name] != value:
                return f"{name} {value!r}, not {told['facts'][name]!r}"
        return "" if same_direction(self.probe, told["probe"], self._MIN_COSINE) else "other vectors for the same text"

    def is_of(self, probe: NDArray[Any]) -> bool:
        """Whether it is what the server now makes of `PROBE`."""
        return len(probe) == self.dim and same_direction(self.probe, probe, self._MIN_COSINE)


def same_direction(one: Sequence[float] | NDArray[Any], other: Sequence[float] | NDArray[Any], cosine: float) -> bool:
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return bool(np.array_equal(a, b)) or (lengths > 0 and float(a @ b) / lengths >= cosine)


class Limits(NamedTuple):
    """Of one request, where the server tells."""

    max_inputs: int | None
    max_body_bytes: int | None


@dataclass(slots=True)
class Vectors:
    """Of some texts."""

    matrix: NDArray[Any]
    """A row for each text; NaN where there is a reason."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Why there is no vector, by index."""
    num_tokens: int = 0


class Service:
    """One server. `meet` it first."""

    def __init__(self, target: Target, asked: Asked, why_gone: Callable[[], str | None] = lambda: None) -> None:
        """`why_gone`: what has ended a server that will not come back."""
        self.trouble = ""
        """What is wrong at the moment, for who waits."""
        self.pace = Pace()
        self._target = target
        self._asked = asked
        self._why_gone = why_gone
        self._idle: list[ClientConnection] = []
        self._answered_at = time.monotonic()
        self._item = np.dtype(asked.dtype).newbyteorder("<")
        self._model: Model

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    # --- the model ----------------------------------------------------------------------------------------

    async def meet(self) -> tuple[Model, Limits]:
        """Find out whose vectors these will be. Raises ServerLost, NotServed."""
        answer = await self._until_served(self._render([PROBE]), 1, is_probe=True)
        if answer.status != 200:
            raise NotServed(f"{self._target} refuses: {_message(answer)}")
        dim = len(answer.body) // self._item.itemsize
        probe = self._matrix(answer, 1, dim)[0]
        facts, limits = await self._info()
        self._model = Model(answer.model or "", dim, facts, [float(value) for value in probe])
        return self._model, limits

    async def still_same(self) -> bool:
        """Whether the server has the model that it had at `meet`, or one whose vectors are the same."""
        answer = await self._until_served(self._render([PROBE]), 1, is_probe=True)
        if answer.status != 200:
            raise NotServed(f"{self._target} refuses: {_message(answer)}")
        dim = len(answer.body) // self._item.itemsize
        return self._model.is_of(self._matrix(answer, 1, dim)[0])

    async def _info(self) -> tuple[dict[str, Any], Limits]:
        request = render_get(self._target, "/info", api_key=self._asked.api_key, user_agent=_AGENT)
        try:
            answer = await self._exchange(request)
            told = orjson.loads(answer.body) if answer.status == 200 else {}
        except (OSError, BadAnswer, ValueError):
            told = {}
        model, limits = told.get("model") or {}, told.get("limits") or {}
        names = ("architecture", "dimensions", "max_tokens", "pooling", "normalized", "prompt")
        facts = {name: model[name] for name in names if name in model}
        facts.setdefault("max_tokens", told.get("max_input_length"))
        return facts, Limits(told.get("max_client_batch_size"), limits.get("max_body_bytes"))

    # --- texts --------------------------------------------------------------------------------------------

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """The vectors of `texts`. Raises ServerLost, NotServed."""
        if not texts:
            return Vectors(np.empty((0, self._model.dim), self._item))
        async with self.pace.turn():
            return await self._embed(texts)

    async def _embed(self, texts: Sequence[str]) -> Vectors:
        answer = await self._until_served(self._render(texts), len(texts))
        if answer.status == 200:
            if answer.num_dimensions != self._model.dim:
                raise NotServed(
                    f"the server has another model than this run began with: its vectors have {answer.num_dimensions} "
                    f"dimensions, not {self._model.dim}"
                )
            return Vectors(self._matrix(answer, len(texts), self._model.dim), {}, answer.num_tokens or 0)
        if len(texts) == 1:
            return self._rejected(_message(answer))
        middle = len(texts) // 2
        first, second = await self._embed(texts[:middle]), await self._embed(texts[middle:])
        reasons = first.reasons | {middle + index: reason for index, reason in second.reasons.items()}
        matrix = np.concatenate((first.matrix, second.matrix))
        return Vectors(matrix, reasons, first.num_tokens + second.num_tokens)

    def _rejected(self, reason: str) -> Vectors:
        return Vectors(np.full((1, self._model.dim), np.nan, self._item), {0: reason})

    def _render(self, texts: Sequence[str]) -> bytes:
        asked = self._asked
        body = {**asked.fields, "input": texts, "encoding_format": "bytes", "output_dtype": asked.dtype}
        return render_post(
            self._target, _PATH, orjson.dumps(body), api_key=asked.api_key, user_agent=_AGENT,
            headers={"x-vecd-priority": asked.priority},
        )  # fmt: skip

    def _matrix(self, answer: Answer, num_texts: int, dim: int) -> NDArray[Any]:
        """The answer's rows, which borrow its memory."""
        return np.frombuffer(answer.body, self._item).reshape(num_texts, dim)

    def _why_bad(self, answer: Answer, num_texts: int) -> str | None:
        """What is wrong with an answer of vectors."""
        if answer.num_dimensions is None:
            return "no answer of vecd's: has it the header x-vecd-dimensions?"
        if len(answer.body) != num_texts * answer.num_dimensions * self._item.itemsize:
            return f"{len(answer.body)} bytes for {num_texts} vectors of {answer.num_dimensions} dimensions"
        if not np.isfinite(np.frombuffer(answer.body, self._item)).all():
            return "vectors that are not finite"
        return None

    # --- requests -----------------------------------------------------------------------------------------

    async def _until_served(self, request: bytes, num_texts: int, *, is_probe: bool = False) -> Answer:
        """Ask until there are vectors, or what was sent is at fault. Raises ServerLost, NotServed.

        `is_probe`: a failure is never the request's own fault, because the run itself has chosen its text.
        """
        patience = _Patience(self._asked.retry_for_s)
        num_failures = 0
        while True:
            retry_after_s: float | None = None
            try:
                answer = await self._exchange(request)
                why = self._why_bad(answer, num_texts) if answer.status == 200 else _message(answer)
                if why is None or answer.status in _REFUSED:
                    self._heard()
                    return answer
                if answer.status not in _BUSY and answer.status != 200 and answer.status < 500:
                    raise NotServed(f"{self._target} answers {answer.status}: {why}")
                might_be_ours = answer.status not in _BUSY
                retry_after_s = answer.retry_after_s
            except (OSError, BadAnswer) as error:
                answer, why = None, f"{name_failure(error)}: {error}"
                might_be_ours = isinstance(error, TimeoutError | BadAnswer)
            num_failures += might_be_ours
            if num_failures >= _MAX_FAILURES and not is_probe:
                failed = answer if answer is not None and answer.status != 200 else _failure(why or "")
                if num_texts > 1 or await self._serves_probe():
                    return failed
            self.trouble = why or ""
            await self._wait(patience, why or "", retry_after_s)

    async def _serves_probe(self) -> bool:
        try:
            answer = await self._exchange(self._render([PROBE]))
        except (OSError, BadAnswer):
            return False
        return answer.status == 200 and self._why_bad(answer, 1) is None

    def _heard(self) -> None:
        self.trouble = ""
        self._answered_at = time.monotonic()

    async def _wait(self, patience: "_Patience", why: str, retry_after_s: float | None) -> None:
        """Raises ServerLost when nobody has been answered for too long."""
        if (gone := self._why_gone()) is not None:
            raise ServerLost(gone)
        silent_s = time.monotonic() - max(self._answered_at, patience.began_at)
        if silent_s >= patience.retry_for_s:
            raise ServerLost(f"{self._target} has served nothing for {silent_s:.0f} s: {why}")
        pause_s = patience.next_pause_s(retry_after_s)
        await asyncio.sleep(min(pause_s, patience.retry_for_s - silent_s))

    async def _exchange(self, request: bytes) -> Answer:
        """Send once. On a connection that the server has closed meanwhile, once more on a new one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return await self._exchange_on(connection, request)
        try:
            connection = await connect(self._target, _CONNECT_TIMEOUT_S)
        except TimeoutError as error:  # not to be taken for a request that was not answered
            raise ConnectionError(f"no connection in {_CONNECT_TIMEOUT_S:g} s") from error
        return await self._exchange_on(connection, request)

    async def _exchange_on(self, connection: ClientConnection, request: bytes) -> Answer:
        try:
            answer = await connection.exchange(request, self._asked.timeout_s)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)
        return answer


class _Patience:
    """How long to wait for the next try of one request."""

    def __init__(self, retry_for_s: float) -> None:
        self.began_at = time.monotonic()
        self.retry_for_s = retry_for_s
        self._pause_s = _FIRST_PAUSE_S

    def next_pause_s(self, retry_after_s: float | None) -> float:
        """Twice the last one, spread, so that requests that failed together do not come back together."""
        pause_s = self._pause_s * random.uniform(0.75, 1.25)
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        return pause_s if retry_after_s is None else min(max(retry_after_s, pause_s), _MAX_RETRY_AFTER_S)


def _failure(why: str) -> Answer:
    """What stands for an answer that never came."""
    return Answer(500, orjson.dumps({"error": {"message": why}}))


def _message(answer: Answer) -> str:
    """What an error says, without what it may not say in a line."""
    try:
        message = orjson.loads(answer.body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = f"status {answer.status}"
    return " ".join(str(message).split())[:500]
