"""The report of `vecd check` as plain text: aligned, without colours, the same on a terminal, in a pipe and in a log.

Owns the layout. Pure. Called by `vecd.launch.check.command`.
"""

import json
import shlex
import textwrap
from collections.abc import Iterator, Sequence

from vecd.launch.check.machine import FLAGS
from vecd.launch.check.report import Advice, Machine, Measurements, Model, Parity, Path, Report, Setting

WIDTH = 118
_INDENT, _LABEL_WIDTH = "  ", 16


def render(report: Report) -> str:
    """All that is known; the verdict comes last."""
    parts = [_section("Machine", _machine(report.machine))]
    if report.model is not None:
        parts.append(_section("Model", _model(report.model)))
    if report.path is not None:
        parts.append(_section("Path", _path(report.path)))
        parts.append(_section("Parity", _agreements(report.path)))
    if report.measurements is not None:
        parts.append(_section("Speed", _speeds(report.measurements)))
    if report.advice is not None:
        parts.append(_section("Recommended", _advice(report.advice)))
    parts.append("\n".join(_verdict(report)))
    return "\n\n".join(parts)


def command(advice: Advice) -> str:
    """The command line that has the recommended settings."""
    words = ["vecd", "serve"]
    for setting in advice.settings:
        words += [str(setting.value)] if setting.name == "model" else [_flag(setting), str(setting.value)]
    return shlex.join(words)


def toml(advice: Advice) -> list[str]:
    """The same for --config."""
    # A string of JSON is one of TOML.
    return [f"{setting.name} = {json.dumps(setting.value, ensure_ascii=False)}" for setting in advice.settings]


def _flag(setting: Setting) -> str:
    return "--" + setting.name.replace("_", "-")


# --- the parts --------------------------------------------------------------------------------------------------


def _section(title: str, lines: Iterator[str]) -> str:
    return "\n".join([title, *lines])


