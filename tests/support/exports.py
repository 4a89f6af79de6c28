"""ONNX exports for tests: of a tiny model, laid out as optimum does; and graphs that are made to be odd.

Imports torch, and needs the onnx package, without which its tests are skipped.
"""

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModel

_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class _Exported(torch.nn.Module):
    def __init__(self, folder: Path, auto: Any, output: str) -> None:
        super().__init__()
        self._model: Any = auto.from_pretrained(folder, attn_implementation="eager").eval()
        self._output = output

    def forward(self, *inputs: torch.Tensor) -> Any:
        return getattr(self._model(**dict(zip(_INPUTS, inputs, strict=True))), self._output)


def export_of(folder: Path, target: Path, auto: Any = AutoModel, output: str = "last_hidden_state") -> Path:
    """Write a folder like that of a tiny BERT, with an ONNX export in place of the safetensors. Returns `target`.
    `auto`: the class in transformers that loads it, which has the `output`."""
    pytest.importorskip("onnx")
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors"))
    (target / "onnx").mkdir()
    example = torch.ones(2, 9, dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tracing, and of the exporter's age
        torch.onnx.export(
            _Exported(folder, auto, output),
            (example, example, 0 * example),
            str(target / "onnx/model.onnx"),
            input_names=list(_INPUTS),
            output_names=[output],
            dynamic_axes={name: {0: "batch", 1: "length"} for name in (*_INPUTS, output)},
            opset_version=17,
            dynamo=False,
        )
    return target


def quantized(export: Path) -> Path:
    """Write model_quantized.onnx beside it, as optimum and Xenova do: products in int8, scaled by the largest value of
    a batch. Returns its path."""
    quantization, target = pytest.importorskip("onnxruntime.quantization"), export.with_name("model_quantized.onnx")
    quantization.quantize_dynamic(str(export), str(target), weight_type=quantization.QuantType.QInt8)
    return target


def halved(export: Path) -> Path:
    """Write model_fp16.onnx beside it: weights in float16, hidden states in float32. Returns its path."""
    onnx, float16 = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime.transformers.float16")
    target = export.with_name("model_fp16.onnx")
    onnx.save(float16.convert_float_to_float16(onnx.load(str(export)), keep_io_types=True), str(target))
    return target


def odd_export(
    path: Path,
    table: NDArray[Any],
    *,
    inputs: tuple[str, ...] = ("input_ids",),
    output: str = "last_hidden_state",
    shape: tuple[int | str, int | str] = ("batch", "length"),
    operator: tuple[str, str] = ("Identity", ""),
    location: str = "",
    change: Callable[[Any], None] = lambda model: None,
) -> None:
    """Write a graph whose hidden states are rows of `table`, after `operator` (its name and domain). `location`: the
    file of the table, relative to the graph's; "" for within."""
    onnx = pytest.importorskip("onnx")
    helper, kinds = onnx.helper, {"float32": onnx.TensorProto.FLOAT, "float16": onnx.TensorProto.FLOAT16}
    kind = kinds[table.dtype.name]
    weights = onnx.numpy_helper.from_array(table, "table")
    if location:
        weights.ClearField("raw_data")
        weights.data_location = onnx.TensorProto.EXTERNAL
        weights.external_data.add(key="location", value=location)
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node(operator[0], ["rows"], [output], domain=operator[1]),
    ]
    graph = helper.make_graph(
        nodes,
        "odd",
        [helper.make_tensor_value_info(name, onnx.TensorProto.INT64, shape) for name in inputs],
        [helper.make_tensor_value_info(output, kind, None)],
        [weights],
    )
    opsets = [helper.make_opsetid("", 17), *(helper.make_opsetid(operator[1], 1) for _ in operator[1:] if operator[1])]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    change(model)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(model.SerializeToString())


def float32_table(num_rows: int, width: int) -> NDArray[np.float32]:
    """Random, the same at every call."""
    return np.random.default_rng(0).standard_normal((num_rows, width)).astype(np.float32)
