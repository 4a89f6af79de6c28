"""What a few flags and habits of a client are worth on this machine: the figures of docs/tuning.md.

Owns the table of what is compared, and prints a table of its own; every run is appended to a file under
`benchmarks/results`. Each round starts each server once, in turn, so that whatever else the machine does falls on all
of them; a figure is the median of the rounds. Run by `make bench-tuning`; starts servers by `benchmarks.servers`, loads
them with `vecd bench`.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.servers import announcing, clean_environment, program

_RESULTS = Path(__file__).parent / "results"
_RUN_TIMEOUT_S = 120.0


class Load(NamedTuple):
    name: str
    flags: tuple[str, ...]
    """Of `vecd bench`."""


class Setting(NamedTuple):
    name: str
    flags: tuple[str, ...]
    """Of `vecd serve`."""
    loads: tuple[Load, ...]


_ALONE = Load("1 client, a short text", ("--clients", "1"))
_MANY = Load("64 clients, a short text each", ("--clients", "64"))
_MIXED = Load(
    "8 clients, 4 texts of mixed length each",
    ("--clients", "8", "--texts-per-request", "4", "--lengths", "lognormal:86,0.8"),
)


def _of_texts(num: int, encoding: str = "base64") -> Load:
    name = f"8 clients, {num} short texts each, {encoding}"
    return Load(name, ("--clients", "8", "--texts-per-request", str(num), "--encoding-format", encoding))


SETTINGS: Sequence[Setting] = (
    Setting("defaults", (), (_ALONE, _MANY, _MIXED, *map(_of_texts, (1, 8, 32)), _of_texts(32, "float"))),
    Setting("--workers 1", ("--workers", "1"), (_ALONE, _MANY)),
    Setting("--workers 1 --threads-per-worker 2", ("--workers", "1", "--threads-per-worker", "2"), (_ALONE, _MANY)),
    Setting("--gateways 2", ("--gateways", "2"), (_MANY,)),
    Setting("--max-batch-tokens 512", ("--max-batch-tokens", "512"), (_MIXED,)),
    Setting("--max-batch-tokens 8192", ("--max-batch-tokens", "8192"), (_MIXED,)),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuning", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--duration", type=float, default=3.0, help="measured seconds of a run (%(default)s)")
    options = parser.parse_args(argv)
    now = datetime.now(UTC)
    results = _RESULTS / f"{now:%Y-%m-%d}-tuning.jsonl"
    runs: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for number in range(1, options.rounds + 1):
        for setting in SETTINGS:
            for load, figures in _measure(setting, options.duration):
                runs[setting.name, load].append(figures)
                line = {"session": now.isoformat(), "round": number, "setting": setting.name, "load": load, **figures}
                with results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
        print(f"round {number} of {options.rounds} is measured", file=sys.stderr, flush=True)
    print(table(runs))
    return 0


def _measure(setting: Setting, duration_s: float) -> Sequence[tuple[str, dict[str, Any]]]:
    with announcing(*setting.flags) as server:
        return [(load.name, _run(server.url, load, duration_s)) for load in setting.loads]


def _run(url: str, load: Load, duration_s: float) -> dict[str, Any]:
    command = [
        program("vecd"), "bench", "--url", url, *load.flags, "--duration", str(duration_s), "--warmup", "1",
        "--json", "-",
    ]  # fmt: skip
    told = subprocess.run(
        command, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_RUN_TIMEOUT_S,
        check=True,
    )  # fmt: skip
    figures: dict[str, Any] = json.loads(told.stdout)
    return figures


def table(runs: dict[tuple[str, str], list[dict[str, Any]]]) -> str:
    """Medians, and each round's ratio to the first setting under the same load, as Markdown."""
    first = SETTINGS[0].name
    lines = [
        "| load | setting | texts/s | ÷ defaults | p50, ms | p99, ms |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    loads = list(dict.fromkeys(load for _, load in runs))
    for load in loads:
        for setting in SETTINGS:
            found = runs.get((setting.name, load))
            if not found:
                continue
            base = runs[first, load]
            ratios = [ours["texts_per_s"] / theirs["texts_per_s"] for ours, theirs in zip(found, base, strict=True)]
            rate, p50, p99 = (median(run[name] for run in found) for name in ("texts_per_s", "p50_ms", "p99_ms"))
            lines.append(f"| {load} | {setting.name} | {rate:,.0f} | {median(ratios):.2f} | {p50:,.1f} | {p99:,.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
