"""`vecd embed`: rows of files in, vectors out, each exactly once, even if the run is killed meanwhile.

Owns the order of things: flags, the server, one output or a folder of them, and the exit code. Talks only HTTP.

Exit codes: 0 OUT is complete, or all outputs are; 1 the run ended before, and can be resumed, or OUT lacks vectors of
rows and --on-bad-row was not given; 2 nothing was begun: flags, inputs or an unfinished run do not fit; 130 and 143
interrupted, and can be resumed.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

import uvloop

from vecd.base.status_line import StatusLine
from vecd.client.embed.files import OutputFiles, beside_final
from vecd.client.embed.inputs import check_readable, file_key, find_inputs
from vecd.client.embed.options import (
    USUAL_PACE,
    EmbedError,
    EmbedOptions,
    Interrupted,
    Pace,
    RunEnded,
    parse_options,
    told,
)
from vecd.client.embed.outputs import OutputFolder
from vecd.client.embed.run import EmbedRun, keep_telling, until_interrupted
from vecd.client.embed.service import EmbeddingService
from vecd.client.local_server import NotStarted, local_server

EXIT_OK = 0


def main(argv: Sequence[str], pace: Pace = USUAL_PACE) -> int:
    options = parse_options(argv, pace)
    line = StatusLine("vecd embed", plain_s=pace.plain_s)
    if options.quiet:
        line.silence()
    try:
        return (_embed_one if options.output_dir is None else _embed_many)(options, line)
    except (EmbedError, RunEnded, OSError) as error:
        return _tell(line, error)
    except KeyboardInterrupt:  # before or after the run, or a second one
        return _tell(line, Interrupted(signal.SIGINT))


def _tell(line: StatusLine, error: Exception, more: str = "") -> int:
    """Say why the command ends. Returns the exit code."""
    line.say(told(error) + more)
    return error.exit_code if isinstance(error, EmbedError | RunEnded) else RunEnded.exit_code


def _embed_one(options: EmbedOptions, line: StatusLine) -> int:
    inputs = find_inputs(options.files, options.format)
    replaced = {file_key(str(path)) for path in (options.path, *beside_final(options.path))}
    for each in inputs:
        if file_key(each.path) in replaced:
            raise EmbedError(f"{each.name} is input and output")
    check_readable(inputs, options)
    with closing(OutputFiles(options)) as files:
        files.resume(inputs)
        if not files.is_complete:
            try:
                _run(options, line, lambda service: EmbedRun(options, inputs, files, service, line).embed())
            except (RunEnded, OSError) as error:
                num_rows = files.journal.commit.position.row
                done = f"{num_rows:,} rows are done, the same command goes on behind them"
                return _tell(line, error, f"; {done if num_rows else 'no row is done'}")
        line.say(f"{options.path}: {files.finish()}")
        files.forget()
        if rejected := files.describe_rejected(str(options.path)):
            line.say(rejected)
        return RunEnded.exit_code if rejected and not options.on_bad_row else EXIT_OK


def _embed_many(options: EmbedOptions, line: StatusLine) -> int:
    folder = OutputFolder(options, line)
    code = EXIT_OK
    if left := folder.find_left():
        try:
            _run(options, line, lambda service: folder.run(service, left))
        except (RunEnded, OSError) as error:
            code = _tell(line, error)
    is_complete = folder.tell_end()
    return code if code > RunEnded.exit_code else EXIT_OK if is_complete else RunEnded.exit_code


def _run(
    options: EmbedOptions, line: StatusLine, work: Callable[[EmbeddingService], Coroutine[Any, Any, None]]
) -> None:
    """Await `work` with the server of the run, which is started if none is named. Raises EmbedError, and RunEnded or
    OSError when rows are left."""

    async def with_service(service: EmbeddingService) -> None:
        telling = asyncio.create_task(keep_telling(service, line, options.retry_for))
        try:
            async with service.client:
                await work(service)
        finally:
            telling.cancel()

    arguments = [*([options.model] if options.model else []), *options.serve_flags]
    server: AbstractContextManager[tuple[str, Callable[[], str | None]]] = (
        local_server(arguments, lambda text: line.show(lambda: text), shared=options.shares_server)
        if options.url is None
        else nullcontext((options.url, lambda: None))
    )
    try:
        with server as (url, why_gone):
            service = EmbeddingService(options.read_target(url), options, why_gone)
            uvloop.run(until_interrupted(with_service(service)))
    except NotStarted as failed:
        raise EmbedError(str(failed)) from failed
