"""The flags of `vecd top`. Called by `vecd.client.top.command`."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from vecd.client.connection import Target, parse_target
from vecd.client.options import flag, number, parse
from vecd.client.top.source import StatsSource

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 3600.0


@dataclass(frozen=True, kw_only=True)
class TopOptions:
    """Immutable. Raises ValueError when the server's address or the key cannot be used, or nothing can be drawn."""

    url: str = flag(
        "http://host:port or unix:/path (http://127.0.0.1:8000); of the admin listener, if the server has one",
        default="http://127.0.0.1:8000",
    )
    api_key: str | None = flag(
        "one that has the scope metrics; better set as VECD_API_KEY, a flag shows in ps", variable="VECD_API_KEY"
    )
    interval: float = flag(
        "seconds from one answer to the next request (1)",
        default=1.0,
        read=number("seconds", MAX_INTERVAL_S, least=MIN_INTERVAL_S),
        metavar="S",
    )
    once: bool = flag("print one picture, of that many seconds, as plain text", default=False)
    json: bool = flag("print one JSON object for each interval instead", default=False)

    def __post_init__(self) -> None:
        self.source()  # whether the key can be sent
        if self.json:
            return
        if importlib.util.find_spec("rich") is None:
            raise ValueError("drawing needs rich: pip install 'vecd[cli]'; --json does not")
        if not self.once and (not sys.stdout.isatty() or os.environ.get("TERM") in (None, "", "dumb")):
            raise ValueError("standard output is not a terminal that can be drawn on: use --once or --json")

    @property
    def target(self) -> Target:
        return parse_target(self.url)

    def source(self) -> StatsSource:
        return StatsSource(self.target, self.api_key)


def parse_options(argv: Sequence[str] | None) -> TopOptions:
    return parse(
        TopOptions,
        argv,
        prog="vecd top",
        description="Show what a running server does: rates, latency by stage, queue, workers, memory. "
        "Keys: q quits, p pauses the picture, + and - change the interval.",
    )
