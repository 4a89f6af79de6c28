"""What of the requests waits: sequences, in a queue for each request.

Owns the types and no rule. Made by `vecd.gateway.pipeline`, queued by `vecd.gateway.scheduling.scheduler`.
"""

from collections import deque
from typing import TYPE_CHECKING

from vecd.gateway.encoding.pending import ChunkedInput, PendingResult
from vecd.gateway.scheduling.deaths import Deaths
from vecd.gateway.types.request import Chunk, Priority, TokenizedInput
from vecd.gateway.types.timeline import BatchShare
from vecd.shm.output import Output

if TYPE_CHECKING:
    from vecd.gateway.scheduling.fair_queue import TenantQueue


class Lane:
    """Flows of one tenant that are served in turns."""

    __slots__ = ("num_flows", "num_tokens", "request_queues", "share")

    def __init__(self, share: "TenantQueue") -> None:
        self.share = share
        self.request_queues: deque[RequestQueue] = deque()
        """The next one first. One that is over may still stand here, without its `lane`."""
        self.num_flows = 0
        self.num_tokens = 0


class RequestQueue:
    """What of one request waits for a batch, in the order of its inputs. All but `gathering`, and what the dispatcher
    notes, is the scheduler's."""

    __slots__ = (
        "batches",
        "credit",
        "deadline",
        "first_sent_at",
        "is_new",
        "lane",
        "last_done_at",
        "num_sent_tokens",
        "num_tokens",
        "pending",
        "priority",
        "queue",
        "tenant",
        "waits_since",
    )

    def __init__(self, pending: PendingResult, priority: Priority, deadline: float, tenant: str) -> None:
        self.pending = pending
        self.priority = priority
        self.tenant = tenant
        self.deadline = deadline
        """By the clock that the scheduler is told."""
        self.queue: deque[QueuedSequence] = deque()
        self.num_tokens = 0
        """Of the sequences in `queue`."""
        self.num_sent_tokens = 0
        """Of those that workers have, or have embedded; of what they have lost none. `vecd.gateway.dispatch.dispatcher`
        counts them."""
        self.lane: Lane | None = None
        """Where it is listed; None while nothing of it waits."""
        self.credit = 0
        """Tokens that it may still send before the others of its lane have had their turn."""
        self.is_new = True
        """Nothing of it has been queued yet."""
        self.first_sent_at: float | None = None
        """When the first of it went to a worker; `vecd.gateway.dispatch.dispatcher` notes it."""
        self.last_done_at = 0.0
        """When the newest of its batches was answered; `vecd.gateway.dispatch.dispatcher` notes it, as the next."""
        self.batches: list[BatchShare] | None = None
        """Its batches, where somebody wants to know."""
        self.waits_since = 0.0
        """When something of it was queued that none of it waited before."""


class QueuedSequence:
    """One tokenized input: the unit of scheduling. Owned by the scheduler while queued, then by one batch."""

    __slots__ = ("chunked", "deaths", "index", "num_tokens", "output", "request_queue", "token_ids", "weight")

    def __init__(
        self,
        request_queue: RequestQueue,
        index: int,
        tokenized: TokenizedInput | Chunk,
        output: Output = Output.VECTORS,
        chunked: ChunkedInput | None = None,
    ) -> None:
        """`chunked`: what the sequence is a chunk of, if it is one."""
        self.request_queue = request_queue
        self.index = index
        """Position of its input among the request's."""
        self.token_ids = tokenized.token_ids
        self.num_tokens = tokenized.num_tokens
        self.output = output
        self.chunked = chunked
        self.weight = tokenized.weight if isinstance(tokenized, Chunk) else 0
        """Of its row in the mean of its input's."""
        self.deaths: Deaths | None = None
        """Of the workers that had it; None while there are none."""

    @property
    def num_rows(self) -> int:
        """What it takes of a slot."""
        return self.output.num_rows(self.num_tokens)

    @property
    def is_plain(self) -> bool:
        """Its one row is its input's."""
        return self.chunked is None and not self.output.is_per_token

    @property
    def num_deaths(self) -> int:
        """How many batches it was in died with their worker."""
        return 0 if self.deaths is None else self.deaths.num

    @property
    def pending(self) -> PendingResult:
        return self.request_queue.pending

    @property
    def is_abandoned(self) -> bool:
        return self.request_queue.pending.is_over
