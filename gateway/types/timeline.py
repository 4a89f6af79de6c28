"""The timeline of one HTTP request: its endpoint, its size, and when each stage of it was reached.

Owns the type. The code that handles a request notes what happens and when, and decides nothing by it; it also takes
along how the response gets room. It has nothing that the client sent, but numbers and the ids of its trace.
`vecd.gateway.telemetry.on_finished` reads it once the request is finished. Instants are by `time.monotonic`; 0.0 stands
for one that was not reached.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

IS_SAMPLED = 0x01
"""The only flag of `traceparent` with an effect here. Source: https://www.w3.org/TR/trace-context/."""


class Trace(NamedTuple):
    """The trace that a request belongs to."""

    trace_id: str
    """32 lower-case hexadecimal digits."""
    parent_id: str
    """The client's span, 16 digits; "" where the trace begins here."""
    flags: int
    state: str = ""
    """The header `tracestate`, as it was received."""

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & IS_SAMPLED)


class Durations(NamedTuple):
    """The time of each stage of an embedding request, and of all. Each field has a member of
    `vecd.shm.shared_metrics.Histogram` with its name."""

    parse_s: float
    tokenize_s: float
    queue_s: float
    compute_s: float
    encode_s: float
    total_s: float


class BatchShare(NamedTuple):
    """A batch with sequences of a request."""

    worker: int
    number: int
    sent_at: float
    """By `time.monotonic`, as the next."""
    done_at: float
    compute_us: int
    """By the worker's own clock."""
    num_sequences: int
    """In the whole batch, as the next."""
    num_tokens: int


class RequestTimeline:
    """Made with its request, in 0.1 µs: what is not noted has the value here."""

    endpoint = 0
    """The index of its endpoint in `vecd.gateway.api.registry.ENDPOINTS`."""
    principal = ""
    """The name of the request's key; "" without one."""
    model = ""
    """The name of the model that it is for, where several are served and it is known."""
    error = ""
    """The code, or else the type, of the error in the response."""
    num_inputs = 0
    """Of an embedding request whose body was parsed; otherwise 0."""
    num_tokens = 0
    """Of the inputs that were tokenized."""
    started_at = 0.0
    """The request was complete, and the requests before it on its connection were answered."""
    arrived_at = 0.0
    """Its handler began."""
    parsed_at = 0.0
    """Its body was parsed."""
    entered_at = 0.0
    """It was admitted."""
    tokenized_at = 0.0
    """All its inputs were tokenized."""
    sent_at = 0.0
    """Its first batch was sent to a worker."""
    done_at = 0.0
    """The worker's reply to its last batch was received. Then all of the above are set."""
    batches: list[BatchShare] | None = None
    """Its batches, if it is traced."""
    trace: Trace | None = None
    """The trace that it belongs to, set by `vecd.gateway.telemetry.tracing`."""

    take_room: Callable[[int, int], asyncio.Future[None] | None] | None = None
    """Takes room for a response of so many bytes, before it is made; returns what to await if there is none yet, which
    raises TooManyRequests if too many bytes of requests wait. The second number: of the inputs. Set by the
    connection."""

    @property
    def is_embedded(self) -> bool:
        """Whether all its rows were received."""
        return self.done_at > 0.0

    def durations(self, finished_at: float) -> Durations:
        """The durations of a request that `is_embedded` and finished at `finished_at`."""
        admission_s = self.entered_at - self.parsed_at
        return Durations(
            self.parsed_at - self.arrived_at,
            self.tokenized_at - self.entered_at,
            admission_s + max(0.0, self.sent_at - self.tokenized_at),
            self.done_at - self.sent_at,
            finished_at - self.done_at,
            finished_at - self.arrived_at,
        )
