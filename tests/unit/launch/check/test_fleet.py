"""Which node of a fleet is said to differ, and in what."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vecd.base.target import Target
from vecd.launch.check.fleet import TEXTS, Node, NodeModel, compare, main

TARGET = Target("localhost", 1, None)


def rows(seed: int = 0, noise: float = 0.0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    found = [random.normal(size=64) for _ in TEXTS]
    return [row + noise * np.linalg.norm(row) * random.normal(size=64) / 8 for row in found]


def node(url: str, *, vectors: list[np.ndarray] | None = None, version: str = "1.0", **facts: Any) -> Node:
    values = {"identity": "a;dtype=float32", "dtype": "float32", "max_tokens": 256, **facts}
    model = NodeModel(values, rows() if vectors is None else vectors, are_scores=False)
    return Node(TARGET, url, version=version, models={"m": model})


def found(*nodes: Node) -> list[tuple[str, str]]:
    return [(each.url, each.what) for each in compare(nodes)]


def test_nodes_that_are_equal() -> None:
    assert found(node("a"), node("b", vectors=rows(noise=0.001)), node("c")) == []


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"identity": "b;dtype=float32"}, "identity"),
        ({"dtype": "int8"}, "dtype"),
        ({"max_tokens": 128}, "max_tokens"),
        ({"version": "1.1"}, "version"),
        ({"vectors": rows(seed=1)}, "the vectors of the texts"),
        ({"vectors": rows(noise=0.1)}, "the vectors of the texts"),
        ({"vectors": [np.ones(32)] * len(TEXTS)}, "the vectors of the texts"),
    ],
)
def test_one_of_three_that_is_not_like_the_others(changes: dict[str, Any], what: str) -> None:
    nodes = [node("a"), node("b", **changes), node("c")]
    assert found(*nodes) == [("b", what)]
    assert found(*nodes[:2]) == [("a", what), ("b", what)], "of two, neither is the right one"


def test_without_a_majority_all_are_named() -> None:
    assert found(*(node(name, max_tokens=tokens) for name, tokens in zip("abcd", (1, 1, 2, 2), strict=True))) == [
        (name, "max_tokens") for name in "abcd"
    ]
    apart = [node(name, vectors=rows(seed=seed)) for seed, name in enumerate("abc")]
    assert found(*apart) == [(name, "the vectors of the texts") for name in "abc"]


def test_a_model_that_one_does_not_serve() -> None:
    without = replace(node("c"), models={"other": node("c").models["m"]})
    assert found(node("a"), node("b"), without) == [("c", "models")]


def test_a_node_that_does_not_tell_everything_is_compared_in_the_rest() -> None:
    silent = node("b")
    del silent.models["m"].facts["max_tokens"]
    assert found(node("a"), silent) == []


def test_scores_are_compared_by_their_difference() -> None:
    def scored(url: str, by: float) -> Node:
        return replace(node(url), models={"m": NodeModel({}, [np.linspace(0, 1, 19) + by], are_scores=True)})

    assert found(scored("a", 0), scored("b", 0.001), scored("c", 0)) == []
    assert found(scored("a", 0), scored("b", 0.1), scored("c", 0)) == [("b", "the scores of the texts")]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["http://a:1"], "takes two nodes or more"),
        (["http://a:1", "http://a:1"], "takes two nodes or more, each once"),
        (["http://a:1", "a:2"], "'a:2' is neither"),
        (["http://a:1", "http://b:1", "--qiuck"], "unrecognized arguments: --qiuck"),
    ],
)
def test_wrong_arguments(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--fleet", *flags])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
