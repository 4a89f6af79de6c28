"""The flags of `vecd embed`, and what they mean together."""

# ruff: noqa: RUF009 (a flag is a dataclasses.field)

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

from vecd.base.flags import Command, TlsOptions, flag, parse
from vecd.base.programs import are_installed, not_installed

STDIN = "-"
_InputFormat = Literal["txt", "jsonl", "csv", "tsv", "parquet"]
_OutputFormat = Literal["npy", "jsonl", "parquet"]
INPUT_FORMATS, OUTPUT_FORMATS = get_args(_InputFormat), get_args(_OutputFormat)
_VECTORS = ("dense", "sparse", "multi-vector")
RESULTS = (*_VECTORS, "scores", "labels")
_COLUMNS = {
    "dense": ("embedding",),
    "sparse": ("indices", "values"),
    "multi-vector": ("embeddings",),
    "scores": ("score",),
    "labels": ("label", "score", "scores", "entities"),
}
"""By results, the columns that an output may have for them."""
_REQUEST_FIELDS = ("overflow", "dimensions", "input_type", "prompt_name", "prompt")
_SERVED_HERE = ("--host", "--port", "--uds", "--ready-fd", "--tls-cert", "--tls-key")
_rows = partial(flag, group="rows")
_server = partial(flag, group="server")
_seconds = partial(_server, above=0, at_most=86_400, unit="seconds")
_vectors = partial(flag, group="vectors")
_many = partial(flag, group="many outputs")
_run = partial(flag, group="run")
_results = partial(flag, group="results")


def _names(names: tuple[str, ...]) -> tuple[str, ...]:
    if not all(names):
        raise ValueError("has an empty name")
    return names


def _result_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """In the order of `RESULTS`, so that the same results are the same run."""
    for name in names:
        if name not in RESULTS:
            raise ValueError(f"{name!r} is none of {', '.join(RESULTS)}")
    return tuple(name for name in RESULTS if name in names)


class ShardNumber(NamedTuple):
    run: int
    """Of the runs that share them, from 0."""
    num_runs: int


_ALL = ShardNumber(0, 1)


class Pace(NamedTuple):
    first_commit_s: float = 0.25
    commit_s: float = 0.5
    """Between the beginnings of commits: doubled from the first on, up to this. A killed run repeats about as much."""
    first_response_s: float = 2.0
    """Without a response for this long, requests count as waiting: until the first response of all."""
    only_node_s: float = 15.0
    """Of nothing but responses of another identity: then there is one server, and it has another model."""
    plain_s: float = 10.0
    """Between lines of progress in a log."""


USUAL_PACE = Pace()


