"""`vecd bench`: how many embeddings a second a server gives, and how long each request takes.

Owns the order of the runs and their output: a table, a JSON line a run, a plot. Talks only HTTP, so it measures any
server with the OpenAI API.
"""

import asyncio
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TextIO

import orjson
import uvloop

from vecd.base.status_line import StatusLine
from vecd.client.bench import report
from vecd.client.bench.load import Load, Unreachable
from vecd.client.bench.options import STDOUT, BenchOptions, parse_options
from vecd.client.bench.plot import Point, draw_latency
from vecd.client.bench.report import RunResult
from vecd.client.bench.run import LoadRun

INTERRUPTED = "interrupted"
"""Why a run ended early, if Ctrl-C ended it."""
_EXIT_INTERRUPTED = 128 + signal.SIGINT


async def run_loads(
    loads: Sequence[Load],
    on_result: Callable[[RunResult], None],
    on_progress: Callable[[str], None] | None = None,
) -> list[RunResult]:
    """Run `loads` one after the other, calling `on_result` at the end of each and `on_progress` meanwhile.

    Raises Unreachable when a run finds no server. Side effects: Ctrl-C ends the run under way and skips the rest; a
    second one ends the process.
    """
    results: list[RunResult] = []
    for load in loads:
        run = LoadRun(load, on_progress)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, _interrupt, run)
        results.append(await run.run())
        on_result(results[-1])
        if results[-1].ended_early is not None:
            break
    return results


def _interrupt(run: LoadRun) -> None:
    asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
    run.stop(INTERRUPTED)


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 every run had successes and its time, 1 one had not, 2 bad arguments, 130 interrupted."""
    try:
        return _bench(parse_options(argv))
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except (Unreachable, OSError) as error:  # OSError: the table, the JSON file or the plot could not be written
        print(f"vecd bench: {error}", file=sys.stderr)
        return 1


def _bench(options: BenchOptions) -> int:
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)  # the shell's own limit is often 1,024
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    table = sys.stderr if options.json == STDOUT else sys.stdout
    print(options.describe(), file=table)
    print(report.heading(), file=table, flush=True)
    line = StatusLine("vecd bench", is_live=sys.stderr.isatty() and sys.stdout.isatty())
    points: list[Point] = []

    def write(result: RunResult) -> None:
        line.clear()
        _write(options, result, table)
        latencies_ms = result.latencies_ms()
        throughput_per_s, name = result.per_s(result.num_requests), report.name(result.load)
        points.append(Point(throughput_per_s, latencies_ms["p50_ms"], latencies_ms["p99_ms"], name))

    try:
        results = uvloop.run(run_loads(options.loads, write, lambda progress: line.show(lambda: progress)))
    finally:
        line.clear()
        if options.plot is not None and points:
            draw_latency({options.url: points}, options.plot, options.describe())
    if results[-1].ended_early == INTERRUPTED:
        return _EXIT_INTERRUPTED
    return 0 if all(result.num_requests and result.ended_early is None for result in results) else 1


def _write(options: BenchOptions, result: RunResult, table: TextIO) -> None:
    print(report.row(result), file=table)
    for note in report.notes(result):
        print(f"{'':{report.FIRST_WIDTH}} {note}", file=table)
    hours = None
    if options.documents is not None and result.num_texts:
        hours = options.documents / result.per_s(result.num_texts) / 3600
        print(f"{'':{report.FIRST_WIDTH}} {options.documents:,} such texts take {hours:,.3g} server-hours", file=table)
    table.flush()
    if options.json is None:
        return
    # With its options, without the key.
    fields = {**options.fields(), **report.fields(result), "documents": options.documents, "documents_hours": hours}
    line = orjson.dumps({"ended_at": datetime.now(UTC).isoformat(timespec="seconds"), **fields}) + b"\n"
    if options.json == STDOUT:
        print(line.decode(), end="", flush=True)
    else:
        with options.json.open("ab") as file:
            file.write(line)
