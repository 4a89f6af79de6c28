"""What is asked of vecd's engine, and against whom it is measured: the data that `benchmarks.engine` walks through.

Owns the number formats, their peers and every target. Another format is another entry. Called by `benchmarks.duels`,
`benchmarks.memory` and `benchmarks.lives`.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on a ratio or, where there is nobody to compare with, on the figure itself."""

    bound: float
    is_minimum: bool

    def is_met_by(self, value: float) -> bool:
        return value >= self.bound if self.is_minimum else value <= self.bound

    def __str__(self) -> str:
        return f"{'≥' if self.is_minimum else '≤'} {self.bound:g}"


def at_least(bound: float) -> Target:
    return Target(bound, is_minimum=True)


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
    """(work, peer) → what is asked of vecd ÷ peer: of tokens/s, for "single" of milliseconds."""
    memory_mb: Target | None
    """Private memory of one more worker."""


CONTESTS: Mapping[str, Contest] = {
    "float32": Contest(
        peers={"onnxruntime": "float32", "openvino": "float32", "sentence-transformers": "float32"},
        linear_dtype="float32",
        linear_share=at_least(0.78),
        ratios={
            ("mixed", "onnxruntime"): at_least(1.05),
            ("single", "onnxruntime"): at_most(1.1),
            ("long", "onnxruntime"): at_least(1.0),
        },
        memory_mb=at_most(70),
    ),
    # onnxruntime has no bfloat16 on processors.
    "bfloat16": Contest(
        peers={"openvino": "bfloat16"},
        linear_dtype="bfloat16",
        linear_share=at_least(0.6),
        ratios={
            ("mixed", "openvino"): at_least(1.25),
            ("single", "openvino"): at_most(1.1),
            ("long", "openvino"): at_least(1.0),
        },
        memory_mb=at_most(90),
    ),
    "int8": Contest(
        peers={"openvino": "bfloat16", "onnxruntime": "float32"},
        linear_dtype=None,
        linear_share=None,
        ratios={},
        memory_mb=None,
    ),
}

DEATH_S = at_most(0.5)
"""From the kill -9 of the only worker to the next answer."""
START_RATIO = at_most(2.0)
"""Of a second start, up to its first answer, to `python -c "import torch"`."""
