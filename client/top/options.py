"""The flags of `vecd top`.

Owns argv → `Options`: what is wrong is said in one line before anything is asked. Called by `vecd.client.top.command`.
"""

import argparse
import importlib.util
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from vecd.client.bench.connection import Target, parse_target
from vecd.client.top.source import Source

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 3600.0
KEY_VARIABLE = "VECD_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What `vecd top` was asked to do. Immutable."""

    target: Target
    api_key: str | None
    interval_s: float
    is_once: bool
    is_json: bool

    def source(self) -> Source:
        return Source(self.target, self.api_key)


def parse_options(argv: list[str] | None, environment: Mapping[str, str] = os.environ) -> Options:
    """Side effects: what is wrong is printed, in one line, and exits with 2."""
    parser = _make_parser()
    arguments = parser.parse_args(argv)
    try:
        options = Options(
            target=parse_target(arguments.url),
            api_key=arguments.api_key or environment.get(KEY_VARIABLE) or None,
            interval_s=arguments.interval,
            is_once=arguments.once,
            is_json=arguments.json,
        )
        options.source()  # whether the key can be sent
        _check_output(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def _check_output(options: Options) -> None:
    """Whether it could be shown. Raises ValueError."""
    if options.is_json:
        return
    if importlib.util.find_spec("rich") is None:
        raise ValueError("drawing needs rich: pip install 'vecd[cli]'; --json needs nothing")
    if not options.is_once and (not sys.stdout.isatty() or os.environ.get("TERM") in (None, "", "dumb")):
        raise ValueError("standard output is no terminal that can be drawn on: use --once or --json")


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vecd top",
        description="Show what a running server does: rates, latency by stage, queue, workers, memory. "
        "Keys: q quits, p pauses the picture, + and - change the interval.",
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="http://host:port or unix:/path (http://127.0.0.1:8000); of the "
        "admin listener, where there is one")  # fmt: skip
    add("--api-key", help=f"one that has the scope metrics; better set as {KEY_VARIABLE}, a flag shows in ps")
    add("--interval", type=_interval, default=1.0, metavar="S", help="seconds from one answer to the next question (1)")
    add("--once", action="store_true", help="print one picture, of that many seconds, as plain text")
    add("--json", action="store_true", help="print one JSON object for each interval instead")
    return parser


def _interval(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not MIN_INTERVAL_S <= seconds <= MAX_INTERVAL_S:
        raise argparse.ArgumentTypeError(
            f"{value!r} is not a number of seconds from {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:,.0f}"
        )
    return seconds
