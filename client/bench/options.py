"""The flags of `vecd bench`, and what they mean together.

Owns argv → `Options` → loads: every flag is checked here, and what is wrong is said in one line before anything is
sent. Measures nothing. Called by `vecd.client.bench.command`.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from vecd.client.bench.answers import READERS
from vecd.client.bench.connection import parse_target
from vecd.client.bench.load import DEFAULT_MAX_CONNECTIONS, MAX_RATE_PER_S, Bulk, Load
from vecd.client.bench.payload import RequestShape, render_requests
from vecd.client.bench.plot import PlotUnavailable, require_matplotlib
from vecd.client.bench.texts import FixedWords, Lengths, parse_lengths, read_texts

STDOUT = Path("-")
_DEFAULT_CLIENTS = (1, 16, 64)
_DEFAULT_WORDS = 10
_DEFAULT_BULK_TEXTS = 512
_DEFAULT_BULK_WORDS = 70
_MAX_CLIENTS = 20_000
"""Connections: fewer than the ports of one address."""
_MAX_TEXTS_PER_REQUEST = 100_000
_MAX_DURATION_S = 86_400.0
_MAX_TIMEOUT_S = 3_600.0
"""Of what the latencies' histogram takes; nobody waits longer."""
_MAX_DISTINCT_REQUESTS = 100_000
_TEXTS_IN_ALL = 32_768
"""About so many are kept ready in requests, when nothing is said of how many requests differ …"""
_DISTINCT_REQUESTS = range(16, 513)
"""… and at least and at most so many requests."""
_EXCLUSIVE = (
    ("--clients", "--rate"),
    ("--words", "--lengths"),
    ("--words", "--texts"),
    ("--lengths", "--texts"),
)
_DEPENDENT = (
    ("--max-connections", "--rate"),
    ("--bulk-texts", "--bulk-clients"),
    ("--bulk-words", "--bulk-clients"),
    ("--bulk-priority", "--bulk-clients"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What `vecd bench` was asked to do. Immutable."""

    url: str
    shape: RequestShape
    clients: tuple[int, ...]
    """Closed loops, one run each; empty when there are rates."""
    rates_per_s: tuple[float, ...]
    """Open loops, one run each; empty when there are clients."""
    max_connections: int
    warmup_s: float
    duration_s: float
    num_requests: int | None
    timeout_s: float
    distinct_requests: int | None
    texts_name: str | None
    """The file's, without its folder."""
    goodput_ms: float | None
    bulk_shape: RequestShape | None
    bulk_clients: int
    json: Path | None
    """`STDOUT` stands for standard output, which then has nothing else."""
    plot: Path | None

    def loads(self) -> list[Load]:
        """One for each number of clients, or each rate. Raises ValueError when a request cannot be rendered."""
        bulk = None
        if self.bulk_shape is not None:
            bulk = Bulk(
                requests=self._render(self.bulk_shape),
                texts_per_request=self.bulk_shape.texts_per_request,
                clients=self.bulk_clients,
                encoding_format=self.bulk_shape.encoding_format,
            )
        load = partial(
            Load,
            target=parse_target(self.url),
            requests=self._render(self.shape),
            texts_per_request=self.shape.texts_per_request,
            max_connections=self.max_connections,
            warmup_s=self.warmup_s,
            duration_s=self.duration_s,
            num_requests=self.num_requests,
            timeout_s=self.timeout_s,
            encoding_format=self.shape.encoding_format,
            goodput_ms=self.goodput_ms,
            seed=self.shape.seed,
            bulk=bulk,
        )
        if self.rates_per_s:
            return [load(rate_per_s=rate_per_s) for rate_per_s in self.rates_per_s]
        return [load(clients=clients) for clients in self.clients]

    def _render(self, shape: RequestShape) -> list[bytes]:
        fitting = _TEXTS_IN_ALL // shape.texts_per_request
        default = min(max(fitting, _DISTINCT_REQUESTS[0]), _DISTINCT_REQUESTS[-1])
        return render_requests(self.url, shape, self.distinct_requests or default)

    def describe(self) -> str:
        """One line for people."""
        length = f"{self.num_requests} requests" if self.num_requests else f"{self.duration_s:g} s"
        line = (
            f"{parse_target(self.url)}{self.shape.path}: {_describe_request(self.shape, self.texts_name)}, "
            f"{self.shape.encoding_format}, {length} after {self.warmup_s:g} s of warm-up"
        )
        if self.bulk_shape is not None:
            line += f", beside {self.bulk_clients} × bulk of {_describe_request(self.bulk_shape, None)}"
        return line

    def fields(self) -> dict[str, Any]:
        """The same for programs, and never the key."""
        return {
            "url": self.url,
            "path": self.shape.path,
            "model": self.shape.model,
            "encoding_format": self.shape.encoding_format,
            "texts_per_request": self.shape.texts_per_request,
            "lengths": self.texts_name or str(self.shape.lengths),
            "seed": self.shape.seed,
            "warmup_s": self.warmup_s,
            "timeout_s": self.timeout_s,
            "timeout_ms": self.shape.timeout_ms,
            "priority": self.shape.priority,
            "max_connections": self.max_connections,
        }

    def bulk_fields(self) -> dict[str, Any]:
        """What the bulk sent; empty without one."""
        if self.bulk_shape is None:
            return {}
        return {"lengths": str(self.bulk_shape.lengths), "priority": self.bulk_shape.priority}


def _describe_request(shape: RequestShape, texts_name: str | None) -> str:
    return f"{shape.texts_per_request} × {texts_name or shape.lengths} a request"


def parse_options(argv: list[str] | None) -> tuple[Options, list[Load]]:
    """What was asked for, and its runs. Side effects: what is wrong is printed, in one line, and exits with 2."""
    parser = _make_parser()
    arguments = parser.parse_args(argv)
    try:
        options = _read_options(arguments)
        loads = options.loads()
        _check_files(options)
    except (ValueError, PlotUnavailable) as error:
        parser.error(str(error))
    return options, loads


def _read_options(arguments: argparse.Namespace) -> Options:
    """Raises ValueError when flags do not go together."""
    _check_together(arguments)
    shape = RequestShape(
        path=arguments.path,
        lengths=arguments.lengths or FixedWords(arguments.words or _DEFAULT_WORDS),
        texts=None if arguments.texts is None else _read_texts(arguments.texts),
        texts_per_request=arguments.texts_per_request,
        encoding_format=arguments.encoding_format,
        model=arguments.model,
        api_key=arguments.api_key,
        seed=arguments.seed,
        timeout_ms=arguments.timeout_ms,
        priority=arguments.priority,
    )
    return Options(
        url=arguments.url,
        shape=shape,
        clients=() if arguments.rate else tuple(arguments.clients or _DEFAULT_CLIENTS),
        rates_per_s=tuple(arguments.rate or ()),
        max_connections=arguments.max_connections or DEFAULT_MAX_CONNECTIONS,
        warmup_s=arguments.warmup,
        duration_s=arguments.duration,
        num_requests=arguments.requests,
        timeout_s=arguments.timeout,
        distinct_requests=arguments.distinct_requests,
        texts_name=None if arguments.texts is None else arguments.texts.name,
        goodput_ms=arguments.goodput_ms,
        bulk_shape=_bulk_shape(arguments, shape),
        bulk_clients=arguments.bulk_clients or 0,
        json=arguments.json,
        plot=arguments.plot,
    )


def _read_texts(path: Path) -> list[str]:
    try:
        return read_texts(path)
    except ValueError as error:
        raise ValueError(f"--texts: {error}") from error


def _bulk_shape(arguments: argparse.Namespace, shape: RequestShape) -> RequestShape | None:
    """As what is measured, but for its texts, its priority, and its deadline, of which bulk has none."""
    if arguments.bulk_clients is None:
        return None
    return replace(
        shape,
        texts=None,
        texts_per_request=arguments.bulk_texts or _DEFAULT_BULK_TEXTS,
        lengths=arguments.bulk_words or FixedWords(_DEFAULT_BULK_WORDS),
        priority=arguments.bulk_priority,
        timeout_ms=None,
        seed=shape.seed + 1,
    )


def _check_together(arguments: argparse.Namespace) -> None:
    def has(flag: str) -> bool:
        return getattr(arguments, flag[2:].replace("-", "_")) is not None

    for one, other in _EXCLUSIVE:
        if has(one) and has(other):
            raise ValueError(f"{one} and {other} exclude each other")
    for flag, needed in _DEPENDENT:
        if has(flag) and not has(needed):
            raise ValueError(f"{flag} means something only with {needed}")


def _check_files(options: Options) -> None:
    """Whether what is measured could be written. Side effects: the JSON file is there from now on."""
    if options.plot is not None:
        if options.plot.suffix != ".png":
            raise ValueError(f"--plot: {options.plot} does not end in .png")
        if not options.plot.absolute().parent.is_dir():
            raise ValueError(f"--plot: {options.plot} is in no folder that exists")
        require_matplotlib()
    if options.json is not None and options.json != STDOUT:
        try:
            options.json.open("ab").close()
        except OSError as error:
            raise ValueError(f"--json: {options.json} cannot be written: {error.strerror}") from error


# --- argv -------------------------------------------------------------------------------------------------


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vecd bench",
        description="Measure an embedding server: by clients that ask again when they are answered, or by requests "
        "that arrive at a rate whatever the server does.",
    )
    _add_load(parser)
    _add_requests(parser)
    _add_bulk(parser)
    _add_reports(parser)
    return parser


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("load").add_argument
    add("--url", default="http://127.0.0.1:8000", help="http://host:port or unix:/path (http://127.0.0.1:8000)")
    add("--path", default="/v1/embeddings", help="of the OpenAI-shaped endpoint (/v1/embeddings)")
    add(
        "--clients",
        type=_counts(_MAX_CLIENTS),
        metavar="N,…",
        help="closed loop: connections, each asking again when it is answered; several are runs in a row (1,16,64)",
    )
    add(
        "--rate",
        type=_rates,
        metavar="R,…",
        help="open loop: requests a second, arriving at random moments; latency runs from the moment of arrival",
    )
    add(
        "--max-connections",
        type=_count(_MAX_CLIENTS),
        metavar="N",
        help=f"open loop: an arrival that finds all of so many busy is an error ({DEFAULT_MAX_CONNECTIONS})",
    )
    add("--duration", type=_seconds, default=10.0, metavar="S", help="measured seconds of a run (10)")
    add("--warmup", type=_seconds_or_none, default=2.0, metavar="S", help="seconds before that (2)")
    add("--requests", type=_count(), metavar="N", help="measure this many requests instead of a time")
    add("--timeout", type=_timeout, default=30.0, metavar="S", help="longest wait for one answer (30)")


def _add_requests(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("requests").add_argument
    add("--texts-per-request", type=_count(_MAX_TEXTS_PER_REQUEST), default=1, metavar="N", help="inputs in each (1)")
    add("--words", type=_count(), metavar="N", help=f"in each text ({_DEFAULT_WORDS})")
    add("--lengths", type=_lengths, metavar="lognormal:MEAN,SIGMA", help="words in each text, instead of --words")
    add("--texts", type=Path, metavar="FILE", help='texts to send: one a line, or JSON objects with a "text"')
    add(
        "--distinct-requests",
        type=_count(_MAX_DISTINCT_REQUESTS),
        metavar="N",
        help="how many differ, before they come again (512; fewer of many texts)",
    )
    add(
        "--encoding-format",
        choices=tuple(READERS),
        default="base64",
        help="how vectors are asked for (base64); bytes and npy are not JSON",
    )
    add("--model", help="left out of the requests when not given")
    add("--api-key", help="sent as a bearer token")
    add(
        "--timeout-ms",
        type=_count(),
        metavar="MS",
        help="sent as x-vecd-timeout-ms: what the server has to answer within",
    )
    add("--priority", metavar="P", help="sent as x-vecd-priority")
    add("--seed", type=_seed, default=0, metavar="N", help="of the texts and the arrivals (0)")


def _add_bulk(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("bulk, beside what is measured").add_argument
    add(
        "--bulk-clients",
        type=_count(_MAX_CLIENTS),
        metavar="N",
        help="connections, each asking again when it is answered; they have a row of their own",
    )
    add(
        "--bulk-texts",
        type=_count(_MAX_TEXTS_PER_REQUEST),
        metavar="N",
        help=f"inputs in each request ({_DEFAULT_BULK_TEXTS})",
    )
    add(
        "--bulk-words",
        type=_lengths,
        metavar="N",
        help=f"in each text, or lognormal:MEAN,SIGMA ({_DEFAULT_BULK_WORDS})",
    )
    add("--bulk-priority", metavar="P", help="sent as x-vecd-priority")


def _add_reports(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("report").add_argument
    add("--goodput-ms", type=_milliseconds, metavar="MS", help="tell how many were answered within MS of their arrival")
    add(
        "--json", type=Path, metavar="FILE", help="append one JSON object a run; -: print them, and the table to stderr"
    )
    add("--plot", type=Path, metavar="FILE.png", help="draw latency over throughput, a point a run; needs vecd[plot]")


def _fail(message: str) -> NoReturn:
    raise argparse.ArgumentTypeError(message)


def _count(largest: int = 10**9) -> Callable[[str], int]:
    def read(value: str) -> int:
        if not value.isascii() or not value.isdecimal() or not 1 <= int(value[:20]) <= largest:
            _fail(f"{value!r} is not a whole number from 1 to {largest:,}")
        return int(value)

    return read


def _counts(largest: int) -> Callable[[str], list[int]]:
    read_one = _count(largest)
    return lambda value: [read_one(part.strip()) for part in value.split(",")]


def _number(value: str) -> float:
    """NaN when it is none, which no range has in it."""
    try:
        return float(value)
    except ValueError:
        return math.nan


def _rates(value: str) -> list[float]:
    rates = [_number(part) for part in value.split(",")]
    if not all(0 < rate <= MAX_RATE_PER_S for rate in rates):
        _fail(f"{value!r} has a rate that is not above 0 and at most {MAX_RATE_PER_S:,.0f} requests a second")
    return rates


def _seconds_or_none(value: str) -> float:
    seconds = _number(value)
    if not 0 <= seconds <= _MAX_DURATION_S:
        _fail(f"{value!r} is not a number of seconds from 0 to {_MAX_DURATION_S:,.0f}")
    return seconds


def _seconds(value: str) -> float:
    return _seconds_or_none(value) or _fail("0 seconds measure nothing")


def _timeout(value: str) -> float:
    seconds = _number(value)
    if not 0 < seconds <= _MAX_TIMEOUT_S:
        _fail(f"{value!r} is not a number of seconds above 0 and up to {_MAX_TIMEOUT_S:,.0f}")
    return seconds


def _milliseconds(value: str) -> float:
    milliseconds = _number(value)
    if not 0 < milliseconds <= 1000 * _MAX_TIMEOUT_S:
        _fail(f"{value!r} is not a number of milliseconds above 0 and up to {1000 * _MAX_TIMEOUT_S:,.0f}")
    return milliseconds


def _seed(value: str) -> int:
    try:
        return int(value)
    except ValueError:
        _fail(f"{value!r} is not a whole number")


def _lengths(value: str) -> Lengths:
    try:
        return parse_lengths(value)
    except ValueError:
        _fail(f"{value!r} is neither a number of words nor lognormal:MEAN,SIGMA of positive numbers")
