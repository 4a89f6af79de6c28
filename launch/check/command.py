"""`vecd check`: what a model is, how it would be served here, whether rightly and how fast, and with which settings.

Owns the command's arguments, the order of its parts, and its exit codes. It reads the settings that `vecd serve` would
read, makes the same plan, and loads the engine that a worker would run; it opens no port. What it finds out about the
choice of an engine is remembered, so that the first start of the server is a quick one. Called by `supervisor`; the
parts are in the modules `check_*` beside it, and in `vecd.workers.check.orders`.
"""

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path as FilePath

from vecd.client.bench.texts import read_texts
from vecd.launch.base.exit_codes import (
    EXIT_BAD_CONFIGURATION,
    EXIT_COULD_NOT_START,
    EXIT_INTERNAL_ERROR,
    EXIT_OK,
    ConfigurationError,
    StartFailure,
)
from vecd.launch.check import model as check_model
from vecd.launch.check.advice import advise, is_disturbed
from vecd.launch.check.machine import read_machine
from vecd.launch.check.measure import Say, Speeds, Wishes, load_and_compare
from vecd.launch.check.report import Measurements, Parity, Problem, Report
from vecd.launch.check.text import render
from vecd.launch.check.weights import read_weights
from vecd.launch.config.plan import make_plan, version
from vecd.launch.config.settings import Settings, load_settings
from vecd.launch.config.tokenizer import forget
from vecd.shm.card import ModelError

log = logging.getLogger("vecd.check")

_EXIT_INTERRUPTED = 128 + signal.SIGINT
_MAX_SECONDS = 600.0


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 the model can be served, 2 bad arguments or settings, 3 it cannot, or should not, 130 interrupted.

    The report goes to standard output, stages and errors of usage to standard error.
    """
    try:
        options, rest = _parser().parse_known_args(argv)
        settings = load_settings(rest)
        wishes = _wishes(options, settings)
    except ConfigurationError as error:
        for line in error.problems:
            print(f"vecd check: {line}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    try:
        return _check(settings, wishes, is_json=options.json)
    except ConfigurationError as error:  # settings that do not fit the model or the machine
        for line in error.problems:
            print(f"vecd check: {line}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except Exception:
        log.exception("internal error")
        return EXIT_INTERNAL_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vecd check",
        usage="vecd check [MODEL] [--quick] [--json] [--texts FILE] [--seconds S] [flags of vecd serve]",
        description="Show what a model is, how it would be served on this machine, whether its vectors are right, how "
        "fast it is, and the settings that follow. MODEL, --dtype, --device, --engine, --max-tokens, --revision, "
        "--cache-dir and every other flag, variable and file mean what they mean to vecd serve.",
        epilog="Exit codes: 0 the model can be served, 2 bad usage, 3 it cannot or should not be served.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="do not measure speed")
    add("--json", action="store_true", help="print the report as one JSON object")
    add("--texts", type=FilePath, metavar="FILE", help='compare with these: one a line, or JSON objects with a "text"')
    add(
        "--seconds",
        type=float,
        default=2.5,
        metavar="S",
        help="for each dtype and length of text that is measured (2.5)",
    )
    return parser


def _wishes(options: argparse.Namespace, settings: Settings) -> Wishes:
    """Raises ConfigurationError."""
    problems, texts = [], []
    if not 0 < options.seconds <= _MAX_SECONDS:
        problems.append(f"--seconds: {options.seconds:g} given, must be above 0 and at most {_MAX_SECONDS:g}")
    if settings.engine == "dummy":
        problems.append("--engine: dummy given, which has no model to check")
    if options.texts is not None:
        try:
            texts = read_texts(options.texts)
        except ValueError as error:
            problems.append(f"--texts: {error}")
    if problems:
        raise ConfigurationError(problems)
    return Wishes(tuple(texts), options.quick, options.seconds)


def _check(settings: Settings, wishes: Wishes, *, is_json: bool) -> int:
    """Raises ConfigurationError."""
    progress = _Progress()
    # As an exception: processes and files are left behind by none.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    report = Report(version(), read_machine())
    try:
        _fill(report, settings, wishes, progress.say)
    except (ModelError, StartFailure) as error:
        report.problems.append(check_model.problem(str(error)))
    finally:
        progress.clear()
        signal.signal(signal.SIGTERM, before)
    if not _print(json.dumps(report.to_json(), ensure_ascii=False) if is_json else render(report)):
        return EXIT_INTERNAL_ERROR
    return EXIT_COULD_NOT_START if report.problems else EXIT_OK


def _print(text: str) -> bool:
    """False when it could not be written; who stops reading, as `head` does, has read enough."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is not tried again at the end
        if isinstance(error, BrokenPipeError):
            return True
        print(f"vecd check: the report cannot be written: {error.strerror}", file=sys.stderr)
        return False
    return True


def _fill(report: Report, settings: Settings, wishes: Wishes, say: Say) -> None:
    """The report, as far as it goes. Raises ModelError or StartFailure for what ends it, ConfigurationError."""
    plan = make_plan(settings)
    try:
        card = plan.workers[0].card
        report.model = check_model.describe(card, plan.gateway.model, read_weights(card), card.tokenizer_file)
        problems, report.warnings = check_model.purpose(report.model)
        report.problems += problems
        if problems:
            return  # it would load, and that would tell nothing of its vectors
        with ExitStack() as stack:
            child, report.path, warnings = load_and_compare(stack, plan, report.model, wishes, say)
            report.warnings += warnings
            report.problems += [_disagreement(a) for a in report.path.agreements if not a.is_within_bounds]
            measured = Measurements()
            if not wishes.is_quick and not report.problems:
                measured = Speeds(stack, child, plan, report.path, report.machine, wishes, say).measure()
                report.measurements = measured
                report.warnings += _disturbance(measured)
        if not report.problems:
            report.advice = advise(report.machine, _given(settings), report.path, measured)
    finally:
        forget(plan.gateway.card)


def _given(settings: Settings) -> dict[str, str | int]:
    """What says which model is served, and how much of a text: not for the machine to decide."""
    path = FilePath(settings.model).expanduser()
    model = str(path.absolute()) if settings.model and path.is_dir() else settings.model
    found = {"model": model, "revision": settings.revision, "max_tokens": settings.max_tokens}
    return {name: value for name, value in found.items() if value}


def _disturbance(measured: Measurements) -> list[str]:
    if not is_disturbed(measured):
        return []
    return [
        f"other programs ran meanwhile: a worker had {measured.core_share:.0%} of its core at worst. The figures of "
        "speed are too low; measure again on a quiet machine"
    ]


def _disagreement(parity: Parity) -> Problem:
    return Problem(
        f"the vectors are not those of {parity.against}: smallest cosine {parity.min_cosine:.5f}, largest "
        f"difference {parity.max_abs_diff:.1e} over {parity.num_texts} texts",
        "do not serve it as it is; try --dtype float32 and --engine padded, and please report it with the model's name",
    )


class _Progress:
    """What is being done, on standard error: a line that is rewritten on a terminal, else a line each."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._last = ""

    def say(self, stage: str) -> None:
        if stage != self._last:
            self._last = stage
            self._write(f"\r\x1b[Kvecd check: {stage}" if self._is_terminal else f"vecd check: {stage}\n")

    def clear(self) -> None:
        if self._is_terminal and self._last:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        with suppress(OSError):  # whoever read it has gone
            sys.stderr.write(text)
            sys.stderr.flush()
