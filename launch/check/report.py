"""The report of `vecd check`: one JSON object, and the same as text (`render`). Pure.

Owns the object's parts and how they are shown. Its facts are made by `vecd.launch.check.model` and
`vecd.workers.check`, and described in docs/check.md.
"""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from vecd.base.files import JsonMapping, JsonObject
from vecd.launch.memory import as_table

Report: TypeAlias = JsonObject
"""Filled from top to bottom; the parts after a problem are None."""

_FACTS = ("model", "path", "measurements", "reference_file")
_WIDTH, _LABEL, _MAX_VALUES = 118, 20, 8


@dataclass(frozen=True, slots=True)
class Problem:
    what: str
    suggestion: str


def new_report(version: str, *problems: Problem) -> Report:
    return {"version": version, **dict.fromkeys(_FACTS), "problems": list(problems), "warnings": []}


def render(report: Report) -> str:
    lines = [*_lines_of({name: report[name] for name in _FACTS})]
    lines += [_wrapped(f"warning: {warning}") for warning in report["warnings"]]
    for problem in report["problems"]:
        lines += [_wrapped(f"problem: {problem.what}"), _wrapped(f"do this: {problem.suggestion}")]
    return "\n".join([*lines, *([] if report["problems"] else ["This model can be served."])])


def _lines_of(facts: JsonMapping, indent: str = "") -> Iterator[str]:
    """Under the names that they have as JSON. What a model does not have is left out."""
    inner = indent + "  "
    for name, value in facts.items():
        match value:
            case None | "" | [] | ():
                continue
            case int() if value == 0 and value is not False:
                continue
            case Mapping():
                yield from (indent + name, *_lines_of(value, inner)) if value else ()
            case [{**first}, *_] if any(isinstance(fact, list) for fact in first.values()):
                yield from (indent + name, *(line for each in value for line in _lines_of(each, inner)))
            case [{**first}, *_]:
                rows = [[*map(str, first)], *([_short(fact) for fact in each.values()] for each in value)]
                yield from (indent + name, *(inner + line for line in as_table(rows, is_right=True)))
            case _:
                values = value if isinstance(value, list | tuple) else [value]
                words = [*map(_short, values[:_MAX_VALUES])]
                if len(values) > _MAX_VALUES:
                    words.append(f"and {len(values) - _MAX_VALUES} more")
                yield _wrapped(f"{indent}{name:{_LABEL}}  {'; '.join(words)}", len(indent) + _LABEL + 2)


def _short(value: Any) -> str:
    match value:
        case float():
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}"
        case int() if not isinstance(value, bool):
            return f"{value:,}"
        case str() if not value.isprintable() or value != value.strip():
            return repr(value)
    return "" if value is None else str(value)


def _wrapped(text: str, indent: int = 9) -> str:
    return textwrap.fill(
        text, _WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False,
        drop_whitespace=True, replace_whitespace=False,
    )  # fmt: skip
