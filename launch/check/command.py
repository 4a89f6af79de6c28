"""`vecd check`: describes a model and its path here, compares its vectors, measures its speed.

Owns the command's arguments, the order of its parts, and its exit codes. It makes the plan of `vecd serve` from the
same settings, and loads the engine that a worker would run; it opens no port. The selection of an engine is remembered.
"""

# ruff: noqa: RUF009 (a flag is a dataclasses.field)

import itertools
import logging
import os
import random
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import orjson

from vecd.base.failures import (
    EXIT_BAD_CONFIGURATION,
    EXIT_COULD_NOT_START,
    EXIT_INTERNAL_ERROR,
    EXIT_INTERRUPTED,
    EXIT_OK,
    ConfigurationError,
    StartFailure,
)
from vecd.base.files import JsonMapping, dump
from vecd.base.flags import Command, FieldValues, flag, flags_in
from vecd.base.programs import NEEDS_TORCH, has_torch
from vecd.base.status_line import StatusLine
from vecd.client.bench.texts import Lengths, draw_text, read_texts
from vecd.launch.check import model as check_model
from vecd.launch.check.report import Problem, Report, new_report, render
from vecd.launch.check.table import known_as_json, known_as_text, markdown_head, markdown_row, read_names
from vecd.launch.config.models import ModelEntry, load_models, name_of, split_source
from vecd.launch.config.plan import Plan, make_plans, version
from vecd.launch.config.settings import load_settings
from vecd.launch.config.tokens import tokenize
from vecd.model.card import ModelError
from vecd.model.known import known_models
from vecd.shm.job import run_job
from vecd.shm.settings import Settings
from vecd.workers.batch import ReportProgress
from vecd.workers.check.order import Order
from vecd.workers.machine import available_mb

log = logging.getLogger("vecd.check")

_LEAST_CORE_SHARE = 0.9
"""Below it other programs used the same core: the speeds are too low."""
_TIMEOUT_S = 600.0
"""Without a word from a process; `--start-timeout` can make it longer."""


