"""A request on its way through the gateway: what was asked (`EmbedRequest`), and what has come back (`Gathering`).

Owns the life of one request's sequences. Knows no HTTP, no JSON and no queue. Dialects make `EmbedRequest`s,
`gateway.app` makes `Gathering`s, `gateway.dispatch` delivers into them.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from gateway.errors import ApiError


class Encoding(Enum):
    """How a vector is written into an answer."""

    FLOAT = "float"
    BASE64 = "base64"


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """What a caller asks, whatever the dialect it was asked in."""

    inputs: list[str] | list[list[int]]
    """At least one; texts, or token ids."""
    encoding: Encoding


@dataclass(frozen=True, slots=True)
class TokenizedInput:
    token_ids: bytes
    """int32, little-endian, shape [num_tokens], special tokens included."""
    num_tokens: int
    """At least 1."""
    is_truncated: bool


EncodeRow = Callable[[NDArray[np.float32]], bytes]


class Gathering:
    """Collects the rows of one request, in whatever order its batches finish, as fragments of its answer.

    `finished` resolves when every row is there, or raises the ApiError of the first that failed. Once it is done,
    for whatever reason, the sequences still queued are abandoned and never reach a worker.
    """

    __slots__ = ("_encode_row", "finished", "fragments", "num_missing")

    def __init__(self, num_sequences: int, encode_row: EncodeRow, loop: asyncio.AbstractEventLoop) -> None:
        self.fragments: list[bytes] = [b""] * num_sequences
        self.finished: asyncio.Future[None] = loop.create_future()
        self.num_missing = num_sequences
        """Rows that have not been delivered."""
        self._encode_row = encode_row

    @property
    def is_over(self) -> bool:
        """Answered, failed, or given up by its caller."""
        return self.finished.done()

    def deliver(self, index: int, row: NDArray[np.float32]) -> None:
        """Encode `row` (float32 [D], borrowed until this returns) as the answer to input `index`."""
        if self.is_over:
            return
        self.fragments[index] = self._encode_row(row)
        self.num_missing -= 1
        if self.num_missing == 0:
            self.finished.set_result(None)

    def fail(self, error: ApiError) -> None:
        if not self.is_over:
            self.finished.set_exception(error)

    def abandon(self) -> None:
        """Its caller has gone, or its deadline has passed."""
        self.finished.cancel()


class Sequence:
    """One tokenized input: the unit of scheduling. Owned by the scheduler while queued, then by one batch."""

    __slots__ = ("gathering", "index", "must_run_alone", "num_deaths", "num_tokens", "token_ids")

    def __init__(self, gathering: Gathering, index: int, tokenized: TokenizedInput) -> None:
        self.gathering = gathering
        self.index = index
        """Position among the request's inputs."""
        self.token_ids = tokenized.token_ids
        self.num_tokens = tokenized.num_tokens
        self.num_deaths = 0
        """How many batches it was in died with their worker."""
        self.must_run_alone = False
        """Suspected of harming its batch."""

    @property
    def is_abandoned(self) -> bool:
        return self.gathering.is_over
