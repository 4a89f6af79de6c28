"""Fills the table of docs/reliability.md from what a run of the trials has recorded.

    python -m tests.support.soak.report build/soak.jsonl docs/reliability.md

Owns the form of the table, and what is said of the machine. Reads no clock: each record has its date. Of a trial that
was run several times the last one counts.
"""

import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- results: written by tests/support/soak/report.py -->", "<!-- end of results -->"
_UNITS = {"_ms": " ms", "_s": " s", "_mb": " MB", "_percent": " %", "_per_s": "/s"}


def describe_machine() -> str:
    """Processor, cores, memory, kernel and Python, in a line."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    processor = names[0] if names else platform.machine()
    return (
        f"{processor}, {cores} cores, {memory_gb:.0f} GB, Linux {platform.release().split('-')[0]}, "
        f"Python {platform.python_version()}"
    )


def rows(records: Iterable[dict[str, Any]]) -> list[str]:
    """The table's lines, a row for each result, and for each file whose tests have none."""
    last: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {}
    others: dict[str, dict[str, str]] = {}
    for record in records:
        for result in record["results"]:
            figures = {name: value for name, value in result.items() if name not in ("trial", "form")}
            last[result.get("trial", record["test"]), record["test"]] = record, figures
        if not record["results"]:
            others.setdefault(record["test"].partition("::")[0], {})[record["test"]] = record["outcome"]
    lines = ["| trial | result | measured | when |", "| --- | --- | --- | --- |"]
    for (trial, _), (record, figures) in last.items():
        measured = ", ".join(f"{_name(name)} {_value(name, value)}" for name, value in figures.items())
        lines.append(f"| {trial} | {record['outcome']} | {measured} | {record['at'][:16].replace('T', ' ')} |")
    for file, outcomes in others.items():
        counts = ", ".join(f"{number} {outcome}" for outcome, number in Counter(outcomes.values()).items())
        lines.append(f"| `{file}` | {counts} | | |")
    return lines


def _name(name: str) -> str:
    for suffix in sorted(_UNITS, key=len, reverse=True):
        if name.endswith(suffix):
            return name.removesuffix(suffix).replace("_", " ")
    return name.replace("_", " ")


def _value(name: str, value: Any) -> str:
    if isinstance(value, list):
        return " and ".join(_value(name, item) for item in value)
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key}: {number}" for key, number in value.items()) + ")"
    unit = next((_UNITS[suffix] for suffix in sorted(_UNITS, key=len, reverse=True) if name.endswith(suffix)), "")
    text = f"{value:,}" if isinstance(value, int | float) else str(value).replace("|", "\\|")
    return text + unit


def fill(page: str, records: list[dict[str, Any]]) -> str:
    """The page with the table between its marks. Raises ValueError when it has no marks."""
    before, found, rest = page.partition(BEGIN)
    _, also_found, after = rest.partition(END)
    if not found or not also_found:
        raise ValueError(f"the page lacks {BEGIN} or {END}")
    machines = "; ".join(dict.fromkeys(record["machine"] for record in records))
    return "\n".join([before + BEGIN, "", f"Machine: {machines}. Times are UTC.", "", *rows(records), "", END + after])


def main(results: str, page: str) -> None:
    lines = Path(results).read_text(encoding="utf-8").splitlines()
    path = Path(page)
    path.write_text(fill(path.read_text(encoding="utf-8"), [json.loads(line) for line in lines]), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
