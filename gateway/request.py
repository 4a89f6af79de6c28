"""A request on its way through the gateway: what was asked (`EmbedRequest`), what waits (`Flow`), what has come back
(`Gathering`).

Owns the life of one request's sequences. Knows no HTTP, no JSON and no worker. Dialects make `EmbedRequest`s,
`gateway.app` makes `Gathering`s and `Flow`s, `gateway.scheduler` queues, `gateway.dispatch` delivers.
"""

import asyncio
from array import array
from collections import deque
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray

from gateway.errors import ApiError
from gateway.suspects import Deaths

if TYPE_CHECKING:
    from gateway.shares import Lane

TokenIds: TypeAlias = Union[list[int], "array[int]"]
"""Token ids as a caller sent them; large bodies' come as `array("i")`."""


class Encoding(Enum):
    """How a vector is written into an answer."""

    FLOAT = "float"
    BASE64 = "base64"
    BYTES = "bytes"
    """Raw little-endian float32 rows, no JSON around them."""
    NPY = "npy"
    """The same behind the header of a NumPy file."""


class Priority(IntEnum):
    """How soon a request wants its answer, beside others. Lower goes first."""

    INTERACTIVE = 0
    NORMAL = 1
    BULK = 2


class EmbedRequest(NamedTuple):
    """What a caller asks, whatever the dialect it was asked in."""

    inputs: list[str] | list[TokenIds]
    """At least one; texts, or token ids."""
    encoding: Encoding
    priority: Priority | None = None
    """None: the server's default."""
    timeout_s: float | None = None
    """From the request's arrival to its answer; None: the server's default."""


class TokenizedInput(NamedTuple):
    token_ids: bytes
    """int32, little-endian, shape [num_tokens], special tokens included."""
    num_tokens: int
    """At least 1."""
    is_truncated: bool


class Collector(Protocol):
    """Keeps a request's rows in the form in which they will be answered; made by `gateway.encoding`."""

    def put(self, index: int, rows: NDArray[np.float32]) -> None:
        """Take the rows (float32 [n, D], borrowed until this returns) of inputs `index` … `index + n - 1`."""


class Gathering:
    """Collects the rows of one request, in whatever order its batches finish.

    `finished` resolves when every row is there, or raises the ApiError of the first that failed. Once it is done,
    for whatever reason, the sequences still queued are abandoned and never reach a worker.
    """

    __slots__ = ("_collector", "finished", "num_missing")

    def __init__(self, num_sequences: int, collector: Collector, loop: asyncio.AbstractEventLoop) -> None:
        self.finished: asyncio.Future[None] = loop.create_future()
        self.num_missing = num_sequences
        """Rows that have not been delivered."""
        self._collector = collector

    @property
    def is_over(self) -> bool:
        """Answered, failed, or given up by its caller."""
        return self.finished.done()

    def deliver(self, index: int, rows: NDArray[np.float32]) -> None:
        """Take the rows (float32 [n, D], borrowed until this returns) of inputs `index` … `index + n - 1`."""
        if self.is_over:
            return
        self._collector.put(index, rows)
        self.num_missing -= len(rows)
        if self.num_missing == 0:
            self.finished.set_result(None)

    def fail(self, error: ApiError) -> None:
        if not self.is_over:
            self.finished.set_exception(error)

    def abandon(self) -> None:
        """Its caller has gone, or its deadline has passed."""
        self.finished.cancel()


class Flow:
    """What of one request waits for a batch, in the order of its inputs. All but `gathering` and `num_sent_tokens` is
    the scheduler's."""

    __slots__ = (
        "credit",
        "deadline",
        "gathering",
        "is_new",
        "lane",
        "num_sent_tokens",
        "num_tokens",
        "priority",
        "queue",
        "tenant",
    )

    def __init__(self, gathering: Gathering, priority: Priority, deadline: float, tenant: str) -> None:
        self.gathering = gathering
        self.priority = priority
        self.tenant = tenant
        self.deadline = deadline
        """By the clock that the scheduler is told."""
        self.queue: deque[Sequence] = deque()
        self.num_tokens = 0
        """Of the sequences in `queue`."""
        self.num_sent_tokens = 0
        """Of those that workers have, or have embedded; of what they have lost none. `gateway.dispatch` counts them."""
        self.lane: Lane | None = None
        """Where it is listed; None while nothing of it waits."""
        self.credit = 0
        """Tokens that it may still send before the others of its lane have had their turn."""
        self.is_new = True
        """Nothing of it has been queued yet."""


class Sequence:
    """One tokenized input: the unit of scheduling. Owned by the scheduler while queued, then by one batch."""

    __slots__ = ("deaths", "flow", "index", "num_tokens", "token_ids")

    def __init__(self, flow: Flow, index: int, tokenized: TokenizedInput) -> None:
        self.flow = flow
        self.index = index
        """Position among the request's inputs."""
        self.token_ids = tokenized.token_ids
        self.num_tokens = tokenized.num_tokens
        self.deaths: Deaths | None = None
        """Of the workers that had it; None while there are none."""

    @property
    def num_deaths(self) -> int:
        """How many batches it was in died with their worker."""
        return 0 if self.deaths is None else self.deaths.num

    @property
    def gathering(self) -> Gathering:
        return self.flow.gathering

    @property
    def is_abandoned(self) -> bool:
        return self.flow.gathering.is_over
