"""`vecd embed`: rows of files in, vectors out, exactly once each, whatever dies meanwhile.

Owns the order of things: flags, inputs, the output's lock, the journal, the server, the run, the final files; and what
is said at the end. Talks only HTTP. Called as `vecd embed` or `python -m vecd.client.bulk.command`.

Exit codes: 0 OUT is there; 1 the run ended before that, and can go on; 2 nothing was begun: flags, inputs or an
unfinished run do not go together; 130 and 143 interrupted, and can go on.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import uvloop

from vecd.client.bulk.inputs import Input, check_readable, find_inputs
from vecd.client.bulk.journal import Commit, Journal, JournalError
from vecd.client.bulk.options import Options, parse_options
from vecd.client.bulk.output import Output, journal_path
from vecd.client.bulk.own_server import StartFailed, own_server
from vecd.client.bulk.parts import PartError
from vecd.client.bulk.progress import BulkLine, in_words
from vecd.client.bulk.rows import InputError
from vecd.client.bulk.session import Session
from vecd.client.connection import parse_target

EXIT_OK, EXIT_ENDED, EXIT_NOT_BEGUN = 0, 1, 2


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    _open_standard_streams()
    options = parse_options(sys.argv[1:] if argv is None else argv, os.environ)
    line = BulkLine(is_quiet=options.is_quiet)
    try:
        return _embed(options, line)
    except (InputError, JournalError, PartError, StartFailed) as error:
        line.say(str(error))
        return EXIT_NOT_BEGUN
    except OSError as error:  # the output cannot be made, or not be finished
        line.say(_told(error))
        return EXIT_ENDED
    except KeyboardInterrupt:  # while no run waits for signals, or for the second time
        line.say("interrupted")
        return 128 + signal.SIGINT


def _open_standard_streams() -> None:
    """Those that were closed lead nowhere: else a file of ours would get the number of one, and what is said there."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def _told(error: Exception) -> str:
    """With the file first, as all that is said of files."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _embed(options: Options, line: BulkLine) -> int:
    inputs = find_inputs(options.paths, options.input_format)
    _check_not_input(options, inputs)
    check_readable(inputs, options.shape)
    with _locked(options) as output:
        journal = _unfinished(options, inputs, output)
        if journal is None or not journal.commit.is_complete:
            return _embed_by_server(options, inputs, output, journal, line)
        output.choose_form(
            options.output_format, journal.model["dim"], options.asked.dtype, options.shape.keep,
            on_bad_row=options.on_bad_row,
        )  # fmt: skip
        return _finish(options, output, journal.commit, line, "the run before was complete")


def _check_not_input(options: Options, inputs: Sequence[Input]) -> None:
    """Raises InputError."""
    for each in inputs:
        if each.path == os.path.abspath(options.out):
            raise InputError(f"{each.name} is input and output")


@contextmanager
def _locked(options: Options) -> Iterator[Output]:
    output = Output(options.out)
    try:
        yield output
    finally:
        if not journal_path(options.out).exists():
            output.remove_if_new()
        output.close()


def _unfinished(options: Options, inputs: Sequence[Input], output: Output) -> Journal | None:
    """The run to go on with. Raises JournalError, PartError."""
    path = journal_path(options.out)
    if options.restarts:
        path.unlink(missing_ok=True)
        return None
    journal = Journal.load(path)
    if journal is not None and not journal.commit.position.row and not journal.commit.is_complete:
        return None  # nothing was done: whatever is different now, it begins anew
    if journal is not None:
        journal.check_same(options.fields(), options.on_bad_row, [each.identity() for each in inputs])
    elif options.out.exists():
        raise PartError(f"{options.out} exists; --restart replaces it")
    elif not output.is_new:
        raise PartError(f"{options.out}.part exists, and nothing tells what it is; --restart replaces it")
    return journal


def _embed_by_server(
    options: Options, inputs: Sequence[Input], output: Output, journal: Journal | None, line: BulkLine
) -> int:
    began_at = time.monotonic()
    with _server(options, line) as (url, why_gone):
        session = Session(options, inputs, output, journal, line)
        outcome = uvloop.run(session.run(parse_target(url), why_gone))
    line.clear()
    if outcome.signal_number:
        line.say(f"interrupted; {_kept(outcome.commit)}")
        return 128 + outcome.signal_number
    if outcome.error is not None:
        line.say(f"{_told(outcome.error)}; {_kept(outcome.commit)}")
        return EXIT_ENDED
    took_s = time.monotonic() - began_at
    num_before = 0 if journal is None else journal.commit.position.row
    num_rows = outcome.commit.position.row - num_before
    how = f"{num_rows:,} in {in_words(took_s)}, {num_rows / took_s:,.0f} a second"
    return _finish(options, output, outcome.commit, line, how)


@contextmanager
def _server(options: Options, line: BulkLine) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """Where it listens, and what has ended it for good. Raises StartFailed."""
    if options.url is not None:
        yield options.url, lambda: None
    else:
        with own_server(options.model, options.serve_flags, lambda text: line.show(lambda: text)) as server:
            yield server.url, server.why_gone


def _kept(commit: Commit) -> str:
    if not commit.position.row:
        return "no row is done"
    return f"{commit.position.row:,} rows are done, the same command goes on behind them"


def _finish(options: Options, output: Output, commit: Commit, line: BulkLine, how: str) -> int:
    """Make the final files, and say what there is."""
    output.finish(commit.lengths, commit.num_written)
    journal_path(options.out).unlink(missing_ok=True)
    line.say(f"{options.out}: {commit.num_written:,} rows ({how})")
    if commit.num_rejected:
        rows = "1 bad row is" if commit.num_rejected == 1 else f"{commit.num_rejected:,} bad rows are"
        what = "left out" if options.on_bad_row == "skip" else "blank"
        line.say(f"{rows} {what}: {options.out}.rejected.jsonl")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
