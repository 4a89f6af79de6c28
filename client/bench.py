"""`vecd bench`: how many embeddings a second a server gives, and how long each caller waits for them.

Owns the command line: argv → loads → runs → a table, and a JSON line a run. Talks only HTTP, so it measures
any server with the OpenAI API. Called as `vecd bench` or `python -m client.bench`; the measuring is
`client.load`.
"""

import argparse
import asyncio
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import uvloop

from client import report
from client.connection import parse_target
from client.load import ClosedLoop, Load, Unreachable
from client.payload import RequestShape, render_requests
from client.tally import Result
from client.texts import FixedWords, parse_lengths

INTERRUPTED = "interrupted"
"""Why a run ended early, when Ctrl-C ended it."""
_EXIT_INTERRUPTED = 128 + signal.SIGINT


async def run_loads(loads: Sequence[Load], on_result: Callable[[Load, Result], None]) -> list[Result]:
    """Run `loads` one after the other, telling `on_result` of each as it ends.

    Raises Unreachable when a run finds no server. Side effects: Ctrl-C ends the run under way and skips the
    rest; a second one ends the process.
    """
    results: list[Result] = []
    for load in loads:
        closed_loop = ClosedLoop(load)
        _stop_on_interrupt(closed_loop)
        results.append(await closed_loop.run())
        on_result(load, results[-1])
        if results[-1].ended_early is not None:
            break
    return results


def _stop_on_interrupt(closed_loop: ClosedLoop) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        closed_loop.stop(INTERRUPTED)

    loop.add_signal_handler(signal.SIGINT, stop)


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 every run had successes and its time, 1 one had not, 2 bad arguments, 130 interrupted."""
    parser = _make_parser()
    arguments = parser.parse_args(argv)
    try:
        loads = _plan(arguments)
    except ValueError as error:
        parser.error(str(error))
    _allow_connections(max(load.clients for load in loads))
    print(_describe(arguments))
    print(report.heading(), flush=True)
    try:
        results = uvloop.run(run_loads(loads, lambda load, result: _tell(arguments, result)))
    except Unreachable as error:
        print(f"vecd bench: {error}", file=sys.stderr)
        return 1
    if results[-1].ended_early == INTERRUPTED:
        return _EXIT_INTERRUPTED
    return 0 if all(result.num_requests and result.ended_early is None for result in results) else 1


def _plan(arguments: argparse.Namespace) -> list[Load]:
    """One load for each number of clients. Raises ValueError with a line that says what is wrong."""
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise ValueError(f"--json: {arguments.json} is in no folder that exists")
    requests = render_requests(arguments.url, _shape(arguments))
    return [
        Load(
            target=parse_target(arguments.url),
            requests=requests,
            texts_per_request=arguments.texts_per_request,
            clients=clients,
            warmup_s=arguments.warmup,
            duration_s=arguments.duration,
            num_requests=arguments.requests,
            timeout_s=arguments.timeout,
        )
        for clients in arguments.clients
    ]


def _shape(arguments: argparse.Namespace) -> RequestShape:
    return RequestShape(
        path=arguments.path,
        lengths=arguments.lengths or FixedWords(arguments.words),
        texts_per_request=arguments.texts_per_request,
        encoding_format=arguments.encoding_format,
        model=arguments.model,
        api_key=arguments.api_key,
        seed=arguments.seed,
    )


def _tell(arguments: argparse.Namespace, result: Result) -> None:
    print(report.row(result))
    for note in report.notes(result):
        print(f"{'':10}{note}")
    sys.stdout.flush()
    if arguments.json is not None:
        with arguments.json.open("ab") as file:
            file.write(orjson.dumps(_record(arguments, result), option=orjson.OPT_APPEND_NEWLINE))


def _record(arguments: argparse.Namespace, result: Result) -> dict[str, Any]:
    """One run with what it was asked to do, and never the key."""
    return {
        "ended_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "url": arguments.url,
        "path": arguments.path,
        "model": arguments.model,
        "encoding_format": arguments.encoding_format,
        "texts_per_request": arguments.texts_per_request,
        "lengths": str(_shape(arguments).lengths),
        "seed": arguments.seed,
        "warmup_s": arguments.warmup,
        "timeout_s": arguments.timeout,
        **report.fields(result),
    }


def _describe(arguments: argparse.Namespace) -> str:
    length = f"{arguments.requests} requests" if arguments.requests else f"{arguments.duration:g} s"
    return (
        f"{parse_target(arguments.url)}{arguments.path}: {arguments.texts_per_request} × "
        f"{_shape(arguments).lengths} a request, {arguments.encoding_format}, {length} "
        f"after {arguments.warmup:g} s of warm-up"
    )


def _allow_connections(num_connections: int) -> None:
    """Raise this process's limit of open files as far as it may go; the shell's is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(num_connections + 64, hard) if hard != resource.RLIM_INFINITY else num_connections + 64
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# --- argv -------------------------------------------------------------------------------------------------


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vecd bench",
        description="Measure an embedding server: each client asks again when it is answered.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="http://host:port or unix:/path")
    add("--path", default="/v1/embeddings", help="of the OpenAI-shaped endpoint")
    add("--clients", type=_counts, default="1,16,64", help="connections; several numbers are runs in a row")
    add("--duration", type=_seconds, default=10.0, metavar="S", help="measured seconds of a run")
    add("--warmup", type=_seconds_or_none, default=2.0, metavar="S", help="seconds before that")
    add("--requests", type=_count, metavar="N", help="measure this many requests instead of a time")
    add("--texts-per-request", type=_count, default=1, metavar="N", help="inputs in each request")
    add("--words", type=_count, default=10, metavar="N", help="in each text")
    add(
        "--lengths",
        type=parse_lengths,
        metavar="lognormal:MEAN,SIGMA",
        help="words in each text, instead of --words",
    )
    add("--encoding-format", choices=("base64", "float"), default="base64", help="how vectors are asked for")
    add("--model", help="left out of the requests when not given")
    add("--api-key", help="sent as a bearer token")
    add("--seed", type=int, default=0, help="of the texts")
    add("--timeout", type=_seconds, default=30.0, metavar="S", help="longest wait for one answer")
    add("--json", type=Path, metavar="FILE", help="append one JSON object a run")
    return parser


def _count(value: str) -> int:
    count = int(value)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return count


def _counts(value: str) -> list[int]:
    return [_count(part) for part in value.split(",")]


def _seconds_or_none(value: str) -> float:
    seconds = float(value)
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} is no length of time")
    return seconds


def _seconds(value: str) -> float:
    if float(value) == 0:
        raise argparse.ArgumentTypeError("0 seconds measure nothing")
    return _seconds_or_none(value)


if __name__ == "__main__":
    sys.exit(main())
