"""Flags and results that go together, and requests and responses of each kind of results."""

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from vecd.client.aio import AsyncClient
from vecd.client.embed.options import EmbedOptions, parse_options
from vecd.client.embed.results import Found, ResultKind
from vecd.client.exchanges import Piece, RequestLimits, ServerError


def make_options(folder: Path, **fields: Any) -> EmbedOptions:
    return EmbedOptions(files=[], out=folder / "o.jsonl", **fields)


def kind_of(folder: Path, capability: str, **fields: Any) -> ResultKind:
    return ResultKind(make_options(folder, **fields), (capability,))


def exchange(kind: ResultKind, items: Any, answer: Any) -> tuple[Piece, Found]:
    """The request for the results of `items`, and what an answer to it means."""
    client = AsyncClient("http://h")
    client.limits = RequestLimits()
    steps = kind.steps(client, items)
    [piece] = next(steps)
    piece.answer = answer
    with pytest.raises(StopIteration) as done:
        next(steps)
    return piece, done.value.value


def body_of(piece: Piece) -> Any:
    return orjson.loads(piece.body or b"")


@pytest.mark.parametrize(
    ("capability", "fields", "items", "path", "body"),
    [
        (
            "rerank",
            {"pair_with": "b", "overflow": "error", "raw_scores": True},
            [("q", "d"), ("r", "e")],
            "/score",
            {"queries": ["q", "r"], "documents": ["d", "e"], "overflow": "error", "raw_scores": True},
        ),
        ("classify", {}, [("a",), ("b",)], "/predict", {"inputs": [["a"], ["b"]], "top_k": 1}),
        (
            "classify",
            {"pair_with": "b", "all_scores": True, "overflow": "truncate_left"},
            [("a", "b")],
            "/predict",
            {"inputs": [["a", "b"]], "truncate": True, "truncation_direction": "left"},
        ),
        ("token-classify", {"overflow": "error"}, [("a",)], "/predict", {"inputs": ["a"], "truncate": False}),
        (
            "sparse",
            {"input_type": "query"},
            [("a",)],
            "/v1/embeddings",
            {"input": ["a"], "output": ["sparse"], "encoding_format": "float", "input_type": "query"},
        ),
    ],
)
def test_the_request(
    tmp_path: Path, capability: str, fields: dict[str, Any], items: Any, path: str, body: dict[str, Any]
) -> None:
    client = AsyncClient("http://h")
    client.limits = RequestLimits()
    [piece] = next(kind_of(tmp_path, capability, **fields).steps(client, items))
    assert (piece.path, body_of(piece)) == (path, body)


def test_vectors_of_tokens_are_base64_once_their_width_is_known(tmp_path: Path) -> None:
    kind = kind_of(tmp_path, "multi-vector", dtype="float16")
    piece, found = exchange(kind, [("a",)], {"data": [{"index": 0, "embeddings": [[1, 2, 3], [4, 5, 6]]}]})
    assert body_of(piece)["encoding_format"] == "float"
    kind.learn(found)
    assert kind.columns == {"embeddings": "vectors 3"}
    # Two rows of three halves, little-endian: 1 is 0x3c00, 2 is 0x4000.
    piece, found = exchange(kind, [("a",)], {"data": [{"index": 0, "embeddings": "ADwAQAA8AEAAPABA"}]})
    assert body_of(piece)["encoding_format"] == "base64"
    np.testing.assert_array_equal(found[0]["embeddings"], [[1, 2, 1], [2, 1, 2]])
    assert found[0]["embeddings"].dtype == np.float16


@pytest.mark.parametrize(
    ("capability", "fields", "body"),
    [
        ("rerank", {"pair_with": "b"}, {"data": [{"index": 0, "score": 1.0}]}),
        ("classify", {}, []),
        ("sparse", {}, {"data": None}),
    ],
)
def test_a_response_for_another_number_of_rows_is_refused(
    tmp_path: Path, capability: str, fields: dict[str, Any], body: Any
) -> None:
    kind = kind_of(tmp_path, capability, **fields)
    with pytest.raises((ValueError, ServerError), match=r"results for 2 rows|no items as 'data'"):
        exchange(kind, [("a", "b"), ("c", "d")], body)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("-o v.doc", "none of the suffixes .npy, .jsonl, .parquet"),
        ("-o /no/such/v.npy", "no folder that exists"),
        ("-o /tmp --output-format npy", "-o: /tmp is a folder"),
        ("-o v.npy --keep id", "holds vectors and nothing else"),
        ("-o v.jsonl --keep id,row", "'row' would stand twice"),
        ("-o v.npy --url ftp://x", "neither http"),
        ("-o v.npy --url http://x --model m", "started here"),
        ("-o v.npy --batch-texts 0", "whole number from 1"),
        ("-o v.npy --retry-for -1", "seconds above 0"),
        ("-o v.jsonl --results labels,dense", "scores and labels stand alone"),
        ("-o v.jsonl --results vectors", "'vectors' is none of dense, sparse"),
        ("", "either -o OUT"),
        ("-o v.npy --shard 0/2", "--shard is for many outputs"),
        ("- --output-dir out", "standard input, -, has no name"),
        ("--output-dir out --share-server --url http://h:1", "--share-server and --url"),
        *(
            (f"--output-dir out --shard={value}", f"--shard: is {why} (given: {value!r})")
            for why, values in (
                ("out of range: I is from 0 to N-1", ["3/3"]),
                ("not I/N, as 0/40", ["-1/3", "1/", "²/3"]),
            )
            for value in values
        ),
    ],
)
def test_flags_that_are_refused(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        parse_options(["a.txt", *flags.split()])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_many_outputs_need_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--output-dir", "out"])
    assert "no input is named" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("capability", "fields", "said"),
    [
        ("classify", {"results": ("sparse",)}, r"the model makes no sparse; it makes: labels \(/predict\)"),
        ("rerank", {}, "scores are of pairs: name the field of the second text with --pair-with"),
        ("sparse", {"out": Path("v.npy")}, r"\.npy holds a matrix of dense vectors, not sparse"),
        ("sparse", {"pair_with": "b"}, "--pair-with: sparse are of one text, not of two"),
        ("classify", {"prompt": "x"}, "--prompt is for vectors, not for labels"),
        ("sparse", {"dtype": "float16"}, "--dtype is for dense vectors and multi-vectors"),
        ("dense", {"raw_scores": True}, "--raw-scores is for scores and labels"),
        ("classify", {"keep": ("label",)}, "'label' would stand twice"),
    ],
)
def test_flags_that_do_not_go_with_the_results(capability: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ResultKind(EmbedOptions(files=[], **{"out": Path("v.jsonl"), **fields}), (capability,))


@pytest.mark.parametrize(
    ("capabilities", "results"),
    [
        ((), ("dense",)),
        (("dense", "sparse", "multi-vector"), ("dense",)),
        (("rerank", "classify"), ("scores",)),
        (("token-classify",), ("labels",)),
    ],
)
def test_the_main_results_of_a_model(capabilities: tuple[str, ...], results: tuple[str, ...]) -> None:
    options = EmbedOptions(files=[], out=Path("v.jsonl"), pair_with="b" if results == ("scores",) else None)
    assert ResultKind(options, capabilities).names == results


def test_the_settings_of_an_output_are_those_of_all() -> None:
    flags = ("a.txt", "--output-dir", "out", "--dtype", "float16", "--on-bad-row", "blank")
    options = parse_options(flags).of_output("a.txt", Path("/tmp/a.npy"))
    assert (options.on_bad_row, options.dtype, options.path) == ("blank", "float16", Path("/tmp/a.npy"))