def _shard(value: str) -> ShardNumber:
    if not (found := re.fullmatch("([0-9]{1,9})/([0-9]{1,9})", value)):
        raise ValueError("is not I/N, as 0/40")
    number = ShardNumber(*map(int, found.groups()))
    if number.run >= number.num_runs:
        raise ValueError("is out of range: I is from 0 to N-1")
    return number


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(TlsOptions):
    """Immutable. Raises ValueError when flags do not go together, or the output cannot be there."""

    files: Sequence[str] = flag(
        (),
        ".txt .jsonl .csv .tsv, each also with .gz; .parquet; -: standard input. With --output-dir also folders, globs "
        "and URLs",
        word="INPUT",
        names=("files",),
    )
    out: Path | None = flag(
        None, "one output for all inputs: .npy, .jsonl or .parquet", word="OUT", names=("-o", "--output")
    )
    output_dir: str | None = _many(
        None, "one output for each input, in this folder or place of an object store", word="DIR"
    )
    manifest: str | None = _many(
        None, "a file that names the inputs: a path or URL a line, and behind a tab the name of its output", word="FILE"
    )
    shard: ShardNumber = _many(
        _ALL,
        "of N runs that share the inputs, this is the one with the number I, from 0: every N-th input",
        read=_shard,
        word="I/N",
    )
    work_dir: Path | None = _many(
        None, "for copies of remote inputs, and for unfinished remote outputs (the user's cache folder)", word="DIR"
    )
    format: _InputFormat | None = _rows(None, "of the inputs, instead of what their suffixes say (-: txt)")
    field: str = _rows("text", "the field with the text, in formats that have fields (text)", word="NAME")
    pair_with: str | None = _rows(
        None,
        "the field with the second text of each row, for scores and labels of pairs: the document, if --field is the "
        "query",
        word="NAME",
    )
    keep: tuple[str, ...] = _rows((), "fields to copy to the output, beside the results", read=_names, word="NAME,…")
    on_bad_row: Literal["", "blank", "skip", "fail"] = _rows(
        "",
        "a row without a text, or refused by the server. blank: NaN or null stands in its place; skip: it is left out; "
        "both: listed in OUT.rejected.jsonl. fail: it ends the run (blank, and exit code 1)",
    )
    max_row_bytes: int = _rows(1 << 24, "a longer row is a bad one (16 MiB)", at_least=1, at_most=1 << 30)
    output_format: _OutputFormat | Literal[""] = _rows("", "instead of what the suffix of OUT says")
    url: str | None = _server(
        None,
        "of a running server, http://host:port, https://host:port or unix:/path; without it, one is started for the "
        "run",
    )
    model: str | None = _server(None, "folder or hub id of the model of the server that is started (the bundled one)")
    share_server: bool | None = _server(
        None,
        "the server that is started is one for all runs of this user on this host with the same flags, and ends after "
        "the last of them (the default with --output-dir). --no-share-server: it is for this run alone (the default "
        "with -o)",
    )
    api_key: str | None = _server(
        None, "sent as a bearer token; better set as VECD_API_KEY, a flag shows in ps", variable="VECD_API_KEY"
    )
    priority: Literal["interactive", "normal", "bulk"] = _server("bulk", "beside other callers (bulk)")
    timeout: float = _seconds(300.0, "longest wait for a byte of a response (300)")
    retry_for: float = _seconds(600.0, "how long to wait for a server that is away or serves no request (600)")
    concurrency: int | None = _server(None, "requests under way (about a second of work)", at_least=1, at_most=1024)
    batch_texts: int = _server(256, "most rows in a request (256)", at_least=1, at_most=100_000)
    batch_chars: int = _server(1 << 17, "about as many characters (131,072)", at_least=1, at_most=1 << 30)
    results: tuple[str, ...] = _results(
        (),
        "what is written: dense, sparse or multi-vector, or several of them; scores of pairs; labels of texts, pairs "
        "or parts of texts (what the model is for)",
        read=_result_names,
        word="KIND,…",
    )
    raw_scores: bool = _results(False, "scores are the model's own numbers, without an activation")
    all_scores: bool = _results(False, "of labels: the scores of all labels, not of the best one alone")
    dtype: Literal["float32", "float16"] = _vectors("float32", "of the vectors (float32)")
    dimensions: int | None = _vectors(None, "the first N; of models made for it", at_least=1, at_most=1 << 20)
    overflow: Literal["error", "truncate", "truncate_left", "chunk"] | None = _vectors(
        None, "text longer than the model takes; error: a bad row (the server's default)"
    )
    input_type: str | None = _vectors(
        None, "purpose of the texts, as query or document: chooses the model's prompt", word="TYPE"
    )
    prompt_name: str | None = _vectors(None, "the model's prompt of that name", word="NAME")
    prompt: str | None = _vectors(None, "put before every text", word="TEXT")
    restart: bool = _run(False, "begin anew: replace OUT, and what an unfinished run has left")
    quiet: bool = _run(False, "no progress; errors and the last line are written all the same")
    serve_flags: tuple[str, ...] = ()
    """Behind `--`, for `vecd serve`."""
    pace: Pace = USUAL_PACE

    def __post_init__(self) -> None:
        self._check_server()
        self._check_output()
        if self.keep and self.output_format == "npy":
            raise ValueError("--keep: .npy holds vectors and nothing else; .jsonl and .parquet hold fields, too")
        self.check_results(self.results)
        uses_parquet = "parquet" in (self.format, self.output_format) or any(
            path.endswith((".parquet", ".pq")) for path in self.files
        )
        if uses_parquet and not are_installed("pyarrow"):
            raise ValueError(f"parquet needs pyarrow, which is {not_installed('vecd[parquet]')}")

    def _check_server(self) -> None:
        if self.url is not None:
            self.read_target(self.url)
            if self.model is not None or self.serve_flags:
                raise ValueError("--url names a running server: --model, and flags behind --, are for one started here")
        elif self.ca is not None or self.insecure:
            raise ValueError("--ca and --insecure are for a running server: give --url https://host:port")
        for name in [each for each in self.serve_flags if each.partition("=")[0] in _SERVED_HERE]:
            raise ValueError(f"{name}: where the server listens is chosen here; for one that listens elsewhere, --url")
        if self.share_server and self.url is not None:
            raise ValueError("--share-server and --url exclude each other")

    def _check_output(self) -> None:
        """Side effects: sets `output_format`."""
        if (self.out is None) == (self.output_dir is None):
            raise ValueError(
                "say where to: either -o OUT, one output for all inputs, or --output-dir DIR, one for each"
            )
        if self.output_dir is not None:
            object.__setattr__(self, "output_format", self.output_format or "npy")
            if not self.files and self.manifest is None:
                raise ValueError("no input is named, and no --manifest")
            if STDIN in self.files:
                raise ValueError("standard input, -, has no name for its output: take -o")
            return
        assert self.out is not None
        for name in ("manifest", "work_dir", "shard"):
            if getattr(self, name) not in (None, _ALL):
                raise ValueError(f"--{name.replace('_', '-')} is for many outputs: take --output-dir instead of -o")
        if not self.output_format:
            object.__setattr__(self, "output_format", self.out.suffix[1:].lower())
        if self.output_format not in OUTPUT_FORMATS:
            raise ValueError(
                f"-o: {self.out} has none of the suffixes .{', .'.join(OUTPUT_FORMATS)}: say --output-format"
            )
        if not self.out.absolute().parent.is_dir():
            raise ValueError(f"-o: {self.out} is in no folder that exists")
        if self.out.is_dir():
            raise ValueError(f"-o: {self.out} is a folder")

    def of_output(self, source: str, out: Path) -> Self:
        return replace(self, files=[source], out=out, output_dir=None, manifest=None, work_dir=None, shard=_ALL)

    @property
    def path(self) -> Path:
        assert self.out is not None
        return self.out

    @property
    def shares_server(self) -> bool:
        return self.output_dir is not None if self.share_server is None else self.share_server

    @property
    def text_fields(self) -> tuple[str, ...]:
        return (self.field,) if self.pair_with is None else (self.field, self.pair_with)

    def check_results(self, results: Sequence[str], *, is_of_tokens: bool = False) -> None:
        """Raises ValueError when the flags do not go with these results; with none, when they go with no results.
        `is_of_tokens`: labels are those of parts of a text."""
        columns = [column for name in results or ("dense",) for column in _COLUMNS[name]]
        for name in self.keep:
            if name == "row" or name in columns or self.keep.count(name) > 1:
                raise ValueError(f"--keep: {name!r} would stand twice in the output")
        if not results:
            return
        what = " and ".join(results)
        are_vectors = set(results) <= set(_VECTORS)
        if len(results) > 1 and not are_vectors:
            raise ValueError(f"--results: scores and labels stand alone, not {what}")
        if self.output_format == "npy" and results != ("dense",):
            raise ValueError(
                f"-o: .npy holds a matrix of dense vectors, not {what}, whose rows differ in length or have several "
                "fields: take .jsonl or .parquet"
            )
        if results == ("scores",) and self.pair_with is None:
            raise ValueError("--results: scores are of pairs: name the field of the second text with --pair-with")
        if self.pair_with is not None and (are_vectors or is_of_tokens):
            raise ValueError(f"--pair-with: {'labels of parts' if is_of_tokens else what} are of one text, not of two")
        if self.raw_scores and are_vectors:
            raise ValueError(f"--raw-scores is for scores and labels, not for {what}")
        if self.all_scores and (results != ("labels",) or is_of_tokens):
            raise ValueError("--all-scores is for labels of texts and pairs")
        if self.dtype != "float32" and not {"dense", "multi-vector"}.intersection(results):
            raise ValueError(f"--dtype is for dense vectors and multi-vectors, not for {what}")
        if self.dimensions is not None and results != ("dense",):
            raise ValueError(f"--dimensions is for dense vectors, not for {what}")
        if self.overflow == "chunk" and results != ("dense",):
            raise ValueError(f"--overflow chunk makes a mean of dense vectors; there is none of {what}")
        for name in () if are_vectors else ("input_type", "prompt_name", "prompt"):
            if getattr(self, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} is for vectors, not for {what}")

    def request_fields(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in _REQUEST_FIELDS}
        return {name: value for name, value in fields.items() if value is not None}

    def journal_fields(self) -> dict[str, Any]:
        """The flags that change rows or vectors. Never the key."""
        names = ("format", "field", "keep", "max_row_bytes", "output_format", "dtype")
        own = {name: value for name in ("pair_with", "raw_scores", "all_scores") if (value := getattr(self, name))}
        fields = {name: getattr(self, name) for name in names}
        return {**fields, "keep": list(self.keep), **own, **self.request_fields()}