def _line(label: str, text: str, indent: str = _INDENT, width: int = _LABEL_WIDTH) -> str:
    """A label and its text, which goes on in the same column."""
    return textwrap.fill(
        text or "-",
        WIDTH,
        initial_indent=f"{indent}{label:{width}}",
        subsequent_indent=indent + " " * width,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _machine(machine: Machine) -> Iterator[str]:
    yield _line("processor", machine.processor)
    yield _line("cores", _cores(machine))
    yield _line("instructions", ", ".join(FLAGS[flag] for flag in machine.flags) or "none that vecd looks for")
    limit = "" if machine.memory_limit_mb is None else f"; the cgroup's limit is {machine.memory_limit_mb:,} MB"
    yield _line("memory", f"{machine.memory_mb:,} MB, of which {machine.available_mb:,} MB are available{limit}")
    yield _line("GPUs", ", ".join(machine.gpus) or "none")


def _cores(machine: Machine) -> str:
    text = f"{machine.num_usable_cores} to use"
    if machine.num_usable_physical_cores < machine.num_usable_cores:
        text += f" ({machine.num_usable_physical_cores} physical)"
    if machine.num_usable_cores < machine.num_cores:
        text += f", of {machine.num_cores}"
    if machine.quota_cores is not None:
        text += f"; the cgroup's quota is {machine.quota_cores:g}"
    return text


def _model(model: Model) -> Iterator[str]:
    yield _line("name", model.name)
    yield _line("folder", model.folder)
    yield _line("type", model.model_type + (f", {model.architecture}" if model.architecture else ""))
    yield _line(
        "dimensions", f"{model.dim}" + (f", from {model.hidden_size} a token" if model.dim != model.hidden_size else "")
    )
    yield _line("longest text", f"{model.max_tokens:,} tokens")
    yield _line("pooling", " + ".join(model.pooling))
    yield _line("then", ", ".join(model.steps) or "nothing")
    yield _line("vectors", "of length 1" if model.is_normalized else "of any length: not normalized")
    yield _line("prompts", _prompts(model))
    dims = f": {', '.join(map(str, model.matryoshka_dims))}" if model.matryoshka_dims else ""
    yield _line("Matryoshka", f"yes{dims}" if model.is_matryoshka else "config.json does not say so")
    yield _line("vocabulary", f"{model.vocab_size:,} tokens")
    yield _line("tokenizer", model.tokenizer)
    megabytes = model.weights_bytes / 1e6
    yield _line(
        "weights",
        f"{megabytes:,.1f} MB, {model.num_parameters:,} parameters in {', '.join(model.weights_dtypes) or 'nothing'}",
    )


def _prompts(model: Model) -> str:
    if not model.prompts:
        return "none"
    named = [
        f"{name} {text!r}" + (" (default)" if text and text == model.default_prompt else "")
        for name, text in model.prompts.items()
    ]
    return ", ".join(named)


def _path(path: Path) -> Iterator[str]:
    yield _line("chosen", f"{path.path}, {path.dtype}, on {path.device}")
    yield _line("attention", path.attention)
    for number, reason in enumerate(path.reasons):
        yield _line("" if number else "why", reason)
    for number, refusal in enumerate(path.refused):
        yield _line("" if number else "refused", refusal)
    if path.probes:
        yield _line(
            "probes",
            f"{path.probes['probes']} random sequences of up to {path.probes['longest_probe_tokens']} tokens: "
            f"largest difference {path.probes['max_abs_diff']:.1e}, smallest cosine {path.probes['min_cosine']:.6f}",
        )
    chosen = (
        "remembered from before" if path.is_remembered else f"chosen in {path.choosing_s:.1f} s, which is remembered"
    )
    yield _line("start", f"loaded in {path.load_s:.1f} s; the path is {chosen}")
    yield _line("memory", f"{path.shared_mb:,} MB for all workers together")


def _agreements(path: Path) -> Iterator[str]:
    yield f"{_INDENT}{'':44}{'texts':>6}  {'tokens':>7}  {'least cosine':>12}  {'largest difference':>18}"
    for parity in path.agreements:
        yield from _agreement(parity, path.dtype)
    for missing in path.not_compared:
        yield _line("", missing, width=0)


def _agreement(parity: Parity, dtype: str) -> Iterator[str]:
    for number, row in enumerate(parity.by_length):
        label = f"with {parity.against}" if number == 0 else ""
        yield (
            f"{_INDENT}{label:44}{row['num_texts']:6}  {'≤ ' + str(row['longest_tokens']):>7}  "
            f"{row['min_cosine']:12.8f}  {row['max_abs_diff']:18.1e}"
        )
    verdict = "agrees" if parity.is_within_bounds else "DISAGREES"
    yield f"{_INDENT}{'':44}{verdict}, by the bounds for {dtype}"


def _speeds(measured: Measurements) -> Iterator[str]:
    yield (
        f"{_INDENT}One worker, tokens a second: median (lowest to highest) of {measured.num_rounds} turns of "
        f"{measured.turn_s:g} s, in turns with each other."
    )
    columns = f"{'dtype':10}{'path':10}{'texts of':>12}{'batches of':>14}{'tokens/s':>12}"
    yield f"{_INDENT}{columns}{'':24}{'of a core':>10}{'its memory':>13}"
    for s in measured.speeds:
        spread = f"({s.lowest:,.0f} to {s.highest:,.0f})"
        yield (
            f"{_INDENT}{s.dtype:10}{s.path:10}{s.text_tokens:>5} tokens{s.batch_tokens:>7,} tokens"
            f"{s.tokens_per_s:>12,.0f}  {spread:22}{min(1.0, s.core_share):>10.0%}{s.private_mb:>10,} MB"
        )
    for dtype, why in measured.not_measured.items():
        yield _line(dtype, f"not measured: {why}", width=10)
    if len(measured.scaling) > 1:
        first = measured.scaling[0].tokens_per_s
        together = [
            f"{s.num_workers} workers {s.tokens_per_s:,.0f} ({s.tokens_per_s / first:.2f} times one)"
            for s in measured.scaling[1:]
        ]
        yield _line("", f"At once, with the longest of these texts: {', '.join(together)} tokens/s.", width=0)


def _advice(advice: Advice) -> Iterator[str]:
    yield f"{_INDENT}{command(advice)}"
    yield ""
    shown = [setting for setting in advice.settings if setting.reason]
    width = max(len(f"{_flag(setting)} {setting.value}") for setting in shown) + 2
    for setting in shown:
        yield _line(f"{_flag(setting)} {setting.value}", setting.reason, width=width)
    for note in advice.notes:
        yield _line("note: ", note, width=6)
    yield ""
    yield f"{_INDENT}The same as a file for vecd serve --config FILE:"
    yield ""
    yield from (f"{_INDENT * 2}{line}" for line in toml(advice))


def _verdict(report: Report) -> Sequence[str]:
    lines = [_line("warning: ", warning, "", 9) for warning in report.warnings]
    if not report.problems:
        return [*lines, "This model can be served."]
    for problem in report.problems:
        lines += [_line("problem: ", problem.what, "", 9), _line("do this: ", problem.suggestion, "", 9)]
    return lines
