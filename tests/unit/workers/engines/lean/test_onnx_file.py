"""Graphs in ONNX's format, read by ONNX Runtime, and by ONNX's own checker where it is installed."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from tests.support.checkpoints import Checkpoints
from vecd.shm.card import read_card
from vecd.workers.engines.lean.arrays import Arrays
from vecd.workers.engines.lean.graph import encoder_graph
from vecd.workers.engines.lean.onnx_file import Element, Graph
from vecd.workers.families.description import describe


def run(graph: Graph, **feeds: object) -> list[object]:
    session = onnxruntime.InferenceSession(graph.to_bytes(), providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**31, 2**62])
def test_numbers_of_any_size_are_read_again(number: int) -> None:
    graph = Graph("numbers")
    x = graph.input("x", Element.INT64, [1])
    graph.output(graph.node("Add", x, graph.constant([number])), Element.INT64, [1])
    [found] = run(graph, x=np.array([1]))
    assert found.tolist() == [number + 1]  # type: ignore[attr-defined]


def test_branches_use_the_values_around_them() -> None:
    graph = Graph("outer")
    x, is_added = graph.input("x", Element.FLOAT32, ["n"]), graph.input("is_added", Element.BOOL, [])
    twice, same = Graph("then"), Graph("else")
    twice.output(twice.node("Add", x, x), Element.FLOAT32, None)
    same.output(same.node("Identity", x), Element.FLOAT32, None)
    graph.output(graph.node("If", is_added, then_branch=twice, else_branch=same), Element.FLOAT32, ["n"])
    for value, expected in (True, [4.0, 6.0]), (False, [2.0, 3.0]):
        [found] = run(graph, x=np.array([2, 3], np.float32), is_added=np.array(value))
        assert found.tolist() == expected  # type: ignore[attr-defined]


def test_another_kind_of_attribute_is_a_mistake() -> None:
    with pytest.raises(TypeError, match="list"):
        Graph("g").node("Squeeze", "x", axes=[0])


@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_onnx_accepts_a_model(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    onnx = pytest.importorskip("onnx")
    card = read_card(Checkpoints(tmp_path_factory.mktemp)(family))
    arrays = Arrays([Path(card.weights_folder) / "model.safetensors"])
    made = encoder_graph(card, describe(card, arrays), arrays)
    model = onnx.load_from_string(made.content)
    assert {tensor.name for tensor in model.graph.initializer} >= made.weights.keys()
    assert [value.name for value in model.graph.input] == ["token_ids", "positions", "starts", "counts", "lengths"]
    assert {node.op_type for node in model.graph.node} >= {"Gather", "Gemm", "LayerNormalization", "If"}
    assert {(opset.domain, opset.version) for opset in model.opset_import} == {("", 18), ("com.microsoft", 1)}
