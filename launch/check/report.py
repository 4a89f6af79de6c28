"""The report of `vecd check`: its data, its JSON (`to_json`), and its text (`render`). Pure."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import TypeAdapter

from vecd.base.files import JsonObject
from vecd.launch.memory import as_table


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    folder: str
    model_type: str
    architecture: str
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
    capabilities: tuple[str, ...] = ("dense",)
    labels: tuple[str, ...] = ()
    token_dim: int = 0
    """Of the vectors of tokens."""
    assumption: str = ""
    """As of the model's card."""
    truncate_dim: int = 0
    """Dimensions for a request that does not say how many; 0: all."""
    heads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Beside a dense vector: "score", "sparse" or "tokens" → its steps, in words."""


@dataclass(frozen=True, slots=True)
class Comparison:
    against: str
    num_texts: int
    longest_tokens: int
    min_cosine: float | None
    """None for scores, which have no direction."""
    max_abs_diff: float
    is_within_bounds: bool
    by_length: Sequence[JsonObject]
    """num_texts, longest_tokens and the figures for each class of lengths."""
    relative_diff: float | None = None
    """Of scores alone, like the next; see `vecd.workers.parity.Parity`."""
    same_order: float | None = None


@dataclass(frozen=True, slots=True)
class Path:
    path: str
    dtype: str
    device: str
    attention: str
    reasons: Sequence[str]
    refused: Sequence[str]
    """The paths and dtypes that were tried before, and why they are not used."""
    probes: JsonObject
    """Parity with the reference model on random probes."""
    is_remembered: bool
    """Selected at an earlier start, or by an earlier check."""
    choosing_s: float
    """0 if it was remembered."""
    load_s: float
    """From the start of the process until the engine is warm, without the selection."""
    shared_mb: int
    agreements: tuple[Comparison, ...] = ()
    outputs: str = "vectors"
    """What is compared, in words: vectors, scores or sparse weights."""
    ranks_in_order: bool | None = None
    """Of a reranker with a template: whether the answer to a plain question has a higher score than another text."""
    not_compared: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of one worker: the median of several turns."""

    dtype: str
    path: str
    text_tokens: int
    batch_tokens: int
    tokens_per_s: float
    lowest: float
    highest: float
    private_mb: int
    core_share: float = 1.0
    """The share of a core that the worker had; less than 1 if other programs used it, too."""
    texts_per_s: float = 0.0
    """Of a reranker, pairs."""


@dataclass(frozen=True, slots=True)
class Measurements:
    speeds: tuple[Speed, ...] = ()
    not_measured: dict[str, str] = field(default_factory=dict)
    """dtype → why."""
    agreements: dict[str, JsonObject] = field(default_factory=dict)
    """dtype → parity with the reference model on random probes, for the measured dtypes."""
    num_rounds: int = 0
    turn_s: float = 0.0

    @property
    def core_share(self) -> float:
        """The smallest; 1 if nothing was measured."""
        return min((speed.core_share for speed in self.speeds), default=1.0)


@dataclass(frozen=True, slots=True)
class Problem:
    what: str
    suggestion: str


@dataclass(slots=True)
class Report:
    """Filled from top to bottom; the parts after a problem are missing."""

    version: str
    model: Model | None = None
    path: Path | None = None
    measurements: Measurements | None = None
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    reference_file: str | None = None
    """The written reference vectors; None if they were not requested, or the vectors are not right."""

    def add(self, name: str, value: Any) -> None:
        """Add a part that `vecd.workers.check.run` has found, as JSON values."""
        setattr(self, name, _FOUND_PARTS[name].validate_python(value))

    def to_json(self) -> JsonObject:
        return {"is_servable": not self.problems, **asdict(self)}


_FOUND_PARTS: dict[str, TypeAdapter[Any]] = {
    "path": TypeAdapter(Path),
    "reference_file": TypeAdapter(str),
    "measurements": TypeAdapter(Measurements),
}


# --- as text ----------------------------------------------------------------------------------------------------

_WIDTH, _LABEL, _MAX_VALUES = 118, 18, 8


