"""The report of `vecd check` as plain text: aligned, without colours, the same on a terminal, in a pipe and in a log.

Owns the layout: labelled lines (`_facts`) and columns (`_table`). Pure. Called by `vecd.launch.check.command`.
"""

import json
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vecd.launch.check.machine import FLAGS
from vecd.launch.check.report import Advice, Machine, Measurements, Model, Path, Report, Setting

WIDTH = 118
_INDENT, _LABEL_WIDTH = "  ", 16
_MAX_LABELS = 8
_MAX_RESULT = 60
"""Characters of a problem in the table of several models."""


def render(report: Report) -> str:
    """All parts that the report has; the result comes last."""
    sections = [("Machine", _facts(_machine(report.machine)))]
    if report.model is not None:
        sections.append(("Model", _facts(_model(report.model))))
    if report.path is not None:
        sections += [("Path", _facts(_path(report.path))), ("Parity", _parity(report.path))]
    if report.measurements is not None:
        sections.append(("Speed", _speeds(report.measurements, report.model)))
    if report.advice is not None:
        sections.append(("Recommended", _advice(report.advice)))
    result = [_line("warning: ", warning, "", 9) for warning in report.warnings]
    for problem in report.problems:
        result += [_line("problem: ", problem.what, "", 9), _line("do this: ", problem.suggestion, "", 9)]
    if report.reference_file is not None:
        result.append(_line("reference vectors: ", f"written to {report.reference_file}", "", 19))
    if not report.problems:
        result.append("This model can be served.")
    return "\n\n".join(["\n".join([title, *lines]) for title, lines in sections] + ["\n".join(result)])


def render_all(reports: Mapping[str, Report]) -> str:
    """What the reports of several models come to, by the names of the models."""
    lines = list(_table("model|kind|selected|>memory|result", [_row(name, each) for name, each in reports.items()]))
    failed = [name for name, report in reports.items() if report.problems]
    num_mb = sum(report.path.shared_mb for report in reports.values() if report.path is not None)
    result = f"{len(failed)} of {len(reports)} models cannot be served: {', '.join(failed)}"
    if not failed:
        result = f"All {len(reports)} models can be served" if len(reports) > 1 else "The model can be served"
        result += f", with {num_mb:,} MB for all workers together."
    return "\n".join(["Models", *lines, "", result])


def _row(name: str, report: Report) -> tuple[str, ...]:
    kind = ", ".join(report.model.capabilities) if report.model is not None else "-"
    num_warnings, path = len(report.warnings), report.path
    warned = f", {num_warnings} {'warning' if num_warnings == 1 else 'warnings'}" if num_warnings else ""
    result = (
        textwrap.shorten(f"problem: {report.problems[0].what}", _MAX_RESULT) if report.problems else "right" + warned
    )
    if path is None:
        return name, kind, "-", "-", result
    return name, kind, f"{path.path}, {path.dtype}, on {path.device}", f"{path.shared_mb:,} MB", result


def command(advice: Advice) -> str:
    """The command line with the recommended settings."""
    words = ["vecd", "serve"]
    for setting in advice.settings:
        words += [str(setting.value)] if setting.name == "model" else [_flag(setting), str(setting.value)]
    return shlex.join(words)


def toml(advice: Advice) -> list[str]:
    """The lines of a file for --config with the recommended settings."""
    # A string of JSON is one of TOML.
    return [f"{setting.name} = {json.dumps(setting.value, ensure_ascii=False)}" for setting in advice.settings]


def _flag(setting: Setting) -> str:
    return "--" + setting.name.replace("_", "-")


# --- layout -----------------------------------------------------------------------------------------------------


