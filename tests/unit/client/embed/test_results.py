"""Flags and results that go together, requests and responses of each kind of results, and which model made them."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from vecd.client.embed.options import EmbedOptions, parse_options
from vecd.client.embed.service import ModelFingerprint, ResultKind, choose_results, make_kind
from vecd.client.http import ServerResponse


def make_options(folder: Path, **fields: Any) -> EmbedOptions:
    return EmbedOptions(files=[], out=folder / "o.jsonl", **fields)


def kind_of(folder: Path, capability: str, **fields: Any) -> ResultKind:
    options = make_options(folder, **fields)
    return make_kind(options, choose_results(options, (capability,)), (capability,))


def response_of(body: Any) -> ServerResponse:
    return ServerResponse(200, orjson.dumps(body))


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
    kind = kind_of(tmp_path, capability, **fields)
    assert kind.path == path
    assert orjson.loads(orjson.dumps(kind.body(items))) == body


def test_vectors_of_tokens_are_base64_once_their_width_is_known(tmp_path: Path) -> None:
    kind = kind_of(tmp_path, "multi-vector", dtype="float16")
    assert kind.body([("a",)])["encoding_format"] == "float"
    kind.learn(kind.read(response_of({"data": [{"embeddings": [[1, 2, 3], [4, 5, 6]]}]}), 1).results)
    assert kind.columns == {"embeddings": "vectors 3"}
    assert kind.body([("a",)])["encoding_format"] == "base64"
    # Two rows of three halves, little-endian: 1 is 0x3c00, 2 is 0x4000.
    found = kind.read(response_of({"data": [{"embeddings": "ADwAQAA8AEAAPABA"}], "usage": {"prompt_tokens": 7}}), 1)
    np.testing.assert_array_equal(found.results[0]["embeddings"], [[1, 2, 1], [2, 1, 2]])
    assert found.num_tokens == 7
    assert found.results[0]["embeddings"].dtype == np.float16


@pytest.mark.parametrize(
    ("capability", "fields", "body"),
    [
        ("rerank", {"pair_with": "b"}, {"data": [{"score": 1.0}]}),
        ("rerank", {"pair_with": "b"}, []),
        ("sparse", {}, {"data": None}),
    ],
)
def test_a_response_for_another_number_of_rows_is_refused(
    tmp_path: Path, capability: str, fields: dict[str, Any], body: Any
) -> None:
    with pytest.raises(ValueError, match=r"results for 2 rows|no JSON object"):
        kind_of(tmp_path, capability, **fields).read(response_of(body), 2)


def fingerprint_of(*scores: float) -> ModelFingerprint:
    return ModelFingerprint("m", len(scores), {}, list(scores), True, {"score": "number"})


@pytest.mark.parametrize(
    ("scores", "others", "are_same"),
    [
        ((0.9991, 0.02, 0.4), (0.9992, 0.0201, 0.41), True),
        ((0.9991, 0.02, 0.4), (0.99991, 0.02, 0.4), False),  # both near 1, and a logit of 2 apart
        ((8.3, -11.2, 0.4), (8.4, -11.1, 0.41), True),  # no probabilities
        ((8.3, -11.2, 0.4), (9.3, -11.2, 0.4), False),
        ((0.5, 0.5, 0.5), (0.5, 0.5), False),
    ],
)
def test_a_model_is_recognized_by_its_scores(
    scores: tuple[float, ...], others: tuple[float, ...], are_same: bool
) -> None:
    assert fingerprint_of(*scores).has_probe(others) is are_same
    other = fingerprint_of(*others)
    assert (other.why_other(asdict(fingerprint_of(*scores))) == "") is (are_same and len(scores) == len(others))


def test_another_label_is_another_model(tmp_path: Path) -> None:
    kind = kind_of(tmp_path, "classify")
    one, other = ([{"label": label, "score": 0.6}] for label in ("yes", "no"))
    numbers = [kind.probe_of(kind.read(response_of([labels]), 1).results) for labels in (one, other)]
    assert len(numbers[0]) == len(numbers[1])
    assert not fingerprint_of(*numbers[0]).has_probe(numbers[1])


def test_a_journal_of_before_has_dense_vectors() -> None:
    old = {"name": "m", "dim": 2, "facts": {}, "probe": [1.0, 0.0]}
    assert ModelFingerprint("m", 2, {}, [1.0, 0.0]).why_other(old) == ""
    assert "dense vectors" in fingerprint_of(1.0, 0.0).why_other(old)


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
        choose_results(EmbedOptions(files=[], **{"out": Path("v.jsonl"), **fields}), (capability,))


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
    assert choose_results(options, capabilities) == results


def test_the_settings_of_an_output_are_those_of_all() -> None:
    flags = ("a.txt", "--output-dir", "out", "--dtype", "float16")
    blank = parse_options([*flags, "--on-bad-row", "blank"]).of_output("a.txt", Path("/tmp/a.npy"))
    assert (blank.accepts_bad_rows, blank.dtype, blank.path) == (True, "float16", Path("/tmp/a.npy"))
    assert not parse_options(flags).of_output("a.txt", Path("/tmp/a.npy")).accepts_bad_rows
