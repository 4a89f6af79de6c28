"""The flags of `vecd embed`, and what they mean together.

Owns argv → `Options`: what is wrong is said in one line before anything is read or sent. Called by
`vecd.client.bulk.command`.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vecd.client.bulk import inputs, output
from vecd.client.bulk.feed import BatchSize
from vecd.client.bulk.inputs import Shape
from vecd.client.bulk.own_server import check_flags
from vecd.client.bulk.service import Asked
from vecd.client.connection import parse_target

ON_BAD_ROW = ("blank", "skip", "fail")
_OWN_NAMES = ("row", "embedding")
"""Of fields of the output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What `vecd embed` was asked to do. Immutable."""

    paths: tuple[str, ...]
    input_format: str | None
    shape: Shape
    out: Path
    output_format: str
    on_bad_row: str
    restarts: bool
    is_quiet: bool
    url: str | None
    """None: a server is started here."""
    model: str | None
    serve_flags: tuple[str, ...]
    asked: Asked
    size: BatchSize
    concurrency: int | None
    """None: it follows the server."""

    def fields(self) -> dict[str, Any]:
        """What changes rows or vectors, by the flag's name, for the journal. Never the key."""
        return {
            "format": self.input_format,
            "field": self.shape.field,
            "keep": list(self.shape.keep),
            "max_row_bytes": self.shape.max_row_bytes,
            "output_format": self.output_format,
            "dtype": self.asked.dtype,
            **self.asked.fields,
        }


def parse_options(argv: list[str], environ: Mapping[str, str]) -> Options:
    """Side effects: what is wrong is printed, in one line, and exits with 2."""
    parser = _make_parser()
    ours, serve_flags = _split(argv)
    arguments = parser.parse_args(ours)
    try:
        return _read_options(arguments, serve_flags, environ)
    except ValueError as error:
        parser.error(str(error))


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """At the first `--`: what is behind is for `vecd serve`."""
    if "--" not in argv:
        return argv, []
    place = argv.index("--")
    return argv[:place], argv[place + 1 :]


def _read_options(arguments: argparse.Namespace, serve_flags: list[str], environ: Mapping[str, str]) -> Options:
    """Raises ValueError when flags do not go together."""
    if arguments.url is not None:
        parse_target(arguments.url)
        if arguments.model is not None or serve_flags:
            raise ValueError("--url asks a server that runs: --model, and flags behind --, are for one started here")
    check_flags(serve_flags)
    output_format = arguments.output_format or arguments.output.suffix[1:].lower()
    _check_output(arguments, output_format)
    return Options(
        paths=tuple(arguments.files),
        input_format=arguments.format,
        shape=Shape(arguments.field, tuple(arguments.keep), arguments.max_row_bytes),
        out=arguments.output,
        output_format=output_format,
        on_bad_row=arguments.on_bad_row,
        restarts=arguments.restart,
        is_quiet=arguments.quiet,
        url=arguments.url,
        model=arguments.model,
        serve_flags=tuple(serve_flags),
        asked=Asked(
            dtype=arguments.dtype,
            fields=_request_fields(arguments),
            priority=arguments.priority,
            api_key=arguments.api_key or environ.get("VECD_API_KEY") or None,
            timeout_s=arguments.timeout,
            retry_for_s=arguments.retry_for,
        ),
        size=BatchSize(arguments.batch_texts, arguments.batch_chars),
        concurrency=arguments.concurrency,
    )


def _check_output(arguments: argparse.Namespace, output_format: str) -> None:
    out: Path = arguments.output
    if output_format not in output.FORMATS:
        raise ValueError(f"-o: {out} has none of the suffixes .{', .'.join(output.FORMATS)}: say --output-format")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"-o: {out} is in no folder that exists")
    if out.is_dir():
        raise ValueError(f"-o: {out} is a folder")
    keep: list[str] = arguments.keep
    if keep and output_format == "npy":
        raise ValueError("--keep: .npy holds vectors and nothing else; .jsonl and .parquet hold fields, too")
    for name in keep:
        if name in _OWN_NAMES or keep.count(name) > 1:
            raise ValueError(f"--keep: {name!r} would stand twice in the output")
    reads_parquet = arguments.format == "parquet" or any(path.endswith((".parquet", ".pq")) for path in arguments.files)
    if output_format == "parquet" or reads_parquet:
        _require_pyarrow()