def _line(label: str, text: str, indent: str = _INDENT, width: int = _LABEL_WIDTH) -> str:
    """A label and its text, wrapped in its own column."""
    return textwrap.fill(
        text or "-",
        WIDTH,
        initial_indent=f"{indent}{label:{width}}",
        subsequent_indent=indent + " " * width,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _facts(facts: Iterable[tuple[str, str]]) -> Iterator[str]:
    return (_line(label, text) for label, text in facts)


def _table(columns: str, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """`columns`: the headers, separated by "|". Those that begin with ">" are aligned to the right."""
    headers = columns.split("|")
    table = [[header.removeprefix(">") for header in headers], *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [
            cell.rjust(width) if header.startswith(">") else cell.ljust(width)
            for cell, width, header in zip(row, widths, headers, strict=True)
        ]
        yield (_INDENT + "  ".join(cells)).rstrip()


# --- the parts --------------------------------------------------------------------------------------------------


def _machine(machine: Machine) -> Iterator[tuple[str, str]]:
    cores, limit = f"{machine.num_usable_cores} to use", ""
    if machine.num_usable_physical_cores < machine.num_usable_cores:
        cores += f" ({machine.num_usable_physical_cores} physical)"
    if machine.num_usable_cores < machine.num_cores:
        cores += f", of {machine.num_cores}"
    if machine.quota_cores is not None:
        cores += f"; the cgroup's quota is {machine.quota_cores:g}"
    if machine.memory_limit_mb is not None:
        limit = f"; the cgroup's limit is {machine.memory_limit_mb:,} MB"
    yield "processor", machine.processor
    yield "cores", cores
    yield "instructions", ", ".join(FLAGS[flag] for flag in machine.flags) or "none that vecd looks for"
    yield "memory", f"{machine.memory_mb:,} MB, of which {machine.available_mb:,} MB are available{limit}"
    yield "GPUs", ", ".join(machine.gpus) or "none"


def _model(model: Model) -> Iterator[tuple[str, str]]:
    prompts = [
        f"{name} {text!r}" + (" (default)" if text and text == model.default_prompt else "")
        for name, text in model.prompts.items()
    ]
    dims = f": {', '.join(map(str, model.matryoshka_dims))}" if model.matryoshka_dims else ""
    dtypes = ", ".join(model.weights_dtypes)
    yield "name", model.name
    yield "folder", model.folder
    yield "type", model.model_type + (f", {model.architecture}" if model.architecture else "")
    is_dense = "dense" in model.capabilities
    yield "kind", ", ".join(model.capabilities)
    if is_dense:
        of_states = f", from {model.hidden_size} a token" * (model.dim != model.hidden_size)
        by_default = f", of which {model.truncate_dim} by default" if model.truncate_dim else ""
        yield "dimensions", f"{model.dim}{of_states}{by_default}"
    if model.token_dim:
        yield "of a token", f"{model.token_dim} dimensions"
    if model.labels:
        more = f" and {len(model.labels) - _MAX_LABELS} more" if len(model.labels) > _MAX_LABELS else ""
        yield "labels", f"{len(model.labels)}: {', '.join(model.labels[:_MAX_LABELS])}{more}"
    yield "longest text", f"{model.max_tokens:,} tokens"
    if is_dense:
        yield "pooling", " + ".join(model.pooling)
        yield "then", ", ".join(model.steps) or "nothing"
        yield "vectors", "of length 1" if model.is_normalized else "of any length: not normalized"
    for name, steps in model.heads.items():
        yield f"head: {name}", ", ".join(steps) or "of transformers' own class"
    yield "prompts", ", ".join(prompts) or "none"
    if is_dense:
        yield "Matryoshka", f"yes{dims}" if model.is_matryoshka else "nothing says so"
    yield "vocabulary", f"{model.vocab_size:,} tokens"
    yield "tokenizer", model.tokenizer
    parameters = f"{model.num_parameters:,} parameters in {dtypes}" if model.num_parameters else "an ONNX export"
    yield "weights", f"{model.weights_bytes / 1e6:,.1f} MB, {parameters}"


def _path(path: Path) -> Iterator[tuple[str, str]]:
    yield "selected", f"{path.path}, {path.dtype}, on {path.device}"
    yield "attention", path.attention
    for label, lines in ("why", path.reasons), ("refused", path.refused):
        yield from (("" if number else label, line) for number, line in enumerate(lines))
    if path.probes:
        yield (
            "probes",
            f"{path.probes['probes']} random sequences of up to {path.probes['longest_probe_tokens']} tokens: "
            f"largest difference {path.probes['max_abs_diff']:.1e}, " + _closeness(path.probes),
        )
    if path.ranks_in_order is not None:
        yield "plain pair", "in the right order" if path.ranks_in_order else "in the WRONG order"
    selected = (
        "remembered"
        if path.is_remembered
        else f"selected in {path.choosing_s:.1f} s" + ", and now remembered" * bool(path.probes)
    )
    yield "start", f"loaded in {path.load_s:.1f} s; the path is {selected}"
    yield "memory", f"{path.shared_mb:,} MB for all workers together"


def _closeness(figures: Mapping[str, Any]) -> str:
    """Of vectors the cosine, of scores the order."""
    if figures.get("min_cosine") is not None:
        return f"smallest cosine {figures['min_cosine']:.6f}"
    return f"{figures['same_order']:.1%} in the same order"


def _parity(path: Path) -> Iterator[str]:
    rows = []
    are_numbers = any(found.min_cosine is None for found in path.agreements)
    for found in path.agreements:
        for number, row in enumerate(found.by_length):
            close = f"{row['same_order']:.1%}" if row.get("min_cosine") is None else f"{row['min_cosine']:.8f}"
            figures = f"{row['num_texts']}", f"≤ {row['longest_tokens']}", close
            rows.append(("" if number else f"with {found.against}", *figures, f"{row['max_abs_diff']:.1e}"))
        verdict = "agrees" if found.is_within_bounds else "DISAGREES"
        rows.append((f"  {verdict}, by the bounds for {path.dtype}", "", "", "", ""))
    if rows:
        close = "in the same order" if are_numbers else "least cosine"
        yield from _table(f"|>texts|>tokens|>{close}|>largest difference", rows)
    yield from (_line("", missing, width=0) for missing in path.not_compared)


def _speeds(measured: Measurements, model: Model | None) -> Iterator[str]:
    kinds = ("dense",) if model is None else model.capabilities
    unit = "pairs" if "rerank" in kinds else "texts"
    yield (
        f"{_INDENT}One worker: median (lowest to highest) of {measured.num_rounds} turns of {measured.turn_s:g} s, in "
        "turns with each other."
    )
    rows = [
        (
            s.dtype, s.path, f"{s.text_tokens} tokens", f"{s.batch_tokens:,} tokens", f"{s.texts_per_s:,.1f}",
            f"{s.tokens_per_s:,.0f}",
            f"({s.lowest:,.0f} to {s.highest:,.0f})", f"{min(1.0, s.core_share):.0%}", f"{s.private_mb:,} MB",
        )
        for s in measured.speeds
    ]  # fmt: skip
    yield from _table(f"dtype|path|>{unit} of|>batches of|>{unit}/s|>tokens/s||>of a core|>its memory", rows)
    for dtype, why in measured.not_measured.items():
        yield _line(dtype, f"not measured: {why}", width=10)
    if len(measured.scaling) > 1:
        first, *others = measured.scaling
        together = [(s.num_workers, s.tokens_per_s, s.tokens_per_s / first.tokens_per_s) for s in others]
        text = ", ".join(f"{count} workers {rate:,.0f} ({times:.2f} times one)" for count, rate, times in together)
        yield _line("", f"At once, with the longest of these texts: {text} tokens/s.", width=0)


def _advice(advice: Advice) -> Iterator[str]:
    yield f"{_INDENT}{command(advice)}"
    yield ""
    shown = [(f"{_flag(setting)} {setting.value}", setting.reason) for setting in advice.settings if setting.reason]
    width = max(len(label) for label, _ in shown) + 2
    yield from (_line(label, reason, width=width) for label, reason in shown)
    yield from (_line("note: ", note, width=6) for note in advice.notes)
    yield ""
    yield f"{_INDENT}The same as a file for vecd serve --config FILE:"
    yield ""
    yield from (f"{_INDENT * 2}{line}" for line in toml(advice))