def parse_options(argv: Sequence[str], pace: Pace = USUAL_PACE) -> EmbedOptions:
    """Flags behind the first `--` are for `vecd serve`."""
    place = argv.index("--") if "--" in argv else len(argv)
    return parse(
        EmbedOptions,
        argv[:place],
        Command(
            "vecd embed",
            usage="vecd embed INPUT... (-o OUT | --output-dir DIR) [--flags] [-- flags of vecd serve]",
            description="Embed the rows of files. The same command again resumes a run that was ended, or killed.",
        ),
        serve_flags=tuple(argv[place + 1 :]),
        pace=pace,
    )


# How `vecd embed` ends before its output is complete. Every message names the file or server that it is about.


class EmbedError(Exception):
    """Raised when an input, the output, the journal or the server of the run does not fit."""

    exit_code = 2


class FieldMissing(EmbedError):
    """Raised when an input has nowhere the field of the texts. Of a stream this is known at its header or its end."""


class OutputLocked(EmbedError):
    """Raised when another run is making the output."""


class RunEnded(Exception):
    """Raised when a run ends with rows left to do. The same command may resume it."""

    exit_code = 1


class Interrupted(RunEnded):
    """Raised when a signal ends a run."""

    def __init__(self, number: int) -> None:
        super().__init__("interrupted")
        self.exit_code = 128 + number


class ServerLost(RunEnded):
    """Raised when the server refuses, serves nothing, or serves another model. No other input would fare better."""


class OtherIdentity(ServerLost):
    """Raised when no response comes that is of the identity that the run began with. What is written is right."""


def told(error: Exception) -> str:
    """What is said of how a run has ended."""
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
