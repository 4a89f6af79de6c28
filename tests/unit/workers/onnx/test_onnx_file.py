"""Graphs in ONNX's format, read by ONNX Runtime, and by ONNX's own checker where it is installed."""

import numpy as np
import onnxruntime
import pytest

from vecd.workers.onnx.file import Element, Graph


def run(graph: Graph, **feeds: object) -> list[object]:
    session = onnxruntime.InferenceSession(graph.to_bytes(), providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


@pytest.mark.parametrize("number", [0, 127, 128, 2**62])
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