def _require_pyarrow() -> None:
    if find_spec("pyarrow") is None:
        raise ValueError("parquet needs pyarrow: pip install 'vecd[parquet]'")


_REQUEST_FIELDS = ("overflow", "dimensions", "input_type", "prompt_name", "prompt")


def _request_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    fields = {name: getattr(arguments, name) for name in _REQUEST_FIELDS}
    return {name: value for name, value in fields.items() if value is not None}


# --- argv -------------------------------------------------------------------------------------------------


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vecd embed",
        usage="vecd embed FILE... -o OUT [--flags] [-- flags of vecd serve]",
        description="Embed the rows of files. The same command again goes on where a run that was ended, or killed, "
        "had been.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "files",
        nargs="+",
        metavar="FILE",
        help=".txt .jsonl .csv .tsv, each also with .gz; .parquet; -: standard input",
    )
    add("-o", "--output", type=Path, required=True, metavar="OUT", help=".npy, .jsonl or .parquet")
    _add_rows(parser)
    _add_server(parser)
    _add_vectors(parser)
    _add_run(parser)
    return parser


def _add_rows(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("rows").add_argument
    add("--format", choices=inputs.FORMATS, help="of the inputs, instead of what their suffixes say (-: txt)")
    add("--field", default="text", metavar="NAME", help="where the text is, in formats that have fields (text)")
    add("--keep", type=_names, default=[], metavar="NAME,…", help="fields to write out again, beside the vectors")
    add(
        "--on-bad-row",
        choices=ON_BAD_ROW,
        default="blank",
        help="a row without a text, or refused by the server. blank: NaN or null stands in its place; skip: it is "
        "left out; both: told in OUT.rejected.jsonl. fail: it ends the run (blank)",
    )
    add(
        "--max-row-bytes", type=_count(1 << 30), default=1 << 24, metavar="N", help="a longer row is a bad one (16 MiB)"
    )
    add("--output-format", choices=output.FORMATS, help="instead of what the suffix of OUT says")


def _add_server(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--url", help="of a server that runs, http://host:port or unix:/path; without it one is started for the run")
    add("--model", help="folder or hub id of the model of the server that is started (the bundled one)")
    add("--api-key", help="sent as a bearer token; better set as VECD_API_KEY, a flag shows in ps")
    add("--priority", choices=("interactive", "normal", "bulk"), default="bulk", help="beside other callers (bulk)")
    add("--timeout", type=_seconds, default=300.0, metavar="S", help="longest wait for one answer (300)")
    add(
        "--retry-for",
        type=_seconds,
        default=600.0,
        metavar="S",
        help="how long to wait for a server that is away or serves nobody (600)",
    )
    add("--concurrency", type=_count(1024), metavar="N", help="requests under way (as many as make a second of work)")
    add("--batch-texts", type=_count(100_000), default=256, metavar="N", help="most rows in a request (256)")
    add("--batch-chars", type=_count(1 << 30), default=1 << 17, metavar="N", help="about as many characters (131,072)")


def _add_vectors(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("vectors").add_argument
    add("--dtype", choices=("float32", "float16"), default="float32", help="of the vectors' elements (float32)")
    add("--dimensions", type=_count(1 << 20), metavar="N", help="the first N; of models made for it")
    add(
        "--overflow",
        choices=("error", "truncate", "truncate_left", "chunk"),
        help="text longer than the model takes; error: a bad row (what the server does by itself)",
    )
    add("--input-type", metavar="TYPE", help="what the texts are for, as query or document: chooses the model's prompt")
    add("--prompt-name", metavar="NAME", help="the model's prompt of that name")
    add("--prompt", metavar="TEXT", help="put before every text")


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("run").add_argument
    add("--restart", action="store_true", help="begin anew: replace OUT, and what an unfinished run has left")
    add("--quiet", action="store_true", help="no progress; errors and the last line are told all the same")


def _names(value: str) -> list[str]:
    names = value.split(",")
    if not all(names):
        raise argparse.ArgumentTypeError(f"{value!r} has an empty name")
    return names


def _count(largest: int) -> Callable[[str], int]:
    def read(value: str) -> int:
        if not value.isascii() or not value.isdecimal() or not 1 <= int(value[:20]) <= largest:
            raise argparse.ArgumentTypeError(f"{value!r} is not a whole number from 1 to {largest:,}")
        return int(value)

    return read


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number of seconds above 0 and up to 86,400")
    return seconds
