"""The flags of `vecd plan`.

Owns their names, defaults and checks. Opens nothing. Called by `vecd.client.plan.command`.
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from vecd.client.connection import Target
from vecd.client.options import TlsOptions, flag, number, parse, whole
from vecd.client.plan.cost import ITEM_BYTES

_MAX_DOCUMENTS = 10**15
_MAX_TOKENS = 32_768
"""Of a document: the words of longer ones are more than the reference has that texts are drawn from."""
_DEADLINE = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
_UNITS_S = (86_400, 3600, 60, 1)
_MAX_DEADLINE_S = 3650 * 86_400
_DEFAULT_DEADLINE_S = 10 * 3600.0
_SERVED_HERE = ("--host", "--port", "--uds", "--ready-fd", "--drain-grace")


def read_documents(value: str) -> int:
    """Reads 10000000000, 1e10 or 2.5e9. Raises ValueError."""
    try:
        found = float(value)
    except ValueError:
        found = 0.0
    if not (1 <= found <= _MAX_DOCUMENTS and found == int(found)):
        raise ValueError(f"{value!r} is not a whole number of documents from 1 to 1e15, as 1e10")
    return int(found)


def read_duration(value: str) -> float:
    """Reads 10h, 1h30m, 2d or 90s as seconds. Raises ValueError."""
    match = _DEADLINE.fullmatch(value)
    seconds = sum(float(part or 0) * unit for part, unit in zip(match.groups(), _UNITS_S, strict=True)) if match else 0
    if not 1 <= seconds <= _MAX_DEADLINE_S:
        raise ValueError(f"{value!r} is not a time from 1s to 3650d, as 10h or 1h30m")
    return seconds


@dataclass(frozen=True, kw_only=True)
class PlanOptions(TlsOptions):
    """Immutable. Raises ValueError for flags that exclude each other, or a server that cannot be one."""

    documents: int = flag("how many there are, as 1e10", default=dataclasses.MISSING, read=read_documents, metavar="N")
    tokens: int = flag("in each document", default=dataclasses.MISSING, read=whole(_MAX_TOKENS), metavar="N")
    model: str | None = flag("folder or hub id of the model of the server that is started (the bundled one)")
    deadline: float | None = flag("when all are to be done, as 10h, 1h30m or 2d (10h)", read=read_duration, metavar="T")
    nodes: int | None = flag("how long N nodes take, instead of --deadline", read=whole(10**7), metavar="N")
    output_dtype: str = flag("of the vectors that are stored (float32)", default="float32", choices=tuple(ITEM_BYTES))
    url: str | None = flag(
        "measure a running server, http://host:port, https://host:port or unix:/path; without it, one is started"
    )
    api_key: str | None = flag(
        "sent as a bearer token; better set as VECD_API_KEY, a flag shows in ps", variable="VECD_API_KEY"
    )
    measure_s: float = flag(
        "seconds of the measurement, behind some seconds that find its load (20)",
        default=20.0,
        read=number("seconds", 3600, least=1),
        metavar="S",
    )
    json: bool = flag("print one JSON object", default=False)
    serve_flags: tuple[str, ...] = ()
    """Behind `--`, for `vecd serve`."""

    def __post_init__(self) -> None:
        if self.deadline is not None and self.nodes is not None:
            raise ValueError("--deadline and --nodes exclude each other: one follows from the other")
        self.check_server(self.url, self.model, self.serve_flags, _SERVED_HERE)

    @cached_property
    def target(self) -> Target | None:
        """The running server; None when one is to be started."""
        return None if self.url is None else self.read_target(self.url)

    @property
    def deadline_s(self) -> float:
        return self.deadline or _DEFAULT_DEADLINE_S


def parse_options(argv: Sequence[str]) -> PlanOptions:
    """Flags behind the first `--` are for `vecd serve`."""
    place = argv.index("--") if "--" in argv else len(argv)
    return parse(
        PlanOptions,
        argv[:place],
        prog="vecd plan",
        usage="vecd plan --documents N --tokens N [--flags] [-- flags of vecd serve]",
        description="Measure how fast this machine embeds documents, and say what many of them cost.",
        serve_flags=tuple(argv[place + 1 :]),
    )
