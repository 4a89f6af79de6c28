"""The gateway's record of one worker's life: its slots, and the batches that it has.

Owns the types and no rule. Written by `vecd.gateway.dispatch.dispatcher`; `vecd.gateway.dispatch.delivery` keeps the
progress of a batch whose rows it hands out.
"""

import time
from dataclasses import dataclass, field
from typing import Any

from vecd.gateway.dispatch.single_flight import Copy
from vecd.gateway.scheduling.cost_model import CostModel
from vecd.gateway.scheduling.queue import QueuedSequence
from vecd.shm.shared_metrics import ServiceKey, WorkerKey
from vecd.shm.views import SlotViews
from vecd.shm.wire import Incarnation


@dataclass(slots=True)
class InFlight:
    """A batch that a worker has, or has answered."""

    number: int
    slot: int
    sequences: list[QueuedSequence]
    num_tokens: int
    row_ends: list[int] | range
    """The end of each sequence's rows in the slot, exclusive."""
    started_at: float
    """When it was sent, or when the batch ahead of it was answered: its deadline counts from here."""
    sent_at: float
    num_threads: int = 0
    """Cores that were leased to it; 0 where the worker's threads are fixed."""
    charged_s: float = 0.0
    """Predicted seconds × cores that its model was charged for; 0 while there is one model."""
    answered_at: float = 0.0
    num_encoded: int = 0
    """Rows that have been handed to their requests; beyond `num_rows`, copies."""
    copies: list[Copy] = field(default_factory=list)
    """Sequences that get a copy of another's row, once the batch has been answered."""

    @property
    def num_rows(self) -> int:
        return self.row_ends[-1]


@dataclass(slots=True)
class WorkerLink:
    """The gateway's record of one incarnation."""

    service: ServiceKey
    incarnation: Incarnation
    slots: SlotViews
    facts: dict[str, Any]
    cost_model: CostModel
    """How fast it is; learned from its own batches, beginning with what was known of the others."""
    free_slots: list[int] = field(default_factory=list)
    in_flight: dict[int, InFlight] = field(default_factory=dict)
    """By batch number, oldest first: a worker takes batches in the order in which they were sent."""
    is_connected: bool = False
    """It has answered this gateway's probe."""
    is_stuck: bool = False
    """It has let a deadline pass, or has broken the protocol; the supervisor has been told and will kill it."""
    has_answered: bool = False
    """It has done a batch."""
    thread_choices: tuple[int, ...] = ()
    """The numbers of threads that it can compute a batch with, the least first; fewer than two if there is no choice,
    and batches are then sent without a number."""
    leased: int = 0
    """Cores that its batch in flight has."""
    num_failures: int = 0
    """Batches of one sequence that it has failed on since its last success."""
    up_at: float = field(default_factory=time.monotonic)

    @property
    def fewest_threads(self) -> int:
        """What a batch is sent with that gets no other core; 0 where there is no choice."""
        return self.thread_choices[0] if len(self.thread_choices) > 1 else 0

    @property
    def key(self) -> WorkerKey:
        return WorkerKey(self.service, self.incarnation)

    @property
    def is_usable(self) -> bool:
        return self.is_connected and not self.is_stuck

    @property
    def is_idle(self) -> bool:
        return self.is_usable and not self.in_flight and bool(self.free_slots)
