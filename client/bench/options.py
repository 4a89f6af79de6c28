"""The flags of `vecd bench`, what they mean together, and the loads that they describe.

Everything is checked before anything is sent. Measures nothing.
"""

# ruff: noqa: RUF009 (a flag is a dataclasses.field)

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from vecd.base.flags import Command, TlsOptions, flag, flag_name, parse
from vecd.base.target import Target
from vecd.client.bench.load import (
    DEFAULT_MAX_CONNECTIONS,
    MAX_RATE_PER_S,
    MAX_TEXTS_PER_REQUEST,
    TEN_WORDS,
    Load,
    RequestShape,
    render_requests,
)
from vecd.client.bench.plot import require_matplotlib
from vecd.client.bench.texts import Lengths, parse_lengths, read_texts

STDOUT = Path("-")
_DEFAULT_CLIENTS = (1, 16, 64)
_DEFAULT_BULK_TEXTS = 512
_DEFAULT_BULK_WORDS = 70
_MAX_CLIENTS = 20_000
"""Connections: fewer than the ports of one address."""
_MAX_DURATION_S = 86_400.0
_MAX_TIMEOUT_S = 3_600.0
_MAX_DISTINCT_REQUESTS = 100_000
_READY_TEXTS = 32_768
"""About the number of texts in all different requests, if --distinct-requests is not given; up to eight times as many
for the sake of requests that are in progress at the same time."""
_NOT_REPORTED = ("api_key", "texts")
_DEPENDENT = (
    ("max_connections", "rate"),
    ("bulk_texts", "bulk_clients"),
    ("bulk_words", "bulk_clients"),
    ("bulk_priority", "bulk_clients"),
)

_load = partial(flag, group="load")
_request = partial(flag, group="requests")
_bulk = partial(flag, group="bulk, beside what is measured", at_least=1)
_report = partial(flag, group="report")