_COMMAND = Command(
    "vecd check",
    "Describe a model and how it would be served here, check its vectors, and measure its speed. MODEL, --dtype, "
    "--device, --engine, --max-tokens, --revision, --cache-dir and every other flag, variable and file mean what they "
    "mean to vecd serve. Exit codes: 0 the model can be served, 2 bad usage, 3 it cannot or should not be served.",
    "vecd check [MODEL] [--all] [--quick] [--json] [--remember] [--texts FILE] [--seconds SECONDS] "
    "[flags of vecd serve]\n       vecd check --table FILE [--quick] [flags of vecd serve]\n       "
    "vecd check --known [--json]\n       vecd check --fleet URL URL… [--json] [--api-key KEY]",
)


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    all: bool = flag(False, "check every configured model")
    fleet: bool = flag(False, "compare running servers (vecd check --fleet --help)")
    known: bool = flag(False, "list the models that have a name of one word, and check nothing")
    table: FilePath | None = flag(
        None, "check the models in this file, [NAME=]MODEL a line, and print a table in Markdown", word="FILE"
    )
    quick: bool = flag(False, "do not measure speed")
    json: bool = flag(False, "print the report as one JSON object")
    remember: bool = flag(False, "if the vectors are right, write the reference's beside the model")
    texts: FilePath | None = flag(None, 'compare with these: one a line, or JSON objects with a "text"', word="FILE")
    seconds: float = flag(2.5, "to measure each dtype and length of text (2.5)", above=0, at_most=600, unit="seconds")

    @property
    def takes_several(self) -> bool:
        return self.all or self.table is not None


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 the model can be served, 2 bad arguments or settings, 3 it cannot, or should not, 130 interrupted.
    With --all and --table it is 3 if one of the models cannot. Those of --fleet are `vecd.launch.check.fleet`'s.

    The report goes to standard output, stages and errors of usage to standard error.
    """
    if any(argument.partition("=")[0] == "--fleet" for argument in argv):
        from vecd.launch.check.fleet import main as check_fleet

        return check_fleet(argv)
    try:
        given = FieldValues(flags_in(CheckOptions))
        rest = given.add_argv(argv, _COMMAND)
        options = CheckOptions(**given.read())
        if options.known:
            models = known_models()
            _print(orjson.dumps(known_as_json(models)).decode() if options.json else known_as_text(models))
            return EXIT_OK
        lines = _read_table(options)
        settings = load_settings(rest, beside=given)
        tables = settings.given.tables if isinstance(settings.given.tables, Mapping) else {}
        if others := [model for model in lines if model not in tables]:
            settings = load_settings([*rest, *others], beside=given)
        comments = {line if line in tables else split_source(line)[1]: why for line, why in lines.items()}
        entries = load_models(settings)
        if options.table is not None:
            by_key = {key: entry for entry in entries for key in (entry.settings.model, entry.name)}
            entries = tuple(by_key[key] for key in comments if key in by_key)
        if len(entries) > 1 and not options.takes_several:
            names = ", ".join(entry.name for entry in entries)
            raise ConfigurationError(f"MODEL: vecd check takes one model, or --all, and these are given: {names}")
        return _check(entries, options, comments)
    except ConfigurationError as error:
        for line in error.problems:
            print(f"vecd check: {line}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception:
        log.exception("internal error")
        return EXIT_INTERNAL_ERROR


def _read_table(options: CheckOptions) -> dict[str, str]:
    """As `read_names`; empty without --table. Raises ConfigurationError."""
    path = options.table
    if path is None:
        return {}
    if options.json:
        raise ConfigurationError("--json: given with --table, which prints Markdown; --all --json has the same figures")
    try:
        found = read_names(sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--table: {path}: cannot be read: {error}") from None
    if not found:
        raise ConfigurationError(f"--table: {path}: names no model")
    return found


def _check(entries: Sequence[ModelEntry], options: CheckOptions, comments: Mapping[str, str]) -> int:
    """Print each report when it is complete, unless all are to be one object. `comments`: of the table, by name or by
    model. Returns the exit code. Raises ConfigurationError for the arguments; of several models, what is wrong with
    the settings of one is a problem of its report."""
    texts: list[str] = []
    for entry in entries:
        texts = _read_texts(options, entry.settings)
    reports: dict[str, Report] = {}
    if options.table is not None:
        _print(markdown_head())
    for entry in entries:
        name = entry.name or name_of(entry.settings.model)
        try:
            reports[name] = report = _examine(entry, texts, options)
        except ConfigurationError as error:
            if not options.takes_several:
                raise
            problems = [Problem(problem, "change the setting") for problem in error.problems]
            reports[name] = report = new_report(version(), *problems)
        if options.table is not None:
            _print(markdown_row(name, report, comments.get(name) or comments.get(entry.settings.model, "")))
        elif not options.json:
            _print(f"# {name}\n\n{render(report)}\n" if options.all else render(report))
    failed = [name for name, report in reports.items() if report["problems"]]
    described = {name: {"is_servable": name not in failed, **report} for name, report in reports.items()}
    if options.json:
        whole = {"is_servable": not failed, "models": described} if options.all else next(iter(described.values()))
        _print(orjson.dumps(whole).decode())
    elif options.all and options.table is None:
        which = f"{len(failed)} of {len(reports)} models cannot be served: {', '.join(failed)}"
        _print(which if failed else "All models can be served.")
    return EXIT_COULD_NOT_START if failed else EXIT_OK


def _read_texts(options: CheckOptions, settings: Settings) -> list[str]:
    """The user's texts; empty for the built-in ones. Raises ConfigurationError for these and for other options."""
    problems, texts = [], []
    if settings.engine == "dummy":
        problems.append("--engine: dummy given, which has no model to check")
    if not has_torch():
        problems.append(f"the reference model {NEEDS_TORCH}")
    if options.texts is not None:
        try:
            texts = read_texts(options.texts)
        except ValueError as error:
            problems.append(f"--texts: {error}")
    if problems:
        raise ConfigurationError(*problems)
    return texts