def render(report: Report) -> str:
    lines: list[str] = []
    for part in (report.model, report.path):
        if part is not None:
            facts = {name: value for name, value in asdict(part).items() if value or value is False}
            lines += [type(part).__name__, *(_fact(*fact) for fact in facts.items() if fact[0] not in _SHOWN_APART), ""]
    if report.path is not None:
        lines += ["Parity", *_parity(report.path), ""]
    if report.measurements is not None:
        lines += ["Speed of one worker", *_speeds(report.measurements), ""]
    lines += [_wrapped(f"warning: {warning}") for warning in report.warnings]
    for problem in report.problems:
        lines += [_wrapped(f"problem: {problem.what}"), _wrapped(f"do this: {problem.suggestion}")]
    if report.reference_file is not None:
        lines.append(f"reference vectors: written to {report.reference_file}")
    return "\n".join([*lines, *([] if report.problems else ["This model can be served."])])


def render_all(reports: Mapping[str, Report]) -> str:
    """What the reports of several models come to, by the names of the models."""
    rows = [("model", "kind", "selected", "memory", "result")]
    for name, report in reports.items():
        kind = ", ".join(report.model.capabilities) if report.model is not None else "-"
        path, warned = report.path, f", warnings: {len(report.warnings)}" if report.warnings else ""
        result = textwrap.shorten(f"problem: {report.problems[0].what}", 60) if report.problems else "right" + warned
        selected = ("-", "-") if path is None else (f"{path.path}, {path.dtype}", f"{path.shared_mb:,} MB")
        rows.append((name, kind, *selected, result))
    failed = [name for name, report in reports.items() if report.problems]
    result = f"{len(failed)} of {len(reports)} models cannot be served: {', '.join(failed)}"
    return "\n".join(["Models", *_table(rows), "", result if failed else "All models can be served."])


_SHOWN_APART = ("agreements", "not_compared")


def _fact(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        words = [f"{key} {_short(each) if isinstance(each, float) else repr(each)}" for key, each in value.items()]
    else:
        words = list(map(_short, value)) if isinstance(value, list | tuple) else [_short(value)]
    more = [f"and {len(words) - _MAX_VALUES} more"] if len(words) > _MAX_VALUES else []
    return _wrapped(f"  {name.replace('_', ' '):{_LABEL}}{'; '.join([*words[:_MAX_VALUES], *more])}", _LABEL + 2)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _wrapped(text: str, indent: int = 9) -> str:
    return textwrap.fill(
        text, _WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False,
        drop_whitespace=True, replace_whitespace=False,
    )  # fmt: skip


def _parity(path: Path) -> Iterator[str]:
    rows = [("", "texts", "tokens", "cosine or same order", "largest difference")]
    for found in path.agreements:
        for row in found.by_length:
            close = f"{row['same_order']:.1%}" if row.get("min_cosine") is None else f"{row['min_cosine']:.8f}"
            rows.append((f"with {found.against}", f"{row['num_texts']}", f"≤ {row['longest_tokens']}", close,
                         f"{row['max_abs_diff']:.1e}"))  # fmt: skip
        verdict = "agrees" if found.is_within_bounds else "DISAGREES"
        rows.append((f"  {verdict}, by the bounds for {path.dtype}", "", "", "", ""))
    if path.agreements:
        yield from _table(rows)
    yield from (_wrapped(f"  {missing}", 2) for missing in path.not_compared)


def _speeds(measured: Measurements) -> Iterator[str]:
    rows = [("dtype", "path", "tokens of each", "of a batch", "texts/s", "tokens/s", "lowest to highest", "core", "MB")]
    for one in measured.speeds:
        spread = f"{one.lowest:,.0f} to {one.highest:,.0f}"
        rates = (f"{one.texts_per_s:,.1f}", f"{one.tokens_per_s:,.0f}", spread)
        sizes = (f"{one.text_tokens}", f"{one.batch_tokens:,}")
        rows.append((one.dtype, one.path, *sizes, *rates, f"{min(1.0, one.core_share):.0%}", f"{one.private_mb:,}"))
    yield from _table(rows)
    yield from (_wrapped(f"  {dtype}: not measured: {why}") for dtype, why in measured.not_measured.items())


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    return (f"  {line}" for line in as_table(rows, is_right=True))
