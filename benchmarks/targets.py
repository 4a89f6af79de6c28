"""What is asked of vecd's engine, and against whom it is measured: the data that `benchmarks.engine` walks through.

Owns the number formats, their peers and every target. Another format is another entry. Called by `benchmarks.duels`,
`benchmarks.memory`, `benchmarks.lives` and the sections of `benchmarks.cores`.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on a ratio or, where there is nobody to compare with, on the figure itself."""

    bound: float
    is_minimum: bool
    is_of_interval: bool = False
    """A ratio meets it when its 90 % interval reaches the bound, whatever its median is."""

    def is_met_by(self, value: float, interval: tuple[float, float] | None = None) -> bool:
        if self.is_of_interval and interval is not None:
            value = interval[1] if self.is_minimum else interval[0]
        return value >= self.bound if self.is_minimum else value <= self.bound

    def __str__(self) -> str:
        return f"{'≥' if self.is_minimum else '≤'} {self.bound:g}"


def at_least(bound: float) -> Target:
    return Target(bound, is_minimum=True)


def reaching(bound: float) -> Target:
    """At least this, by the interval."""
    return Target(bound, is_minimum=True, is_of_interval=True)


def at_most(bound: float) -> Target:
    return Target(bound, is_minimum=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """One number format of vecd's, and what it is measured against."""

    peers: Mapping[str, str]
    """Name of a peer in `benchmarks.peers` → the format that it runs in."""
    linear_dtype: str | None
    """Format of the F.linear that the mixed lengths are compared with; None where torch has no such product."""
    linear_share: Target | None
    """Of the mixed lengths' FLOP/s in that product's."""
    ratios: Mapping[tuple[str, str], Target]
    """(work, peer) → what is asked of vecd's speed ÷ the peer's, on every processor."""
    mixed: Mapping[str, Target]
    """The same for mixed lengths and each of the peers, by class of processor; "" for all others."""
    geometric_mean: Target | None = None
    """Of the ratios of all works of equal lengths, to the first of the peers."""
    memory_mb: Target | None
    """Private memory of one more worker after it has worked."""

    def target(self, work: str, peer: str, processor: str) -> Target | None:
        """What is asked of vecd's speed ÷ the peer's; None where nothing is. `processor`: its class."""
        if work == "mixed":
            return self.mixed.get(processor, self.mixed.get(""))
        return self.ratios.get((work, peer))


EQUAL_LENGTHS = ((1, 12), (1, 64), (1, 200), (8, 59), (32, 12))
"""(texts, tokens of each): with equal lengths there is no padding that packing could save."""


def equal_name(num_texts: int, num_tokens: int) -> str:
    """The work's name in a contest."""
    return f"{num_texts} × {num_tokens}"


CONTESTS: Mapping[str, Contest] = {
    "float32": Contest(
        peers={"onnxruntime": "float32", "openvino": "float32", "sentence-transformers": "float32"},
        linear_dtype="float32",
        linear_share=at_least(0.78),
        ratios={
            **{(equal_name(*lengths), "onnxruntime"): at_least(0.97) for lengths in EQUAL_LENGTHS},
            ("long", "onnxruntime"): at_least(1.0),
        },
        mixed={"AVX2": at_least(1.05), "": at_least(1.10)},
        geometric_mean=at_least(1.02),
        memory_mb=at_most(70),
    ),
    # onnxruntime has no bfloat16 on processors.
    "bfloat16": Contest(
        peers={"openvino": "bfloat16"},
        linear_dtype="bfloat16",
        linear_share=at_least(0.6),
        ratios={(equal_name(1, 12), "openvino"): at_least(0.91), ("long", "openvino"): at_least(1.0)},
        mixed={"AMX": at_least(1.25), "": at_least(1.10)},
        memory_mb=at_most(90),
    ),
    "int8": Contest(
        peers={"openvino": "bfloat16", "onnxruntime": "float32"},
        linear_dtype=None,
        linear_share=None,
        ratios={},
        mixed={},
        memory_mb=None,
    ),
}

DEATH_S = at_most(0.5)
"""From the kill -9 of the only worker to the next answer."""
SECOND_START_S = at_most(0.8)
"""From exec to the first answer, less what `python -c "import onnxruntime"` takes."""
FIRST_START_S = at_most(3.0)
"""Of the bundled model, whose reference vectors come with vecd."""
WORKER_MB = at_most(15)
"""Private memory of one more worker of the bundled model at rest, in float32."""
MEMORY_MB = at_most(300)
"""Of all processes of a server of the bundled model at rest, with two workers of one thread, in float32."""
CALIBRATION = at_least(0.95)
"""Of a busy loop beside one on each other core, in the same loop alone: then the cores are free, and are cores."""
ELASTIC = {12: reaching(1.2), 64: reaching(1.4), 200: reaching(1.4)}
"""By tokens of a text: the p50 of one client with one thread per worker ÷ that with all idle cores."""
IN_PROCESS = reaching(1.0)
"""The p50 of a peer in process with all cores, plus `HTTP_MARGIN_MS`, ÷ that of one client of vecd."""
HTTP_MARGIN_MS = 1.5
AFTER_LOAD = reaching(1.0)
"""The engine's time with all cores in process, times `ENGINE_FACTOR` plus `ENGINE_MARGIN_MS`, ÷ the p50 of one client
of vecd: after a start, and after load from several sides."""
ENGINE_FACTOR, ENGINE_MARGIN_MS = 1.25, 0.8
BUSY = reaching(0.834)
"""While another program takes a core: the p95 of one client with one thread per worker ÷ vecd's, which may be 1.2 times
that."""
LEASED_PERCENT = at_most(1.0)
"""While another program takes a core: batches with more than one thread, of all."""
UNDER_LOAD = reaching(0.98)
"""64 clients: the rate ÷ that with one thread per worker, and ÷ that without a cache where no text comes twice."""
BESIDE_BULK = reaching(1.0)
"""The p99 of interactive requests with one thread per worker ÷ vecd's."""
CACHED = reaching(5.0)
"""Where 90 % of the texts come again: the rate ÷ that without a cache."""
GATEWAY = reaching(1.755)
"""Processor time of a short request in the gateway of the earlier commit ÷ in this one's, which is to be 0.57 of it."""
CLIENTS_RATIO = at_least(1.0)
"""vecd's rate over HTTP ÷ that of ONNX Runtime in process, as text-embeddings-inference uses it."""
RERANK_MIXED = reaching(2.0)
"""The rate of pairs of mixed lengths ÷ each peer's."""
RERANK_EQUAL = reaching(1.2)
"""The same where all pairs have one length, and padding costs the peers nothing."""
RERANK_BESIDE_BULK = reaching(1.0)
"""The p99 of one document beside many requests of one document ÷ that beside a request of 1,000."""
CANCELLED_PAIRS = at_most(100)
"""Computed of 1,000 after the client has left: what workers had got already."""
AS_BEFORE = reaching(1.0)
"""Several models: of one, what an earlier commit did; of two, what infinity does with the same two; of a second model,
what a server of its own costs."""
MORE_MB = at_most(15)
"""Of a server of one model than an earlier commit's."""
SEVERAL_MB_FACTOR, SEVERAL_MB_MARGIN = 1.15, 150.0
"""Of the sum of the models' weights, and on top of it, besides what workers have of their own."""
GIVEN_BACK_PERCENT = at_least(90)
"""Of what a model's loading took, by its unloading."""
OTHER_MODELS_BULK = reaching(1.0)
"""The latency of interactive requests beside bulk of their own model ÷ that beside bulk of another."""
BESIDE_QUIET = at_least(0.667)
"""The p99 in quiet stretches ÷ that while another model is disturbed, which may be 1.5 times that."""
NONE_FAILED = at_most(0)
ONE_LOAD = at_most(1)