def _print(text: str) -> None:
    """A reader that stops early, such as `head`, is no error. Raises SystemExit for another."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again at exit
        if not isinstance(error, BrokenPipeError):
            print(f"vecd check: the report cannot be written: {error.strerror}", file=sys.stderr)
            raise SystemExit(EXIT_INTERNAL_ERROR) from None


def _examine(entry: ModelEntry, texts: list[str], options: CheckOptions) -> Report:
    """The report, with as much as a faulty model allows. Raises ConfigurationError."""
    status = StatusLine("vecd check", plain_s=0)

    def show(stage: str) -> None:
        status.clear()  # so that it is drawn at once
        status.show(lambda: stage)

    # An exception, so that processes and files are cleaned up.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    report = new_report(version())
    try:
        _fill(report, entry, texts, options, show)
    except (ModelError, StartFailure) as error:
        report["problems"].append(check_model.problem(str(error)))
    finally:
        status.clear()
        signal.signal(signal.SIGTERM, before)
    return report


def _fill(report: Report, entry: ModelEntry, texts: list[str], options: CheckOptions, show: ReportProgress) -> None:
    """Fill the report as far as possible. Raises ModelError or StartFailure for what ends it, ConfigurationError."""
    [plan], settings = make_plans([entry]), entry.settings
    try:
        report["model"] = model = check_model.describe(plan.workers[0].card, plan.gateway.model)
        report["problems"], report["warnings"] = check_model.purpose(model)
        if report["problems"]:
            return  # it would load, and its vectors would mean nothing
        timeout_s = max(_TIMEOUT_S, settings.start_timeout)
        compared, tokenized = _tokenize(plan, report, texts, timeout_s, show)
        order = Order(
            config=plan.workers[0],
            texts=compared,
            **tokenized,
            num_parameters=model["num_parameters"],
            stored_dtype="".join(model["weights_dtypes"][:1]),
            max_tokens=plan.gateway.max_tokens,
            available_mb=available_mb(),
            seconds=0 if options.quick else options.seconds,
            is_to_remember=options.remember,
        )
        title = f"{model['folder']}: the process that checks the model"
        for name, value in run_job("check", title, show, timeout_s, **dump(order)):
            report[name] = value
        path = report["path"]
        wrong = [one for one in path["agreements"] if not one["is_within_bounds"]]
        report["problems"] += [disagreement(path["outputs"], one) for one in wrong]
        if plan.workers[0].card.export_file and not path["probes"]:
            report["warnings"].append("the vectors were compared with nothing; vecd serve needs --unverified, too")
        speeds = (report["measurements"] or {"speeds": ()})["speeds"]
        core_share = min((speed["core_share"] for speed in speeds), default=1.0)
        if core_share < _LEAST_CORE_SHARE:
            report["warnings"].append(
                f"other programs ran meanwhile: a worker had {core_share:.0%} of its core at worst. The "
                "figures of speed are too low; measure again on a quiet machine"
            )
    finally:
        plan.close()


def _tokenize(
    plan: Plan, report: Report, texts: list[str], timeout_s: float, show: ReportProgress
) -> tuple[list[str], dict[str, list[Any]]]:
    """The texts to compare, and the fields of `Order` about their tokens. Adds warnings. Raises ModelError."""
    show("tokenizing")
    candidates, max_tokens = texts[: _MAX_TEXTS + 1] or _built_in_texts(), plan.gateway.max_tokens
    found = tokenize(plan.gateway.card, max_tokens, candidates, timeout_s, show)
    sequences, num_truncated = found["sequences"], found["num_truncated"]
    count = _affordable([len(ids) for ids in sequences], report["model"]["num_parameters"])
    if count < len(texts):
        report["warnings"].append(f"the first {count} of {len(texts)} texts were compared, to limit the time")
    if num_truncated and texts:
        report["warnings"].append(f"{num_truncated} of the texts are longer than {max_tokens} tokens, and were cut")
    return candidates[:count], {name: found[name][:count] for name in ("sequences", "borders", "kept")}


def disagreement(outputs: str, found: JsonMapping) -> Problem:
    cosine = found["min_cosine"]  # scores have none
    figures = f"{found['same_order']:.1%} in the same order" if cosine is None else f"smallest cosine {cosine:.5f}"
    return Problem(
        f"the {outputs} are not those of {found['against']}: {figures}, largest "
        f"difference {found['max_abs_diff']:.1e} over {found['num_texts']} texts",
        "do not serve it as it is; try --dtype float32 and --engine padded, and please report it with the model's name",
    )


# --- the texts that are compared ----------------------------------------------------------------------------------

_MAX_TEXTS = 200
_MAX_PRODUCTS = 5e11
"""Multiplications by weights for all texts together: about 10 s on a core."""
_LEAST_TOKENS = 500
_WORDS = (1, 8, 180, 3, 25, 400, 12, 50, 5, 100, 2, 35)
_AWKWARD = (
    "Ünïcödé, ﬁ ligatures and e\u0301 combining",
    "你好，世界。这是一个测试。",
    "🙂🙃 👩‍👩‍👧‍👦 🇪🇺",
    "https://example.org/a?b=c&d=%20#e f(x) = x**2; // 3.14159e-10",
    "   blanks \t and\n\nlines   ",
    "word" * 60,
)


def _built_in_texts() -> list[str]:
    """Texts of 1 to 400 words, some unusual ones, and a long one; the same at every call."""
    rng = random.Random(0)
    return [*(draw_text(Lengths(count), rng) for count in _WORDS * 3), *_AWKWARD, draw_text(Lengths(1500), rng)]


def _affordable(lengths: Sequence[int], num_parameters: int) -> int:
    """How many of the texts with these numbers of tokens, from the first on, a model of this size can afford."""
    most = max(_LEAST_TOKENS, int(_MAX_PRODUCTS / max(1, num_parameters)))
    return max(1, sum(total <= most for total in itertools.accumulate(lengths[:_MAX_TEXTS])))
