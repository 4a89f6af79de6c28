"""The report of `vecd check` as data: `to_json` is its JSON, `vecd.launch.check.text` its text.

Owns the shapes and nothing else. Filled by `vecd.launch.check.machine`, `vecd.launch.check.model`,
`vecd.launch.check.advice` and, from another process, by `vecd.workers.check.run`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import TypeAdapter


@dataclass(frozen=True, slots=True)
class Machine:
    """The parts of the machine that a server could use."""

    processor: str
    """The model's name."""
    num_cores: int
    """Logical cores."""
    num_usable_cores: int
    """The logical cores that this process may use, by affinity and by its cgroup's quota."""
    num_usable_physical_cores: int
    """The same, where two threads of one core count once."""
    quota_cores: float | None
    """The cgroup's; None without one."""
    flags: tuple[str, ...]
    """Keys of `vecd.launch.check.machine.FLAGS`."""
    memory_mb: int
    available_mb: int
    """For new processes: the machine's, or the cgroup's if that is less."""
    memory_limit_mb: int | None
    """The cgroup's; None without one."""
    gpus: tuple[str, ...]
    kernel: str
    python: str


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    folder: str
    model_type: str
    architecture: str
    """The class that config.json names; may be empty."""
    dim: int
    """Of dense vectors; else the width of the main output."""
    hidden_size: int
    max_tokens: int
    pooling: tuple[str, ...]
    """Of dense vectors."""
    steps: tuple[str, ...]
    """The modules behind the pooling, in words."""
    is_normalized: bool
    prompts: dict[str, str]
    default_prompt: str
    is_matryoshka: bool
    matryoshka_dims: tuple[int, ...]
    vocab_size: int
    num_parameters: int
    weights_bytes: int
    weights_dtypes: tuple[str, ...]
    """Types in the files, the one with most parameters first."""
    tokenizer: str
    """Its file, or the files that it is converted from."""
    capabilities: tuple[str, ...] = ("dense",)
    labels: tuple[str, ...] = ()
    token_dim: int = 0
    """Of the vectors of tokens."""
    assumption: str = ""
    """As of the model's card."""
    truncate_dim: int = 0
    """Dimensions for a request that does not say how many; 0: all."""
    heads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What is behind the transformer besides a dense vector: "score", "sparse" or "tokens" → its steps, in words."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is served against others' of the same texts."""

    against: str
    num_texts: int
    longest_tokens: int
    min_cosine: float | None
    """None for scores, which have no direction."""
    max_abs_diff: float
    is_within_bounds: bool
    by_length: Sequence[dict[str, Any]]
    """num_texts, longest_tokens and the figures for each class of lengths."""
    relative_diff: float | None = None
    """Of scores alone, like the next; see `vecd.workers.engines.parity.Parity`."""
    same_order: float | None = None


@dataclass(frozen=True, slots=True)
class Path:
    """How the model would be run, and why."""

    path: str
    dtype: str
    device: str
    attention: str
    reasons: Sequence[str]
    refused: Sequence[str]
    """The paths and dtypes that were tried before, and why they are not used."""
    probes: dict[str, Any]
    """Parity with the reference model on random probes, as at the start of a server."""
    is_remembered: bool
    """Selected at an earlier start, or by an earlier check."""
    choosing_s: float
    """The time of the selection; 0 if it was remembered."""
    load_s: float
    """From the start of the process until the engine is warm, without the selection."""
    shared_mb: int
    """Memory of the process that workers are forked from."""
    agreements: tuple[Comparison, ...] = ()
    outputs: str = "vectors"
    """What is compared, in words: vectors, scores or sparse weights."""
    ranks_in_order: bool | None = None
    """Of a reranker with a template: whether the answer to a plain question has a higher score than another text."""
    not_compared: tuple[str, ...] = ()
    """The missing comparisons, and why."""


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of one worker, or of several at once; the median of several turns."""

    dtype: str
    path: str
    text_tokens: int
    batch_tokens: int
    tokens_per_s: float
    """Of all workers together."""
    lowest: float
    highest: float
    private_mb: int
    """The most memory that a worker had for itself."""
    core_share: float = 1.0
    """The share of a core that a worker had, the smallest of several; less than 1 if other programs used it, too."""
    num_workers: int = 1
    texts_per_s: float = 0.0
    """Of all workers together; of a reranker, pairs."""

    @property
    def undisturbed_tokens_per_s(self) -> float:
        """Tokens per second of processor time: the speed with the core for itself."""
        return self.tokens_per_s / min(1.0, max(0.01, self.core_share))

    @property
    def undisturbed_texts_per_s(self) -> float:
        return self.undisturbed_tokens_per_s / self.text_tokens


@dataclass(frozen=True, slots=True)
class Measurements:
    speeds: tuple[Speed, ...] = ()
    """Of one worker, with each dtype."""
    scaling: tuple[Speed, ...] = ()
    """Of one and of several workers, with the selected dtype; empty if several were not measured."""
    not_measured: dict[str, str] = field(default_factory=dict)
    """dtype → why."""
    agreements: dict[str, dict[str, Any]] = field(default_factory=dict)
    """dtype → parity with the reference model on random probes, for the measured dtypes."""
    num_rounds: int = 0
    turn_s: float = 0.0

    @property
    def core_share(self) -> float:
        """The smallest share of a core that a worker had; 1 if nothing was measured."""
        return min((speed.core_share for speed in (*self.speeds, *self.scaling)), default=1.0)


@dataclass(frozen=True, slots=True)
class Setting:
    """A recommended setting."""

    name: str
    """With underscores, as in a TOML file."""
    value: str | int
    reason: str


@dataclass(frozen=True, slots=True)
class Advice:
    settings: tuple[Setting, ...]
    notes: tuple[str, ...]
    """Other possibilities, and what does not fit."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason not to serve the model."""

    what: str
    suggestion: str


@dataclass(slots=True)
class Report:
    """Filled from top to bottom; the parts after a problem are missing."""

    version: str
    machine: Machine
    model: Model | None = None
    path: Path | None = None
    measurements: Measurements | None = None
    advice: Advice | None = None
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    reference_file: str | None = None
    """The written reference vectors; None if they were not requested, or the vectors are not right."""

    def add(self, name: str, value: Any) -> None:
        """Add a part that `vecd.workers.check.run` has found, as JSON values."""
        setattr(self, name, _FOUND_PARTS[name].validate_python(value))

    def to_json(self) -> dict[str, Any]:
        return {"is_servable": not self.problems, **asdict(self)}


_FOUND_PARTS: dict[str, TypeAdapter[Any]] = {
    "path": TypeAdapter(Path),
    "reference_file": TypeAdapter(str),
    "measurements": TypeAdapter(Measurements),
}
