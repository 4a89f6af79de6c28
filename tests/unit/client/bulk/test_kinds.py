"""What a request for each kind of results holds, what is read from its response, and which model made it."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from vecd.client.bulk.kinds import ResultKind, choose_results, make_kind
from vecd.client.bulk.options import EmbedOptions
from vecd.client.bulk.service import ModelFingerprint
from vecd.client.connection import ServerResponse


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
        ("classify", {}, {"error": "no"}),
        ("sparse", {}, {"data": None}),
    ],
)
def test_a_response_for_another_number_of_rows_is_refused(
    tmp_path: Path, capability: str, fields: dict[str, Any], body: Any
) -> None:
    with pytest.raises(ValueError, match=r"results for 2 rows|no JSON object"):
        kind_of(tmp_path, capability, **fields).read(response_of(body), 2)


@pytest.mark.parametrize(
    ("capabilities", "results"),
    [
        ((), ("dense",)),
        (("dense", "sparse", "multi-vector"), ("dense",)),
        (("rerank", "classify"), ("scores",)),
        (("token-classify",), ("labels",)),
        (("multi-vector",), ("multi-vector",)),
    ],
)
def test_the_main_results_of_a_model(tmp_path: Path, capabilities: tuple[str, ...], results: tuple[str, ...]) -> None:
    fields = {"pair_with": "b"} if results == ("scores",) else {}
    assert choose_results(make_options(tmp_path, **fields), capabilities) == results


def fingerprint_of(*scores: float) -> ModelFingerprint:
    return ModelFingerprint("m", len(scores), {}, list(scores), True, {"score": "number"})


@pytest.mark.parametrize(
    ("scores", "others", "are_same"),
    [
        ((0.9991, 0.02, 0.4), (0.9992, 0.0201, 0.41), True),
        ((0.9991, 0.02, 0.4), (0.99991, 0.02, 0.4), False),  # both near 1, and a logit of 2 apart
        ((0.9991, 0.0002, 0.4), (0.9991, 0.00002, 0.4), False),
        ((8.3, -11.2, 0.4), (8.4, -11.1, 0.41), True),
        ((8.3, -11.2, 0.4), (9.3, -11.2, 0.4), False),
        ((1.0, 0.0, 0.5), (1.0, 0.0, 0.5), True),
        ((0.5, 0.5, 0.5), (0.5, 0.5), False),
        ((0.5, 0.5, 0.5), (0.5, 0.5, 3.0), False),
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
