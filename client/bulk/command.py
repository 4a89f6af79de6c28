"""`vecd embed`: rows of files in, vectors out, each exactly once, even if the run is killed meanwhile.

Owns the order of things: flags, inputs, the lock of the output, the journal, the server, the run, the final files, and
the last line on the screen. Talks only HTTP. Called as `vecd embed` or `python -m vecd.client.bulk.command`.

Exit codes: 0 OUT is complete; 1 the run ended before, and can be resumed, or OUT lacks vectors of rows and --on-bad-row
was not given; 2 nothing was begun: flags, inputs or an unfinished run do not fit; 130 and 143 interrupted, and can be
resumed.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace

import uvloop

from vecd.client.bulk.errors import EmbedError, FieldMissing, RunEnded
from vecd.client.bulk.inputs import InputSource, check_readable, find_inputs
from vecd.client.bulk.journal import Commit, Journal
from vecd.client.bulk.options import EmbedOptions, parse_options
from vecd.client.bulk.output import OutputFiles, journal_path
from vecd.client.bulk.progress import in_words
from vecd.client.bulk.run import EmbedRun
from vecd.client.bulk.server_process import start_server
from vecd.client.bulk.service import EmbeddingService
from vecd.client.connection import parse_target
from vecd.client.status_line import StatusLine

EXIT_OK, EXIT_ENDED, EXIT_NOT_BEGUN = 0, 1, 2
EXIT_BAD_ROWS = EXIT_ENDED
_PLAIN_S = 10.0
"""Between lines of progress in a log."""


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    _open_standard_streams()
    options = parse_options(sys.argv[1:] if argv is None else argv)
    line = StatusLine("vecd embed", plain_s=_PLAIN_S)
    if options.quiet:
        line.silence()
    try:
        return _embed(options, line)
    except EmbedError as error:
        line.say(str(error))
        return EXIT_NOT_BEGUN
    except (RunEnded, OSError) as error:  # the output cannot be created or finished, or a store fails
        line.say(_describe(error))
        return EXIT_ENDED
    except KeyboardInterrupt:  # before or after the run, or a second one
        line.say("interrupted")
        return 128 + signal.SIGINT


def _open_standard_streams() -> None:
    """Open those that are closed: another file would get the number of one, and be read or written instead."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def _describe(error: Exception) -> str:
    """With the file first."""
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)


def _embed(options: EmbedOptions, line: StatusLine) -> int:
    inputs = find_inputs(options.files, options.format)
    for each in inputs:
        if options.pair_with is not None and each.format == "txt":
            raise EmbedError(f"{each.name}: --pair-with names a field, and lines of text have none")
        if each.path == os.path.abspath(options.out):
            raise EmbedError(f"{each.name} is input and output")
    check_readable(inputs, options)
    with closing(OutputFiles(options)) as output:
        journal = _find_journal(options, inputs, output)
        if not journal.commit.is_complete:
            return _embed_by_server(options, inputs, output, journal, line)
        output.open(journal.model["dim"], journal.model.get("columns"))
        return _finish(options, output, journal.commit, line, "the run before was complete")


def _find_journal(options: EmbedOptions, inputs: Sequence[InputSource], output: OutputFiles) -> Journal:
    """That of the run to resume, or a new one. Raises EmbedError when something else is in the place of the output."""
    path = journal_path(options.out)
    new = Journal(options.journal_fields(), options.on_bad_row, [asdict(each) for each in inputs])
    if options.restart:
        path.unlink(missing_ok=True)
        return new
    old = Journal.load(path)
    if old is not None:
        if not old.commit.position.row and not old.commit.is_complete:
            return new  # nothing was done: the run begins anew, whatever has changed
        old.check_same(new)
        return replace(old, on_bad_row=options.on_bad_row)
    if options.out.exists():
        raise EmbedError(f"{options.out} exists; --restart replaces it")
    if not output.is_new:
        raise EmbedError(f"{options.out}.part exists, and nothing tells what it is; --restart replaces it")
    return new


def _embed_by_server(
    options: EmbedOptions, inputs: Sequence[InputSource], output: OutputFiles, journal: Journal, line: StatusLine
) -> int:
    began_at, error = time.monotonic(), None
    with ExitStack() as stack:
        if options.target is not None:
            service = EmbeddingService(options.target, options)
        else:
            serving = start_server(options.model, options.serve_flags, lambda text: line.show(lambda: text))
            url, why_gone = stack.enter_context(serving)
            service = EmbeddingService(parse_target(url), options, why_gone)
        run = EmbedRun(options, inputs, output, journal, service, line)
        try:
            uvloop.run(run.run())
        except FieldMissing:  # no row had a vector
            journal_path(options.out).unlink(missing_ok=True)
            output.discard()
            raise
        except (RunEnded, OSError) as ended:
            error = ended
    line.clear()
    num_rows = run.commit.position.row
    if run.signal_number or error is not None:
        why = _describe(error) if error is not None and not run.signal_number else "interrupted"
        done = f"{num_rows:,} rows are done, the same command goes on behind them" if num_rows else "no row is done"
        line.say(f"{why}; {done}")
        return 128 + run.signal_number if run.signal_number else EXIT_ENDED
    took_s = time.monotonic() - began_at
    num_rows -= journal.commit.position.row
    how = f"{num_rows:,} in {in_words(took_s)}, {num_rows / took_s:,.0f} a second"
    return _finish(options, output, run.commit, line, how)


def _finish(options: EmbedOptions, output: OutputFiles, commit: Commit, line: StatusLine, how: str) -> int:
    """Make the final files, and write the last line."""
    output.finish(commit.lengths, commit.num_written)
    journal_path(options.out).unlink(missing_ok=True)
    line.say(f"{options.out}: {commit.num_written:,} rows ({how})")
    if not commit.num_rejected:
        return EXIT_OK
    is_one = commit.num_rejected == 1
    rows, verb = ("1 row", "is") if is_one else (f"{commit.num_rejected:,} rows", "are")
    if options.on_bad_row == "skip":
        effect = f"{'it' if is_one else 'they'} {verb} left out"
    else:
        blank = "NaN" if options.output_format == "npy" else "null"
        what = "results are" if output.has_columns else f"vector{'' if is_one else 's'} {verb}"
        effect = f"{'its' if is_one else 'their'} {what} {blank}"
    line.say(f"{rows} could not be embedded; {effect}. The reasons are in {options.out}.rejected.jsonl")
    return EXIT_OK if options.accepts_bad_rows else EXIT_BAD_ROWS


if __name__ == "__main__":
    sys.exit(main())
