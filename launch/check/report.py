"""What `vecd check` has found, as data: JSON for programs (`to_json`), text for people (`vecd.launch.check.text`).

Owns the shapes and nothing else: reads nothing, measures nothing, decides nothing. Filled by
`vecd.launch.check.machine`, `vecd.launch.check.model`, `vecd.launch.check.measure` and `vecd.launch.check.advice`.
"""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Machine:
    """What a server could use of it."""

    processor: str
    """The model's name, as the kernel has it."""
    num_cores: int
    """Logical ones that are online."""
    num_usable_cores: int
    """Of them, those that this process may use: by affinity and by its cgroup's quota."""
    num_usable_physical_cores: int
    """The same, where two threads of a core count as one."""
    quota_cores: float | None
    """Of the cgroup; None without one."""
    flags: tuple[str, ...]
    """Instruction sets that make a difference here, of `vecd.launch.check.machine.FLAGS`."""
    memory_mb: int
    available_mb: int
    """That new processes can have: of the machine, and of the cgroup if that is less."""
    memory_limit_mb: int | None
    """Of the cgroup; None without one."""
    gpus: tuple[str, ...]
    kernel: str
    python: str


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    folder: str
    model_type: str
    architecture: str
    """The class that config.json names; empty where it names none."""
    dim: int
    hidden_size: int
    max_tokens: int
    pooling: tuple[str, ...]
    steps: tuple[str, ...]
    """Modules behind the pooling, in words."""
    is_normalized: bool
    prompts: dict[str, str]
    default_prompt: str
    is_matryoshka: bool
    matryoshka_dims: tuple[int, ...]
    vocab_size: int
    num_parameters: int
    weights_bytes: int
    weights_dtypes: tuple[str, ...]
    """Types in the files, that of most parameters first."""
    tokenizer: str
    """Which files it is of."""


@dataclass(frozen=True, slots=True)
class Parity:
    """Of the served vectors with others of the same texts."""

    against: str
    num_texts: int
    longest_tokens: int
    min_cosine: float
    max_abs_diff: float
    is_within_bounds: bool
    by_length: tuple[dict[str, Any], ...]
    """The first four figures for each class of lengths."""


@dataclass(frozen=True, slots=True)
class Path:
    """How the model would be run, and why so."""

    path: str
    dtype: str
    device: str
    attention: str
    reasons: tuple[str, ...]
    refused: tuple[str, ...]
    """What was tried before, and why it is not used."""
    probes: dict[str, Any]
    """Agreement with the plain model on random probes, as at the start of a server."""
    is_remembered: bool
    """Chosen at an earlier start, or check."""
    choosing_s: float
    """How long choosing took; 0 where it was remembered."""
    load_s: float
    """From the start of the process until the engine is warm, without choosing."""
    shared_mb: int
    """Memory of the process that workers are forked from."""
    agreements: tuple[Parity, ...] = ()
    not_compared: tuple[str, ...] = ()
    """With whom not, and why."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one worker; the median of several turns."""

    dtype: str
    path: str
    text_tokens: int
    batch_tokens: int
    tokens_per_s: float
    lowest: float
    highest: float
    private_mb: int
    """The most memory that the worker had for itself."""
    core_share: float = 1.0
    """Of a core, how much it had; less than 1 where other programs wanted it, too."""

    @property
    def undisturbed_tokens_per_s(self) -> float:
        """What it would be with the core for itself: tokens a second of processor time."""
        return self.tokens_per_s / min(1.0, max(0.01, self.core_share))

    @property
    def texts_per_s(self) -> float:
        return self.undisturbed_tokens_per_s / self.text_tokens


@dataclass(frozen=True, slots=True)
class Scaling:
    """Of several workers at once, with the chosen dtype."""

    num_workers: int
    tokens_per_s: float
    """Of all together."""
    core_share: float = 1.0
    """The least that one of them had."""


@dataclass(frozen=True, slots=True)
class Measurements:
    speeds: tuple[Speed, ...] = ()
    scaling: tuple[Scaling, ...] = ()
    not_measured: dict[str, str] = field(default_factory=dict)
    """dtype → why."""
    agreements: dict[str, dict[str, Any]] = field(default_factory=dict)
    """dtype → agreement with the plain model on random probes, of those that were measured."""
    num_rounds: int = 0
    turn_s: float = 0.0

    @property
    def core_share(self) -> float:
        """What workers had of their cores, at worst; 1 where nothing was measured."""
        shares = [speed.core_share for speed in self.speeds] + [scaling.core_share for scaling in self.scaling]
        return min(shares, default=1.0)


@dataclass(frozen=True, slots=True)
class Setting:
    """One that is recommended."""

    name: str
    """With underscores, as in a TOML file."""
    value: str | int
    reason: str


@dataclass(frozen=True, slots=True)
class Advice:
    settings: tuple[Setting, ...]
    notes: tuple[str, ...]
    """What else to know: other choices, and what does not fit."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why the model cannot be served, or should not be."""

    what: str
    suggestion: str


@dataclass(slots=True)
class Report:
    """Filled from above to below; what comes after a problem is missing."""

    version: str
    machine: Machine
    model: Model | None = None
    path: Path | None = None
    measurements: Measurements | None = None
    advice: Advice | None = None
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"is_servable": not self.problems, **asdict(self)}
