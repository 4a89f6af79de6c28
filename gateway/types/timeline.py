"""What is known of one HTTP request when it is over: where it went, what it held, where its time went.

Owns the record. Whoever handles a request notes on it what happens and when, and decides nothing by it; nothing that
the caller sent is on it, but numbers and the ids of its trace. `vecd.gateway.telemetry.on_finished` reads it once the
request is over. Instants are by `time.monotonic`; 0.0 is one that never came.
"""

from typing import NamedTuple

IS_SAMPLED = 0x01
"""The only flag of `traceparent` that decides anything here: https://www.w3.org/TR/trace-context/."""


class Trace(NamedTuple):
    """The trace that a request belongs to."""

    trace_id: str
    """32 lower-case hexadecimal digits."""
    parent_id: str
    """The caller's span, 16 digits; "" where the trace begins here."""
    flags: int
    state: str = ""
    """The header `tracestate`, as it came."""

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & IS_SAMPLED)


class Durations(NamedTuple):
    """Where the time of an embedding request went; as `vecd.shm.shared_metrics.Histogram` has its stages, and in that
    order."""

    parse_s: float
    tokenize_s: float
    queue_s: float
    compute_s: float
    encode_s: float
    total_s: float


class BatchShare(NamedTuple):
    """A batch that a request had something in."""

    worker: int
    number: int
    sent_at: float
    """By `time.monotonic`, as the next."""
    done_at: float
    compute_us: int
    """By the worker's own clock."""
    num_sequences: int
    """Of the whole batch, as the next."""
    num_tokens: int


class RequestTimeline:
    """Made with its request. Costs 0.3 µs."""

    __slots__ = (
        "arrived_at",
        "batches",
        "done_at",
        "endpoint",
        "entered_at",
        "error",
        "num_inputs",
        "num_tokens",
        "parsed_at",
        "principal",
        "sent_at",
        "started_at",
        "tokenized_at",
        "trace",
    )

    def __init__(self) -> None:
        self.endpoint = 0
        """Where it goes: an index of `vecd.gateway.api.registry.ENDPOINTS`."""
        self.principal = ""
        """The name of the key that it came with; "" without one."""
        self.error = ""
        """The code, or else the type, of the error that it was answered with."""
        self.num_inputs = 0
        """Of an embedding request that was read; otherwise 0."""
        self.num_tokens = 0
        """Of those that were tokenized."""
        self.started_at = 0.0
        """It was complete, and its turn on its connection."""
        self.arrived_at = 0.0
        """Its handler began."""
        self.parsed_at = 0.0
        """Its body was understood."""
        self.entered_at = 0.0
        """It was let in at the door."""
        self.tokenized_at = 0.0
        """All of it was."""
        self.sent_at = 0.0
        """The first of it went to a worker."""
        self.done_at = 0.0
        """The last of its batches was answered. Whatever has this has all of the above."""
        self.batches: list[BatchShare] | None = None
        """Of a request that is traced."""
        self.trace: Trace | None = None
        """The trace that it belongs to, where `vecd.gateway.telemetry.tracing` has looked."""

    @property
    def is_embedded(self) -> bool:
        """All its rows came."""
        return self.done_at > 0.0

    def durations(self, finished_at: float) -> Durations:
        """Of one that `is_embedded`."""
        at_the_door_s = self.entered_at - self.parsed_at
        return Durations(
            self.parsed_at - self.arrived_at,
            self.tokenized_at - self.entered_at,
            at_the_door_s + max(0.0, self.sent_at - self.tokenized_at),
            self.done_at - self.sent_at,
            finished_at - self.done_at,
            finished_at - self.arrived_at,
        )
