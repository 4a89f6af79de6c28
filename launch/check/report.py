"""The report of `vecd check`: one JSON object, and its text (`render`). Pure.

Owns the object's parts and how they are shown. Its facts are made by `vecd.launch.check.model` and
`vecd.workers.check`, and described in docs/check.md.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from vecd.base.files import JsonMapping, JsonObject
from vecd.launch.memory import as_table

Report: TypeAlias = JsonObject
"""Filled from top to bottom; the parts after a problem are None."""


@dataclass(frozen=True, slots=True)
class Problem:
    what: str
    suggestion: str


def new_report(version: str, *problems: Problem) -> Report:
    parts = dict.fromkeys(("model", "path", "measurements", "reference_file"))
    return {"version": version, **parts, "problems": list(problems), "warnings": []}


def to_json(report: Report) -> JsonObject:
    return {"is_servable": not report["problems"], **report}


# --- as text ----------------------------------------------------------------------------------------------------

_WIDTH, _LABEL, _MAX_VALUES = 118, 18, 8
_SHOWN_APART = ("agreements", "not_compared")


def render(report: Report) -> str:
    lines: list[str] = []
    path, measured = report["path"], report["measurements"]
    for title, part in (("Model", report["model"]), ("Path", path)):
        if part is not None:
            facts = {name: value for name, value in part.items() if value or value is False}
            lines += [title, *(_fact(*fact) for fact in facts.items() if fact[0] not in _SHOWN_APART), ""]
    if path is not None:
        lines += ["Parity", *_parity(path), ""]
    if measured is not None:
        lines += ["Speed of one worker", *_speeds(measured), ""]
    lines += [_wrapped(f"warning: {warning}") for warning in report["warnings"]]
    for problem in report["problems"]:
        lines += [_wrapped(f"problem: {problem.what}"), _wrapped(f"do this: {problem.suggestion}")]
    if report["reference_file"] is not None:
        lines.append(f"reference vectors: written to {report['reference_file']}")
    return "\n".join([*lines, *([] if report["problems"] else ["This model can be served."])])


def render_all(reports: Mapping[str, Report]) -> str:
    """What the reports of several models come to, by the names of the models."""
    rows = [("model", "kind", "selected", "memory", "result")]
    for name, report in reports.items():
        kind = ", ".join(report["model"]["capabilities"]) if report["model"] is not None else "-"
        path, problems, num_warnings = report["path"], report["problems"], len(report["warnings"])
        right = f"right, warnings: {num_warnings}" if num_warnings else "right"
        result = textwrap.shorten(f"problem: {problems[0].what}", 60) if problems else right
        selected = ("-", "-") if path is None else (f"{path['path']}, {path['dtype']}", f"{path['shared_mb']:,} MB")
        rows.append((name, kind, *selected, result))
    failed = [name for name, report in reports.items() if report["problems"]]
    result = f"{len(failed)} of {len(reports)} models cannot be served: {', '.join(failed)}"
    return "\n".join(["Models", *_table(rows), "", result if failed else "All models can be served."])


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


def _parity(path: JsonMapping) -> Iterator[str]:
    rows = [("", "texts", "tokens", "cosine or same order", "largest difference")]
    for found in path["agreements"]:
        for row in found["by_length"]:
            close = f"{row['same_order']:.1%}" if row["min_cosine"] is None else f"{row['min_cosine']:.8f}"
            rows.append((f"with {found['against']}", f"{row['num_texts']}", f"≤ {row['longest_tokens']}", close,
                         f"{row['max_abs_diff']:.1e}"))  # fmt: skip
        verdict = "agrees" if found["is_within_bounds"] else "DISAGREES"
        rows.append((f"  {verdict}, by the bounds for {path['dtype']}", "", "", "", ""))
    if path["agreements"]:
        yield from _table(rows)
    yield from (_wrapped(f"  {missing}", 2) for missing in path["not_compared"])


def _speeds(measured: JsonMapping) -> Iterator[str]:
    rows = [("dtype", "path", "tokens of each", "of a batch", "texts/s", "tokens/s", "lowest to highest", "core", "MB")]
    for one in measured["speeds"]:
        spread = f"{one['lowest']:,.0f} to {one['highest']:,.0f}"
        rates = (f"{one['texts_per_s']:,.1f}", f"{one['tokens_per_s']:,.0f}", spread)
        sizes = (f"{one['text_tokens']}", f"{one['batch_tokens']:,}")
        used = (f"{min(1.0, one['core_share']):.0%}", f"{one['private_mb']:,}")
        rows.append((one["dtype"], one["path"], *sizes, *rates, *used))
    yield from _table(rows)
    yield from (_wrapped(f"  {dtype}: not measured: {why}") for dtype, why in measured["not_measured"].items())


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    return (f"  {line}" for line in as_table(rows, is_right=True))