@dataclass(frozen=True, kw_only=True)
class BenchOptions(RequestShape, TlsOptions):
    """Immutable. Raises ValueError when flags do not go together, or a file cannot be read or written.

    Side effects: the file of --json exists from now on.
    """

    url: str = _load(
        "http://127.0.0.1:8000", "http://host:port, https://host:port or unix:/path (http://127.0.0.1:8000)"
    )
    clients: tuple[int, ...] | None = _load(
        None,
        "closed loop: connections, each sending again when it is answered; several are runs in a row (1,16,64)",
        at_least=1,
        at_most=_MAX_CLIENTS,
    )
    rate: tuple[float, ...] | None = _load(
        None,
        "open loop: requests a second, arriving at random moments; latency runs from the moment of arrival",
        above=0,
        at_most=MAX_RATE_PER_S,
        unit="requests a second",
        word="RATE,…",
    )
    max_connections: int | None = _load(
        None,
        f"open loop: an arrival that finds this many busy is an error ({DEFAULT_MAX_CONNECTIONS})",
        at_least=1,
        at_most=_MAX_CLIENTS,
    )
    duration: float = _load(10.0, "measured seconds of a run (10)", above=0, at_most=_MAX_DURATION_S, unit="seconds")
    warmup: float = _load(2.0, "seconds before that (2)", at_least=0, at_most=_MAX_DURATION_S, unit="seconds")
    requests: int | None = _load(None, "measure this many requests instead of a time", at_least=1)
    timeout: float = _load(30.0, "longest wait for one answer (30)", above=0, at_most=_MAX_TIMEOUT_S, unit="seconds")
    texts_file: Path | None = _request(
        None, 'texts to send: one a line, or JSON objects with a "text"', names=("--texts",), word="FILE"
    )
    distinct_requests: int | None = _request(
        None,
        "how many differ, before they come again (512, or twice those at a time; fewer of many texts)",
        at_least=1,
        at_most=_MAX_DISTINCT_REQUESTS,
    )
    bulk_clients: int | None = _bulk(
        None,
        "connections, each sending again when it is answered; they have a row of their own",
        at_most=_MAX_CLIENTS,
    )
    bulk_texts: int | None = _bulk(
        None, f"inputs in each request ({_DEFAULT_BULK_TEXTS})", at_most=MAX_TEXTS_PER_REQUEST
    )
    bulk_words: Lengths | None = _bulk(
        None, f"in each text, or lognormal:MEAN,SIGMA ({_DEFAULT_BULK_WORDS})", read=parse_lengths
    )
    bulk_priority: str | None = _bulk(None, "sent as x-vecd-priority", word="P")
    goodput_ms: float | None = _report(
        None,
        "count the requests that were answered within MS of their arrival",
        above=0,
        at_most=1000 * _MAX_TIMEOUT_S,
        unit="milliseconds",
    )
    json: Path | None = _report(
        None, "append one JSON object a run; -: print them, and the table to stderr", word="FILE"
    )
    documents: int | None = _report(
        None, "say how long this many texts take at the measured rate", at_least=1, at_most=10**15
    )
    plot: Path | None = _report(None, "draw latency over throughput, a point a run; needs vecd[plot]", word="FILE.png")

    def __post_init__(self) -> None:
        if self.clients is not None and self.rate is not None:
            raise ValueError("--clients and --rate exclude each other")
        if self.lengths is not None and self.texts_file is not None:
            raise ValueError("--words and --texts exclude each other")
        for name, needed in _DEPENDENT:
            if getattr(self, name) is not None and getattr(self, needed) is None:
                raise ValueError(f"{flag_name(name)} means something only with {flag_name(needed)}")
        if self.texts_file is not None:
            try:
                object.__setattr__(self, "texts", read_texts(self.texts_file))
            except ValueError as error:
                raise ValueError(f"--texts: {error}") from error
        _ = self.loads  # rendered now: a text or a header that cannot be sent is found before the first run
        self._check_files()

    def _check_files(self) -> None:
        if self.plot is not None:
            if self.plot.suffix != ".png":
                raise ValueError(f"--plot: {self.plot} does not end in .png")
            if not self.plot.absolute().parent.is_dir():
                raise ValueError(f"--plot: {self.plot} is in no folder that exists")
            require_matplotlib()
        if self.json is not None and self.json != STDOUT:
            try:
                self.json.open("ab").close()
            except OSError as error:
                raise ValueError(f"--json: {self.json} cannot be written: {error.strerror}") from error

    @cached_property
    def loads(self) -> list[Load]:
        """One for each number of clients, or each rate."""
        load = partial(
            Load,
            target=self._target,
            warmup_s=self.warmup,
            duration_s=math.inf if self.requests else self.duration,
            timeout_s=self.timeout,
        )
        bulk = None
        if self.bulk_clients is not None:
            # Like the measured requests, but for texts, priority, and the deadline, of which bulk has none.
            shape = RequestShape(
                path=self.path,
                texts_per_request=self.bulk_texts or _DEFAULT_BULK_TEXTS,
                lengths=self.bulk_words or Lengths(_DEFAULT_BULK_WORDS),
                encoding_format=self.encoding_format,
                model=self.model,
                api_key=self.api_key,
                priority=self.bulk_priority,
                seed=self.seed + 1,
            )
            bulk = load(shape=shape, requests=self._render(shape, self.bulk_clients), clients=self.bulk_clients)
        max_connections = self.max_connections or DEFAULT_MAX_CONNECTIONS
        num_at_a_time = max_connections if self.rate is not None else max(self.clients or _DEFAULT_CLIENTS)
        measured = partial(
            load,
            shape=self,
            requests=self._render(self, num_at_a_time),
            max_connections=max_connections,
            num_requests=self.requests,
            goodput_ms=self.goodput_ms,
            bulk=bulk,
        )
        if self.rate is not None:
            return [measured(rate_per_s=rate_per_s) for rate_per_s in self.rate]
        return [measured(clients=clients) for clients in self.clients or _DEFAULT_CLIENTS]

    @cached_property
    def _target(self) -> Target:
        return self.read_target(self.url)

    def _render(self, shape: RequestShape, num_at_a_time: int) -> list[bytes]:
        """`num_at_a_time`: the most requests of that shape that are in progress at the same time. They differ where
        possible, because vecd computes inputs once that wait at the same time."""
        fitting = _READY_TEXTS // shape.texts_per_request
        default = max(16, min(512, fitting), min(2 * num_at_a_time, 8 * fitting))
        return render_requests(self._target, shape, self.distinct_requests or default)

    # --- in words -----------------------------------------------------------------------------------------

    def describe(self) -> str:
        length = f"{self.requests} requests" if self.requests else f"{self.duration:g} s"
        line = (
            f"{self._target}{self.path}: {self.texts_per_request} × {self._texts_name} a request, "
            f"{self.encoding_format}, {length} after {self.warmup:g} s of warm-up"
        )
        if (bulk := self.loads[0].bulk) is not None:
            texts = f"{bulk.shape.texts_per_request} × {bulk.shape.lengths}"
            line += f", beside {bulk.clients} × bulk of {texts} a request"
        return line

    @property
    def _texts_name(self) -> str:
        return str(self.lengths or TEN_WORDS) if self.texts_file is None else self.texts_file.name

    def fields(self) -> dict[str, Any]:
        """The same for programs, without the key."""
        return {
            "url": self.url,
            **{each.name: getattr(self, each.name) for each in fields(RequestShape) if each.name not in _NOT_REPORTED},
            "lengths": self._texts_name,
            "warmup_s": self.warmup,
            "timeout_s": self.timeout,
            "max_connections": None if self.rate is None else self.loads[0].max_connections,
        }


def parse_options(argv: Sequence[str]) -> BenchOptions:
    return parse(
        BenchOptions,
        argv,
        Command(
            "vecd bench",
            "Measure an embedding server: by clients that send again when they are answered, or by requests that "
            "arrive at a rate whatever the server does.",
        ),
    )
