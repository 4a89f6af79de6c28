"""The bundled model as other runtimes want it: ONNX files and an OpenVINO model, made afresh for every run.

Owns the graph that they run: transformers' model, mean pooling and normalization in one, so that a peer does the
whole work inside its own runtime. Writes into the folder that it is given. Called by `benchmarks.peers`.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel

_INPUTS = ("token_ids", "mask")
_OPSET = 17


class _PooledModel(torch.nn.Module):
    def __init__(self, model_folder: Path, attention: str) -> None:
        super().__init__()
        self._model: Any = AutoModel.from_pretrained(model_folder, attn_implementation=attention).eval()

    @property
    def config(self) -> Any:
        return self._model.config

    def forward(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        """[B, L] each → vectors of length 1, [B, H]."""
        segments = torch.zeros_like(token_ids)
        output = self._model(input_ids=token_ids, attention_mask=mask, token_type_ids=segments)
        weights = mask[..., None].to(output.last_hidden_state.dtype)
        pooled = (output.last_hidden_state * weights).sum(1) / weights.sum(1)
        return torch.nn.functional.normalize(pooled, dim=-1)


def export_onnx(model_folder: Path, folder: Path) -> dict[str, Path]:
    """Variant → file: the model as torch exports it, written in two ways, and with ONNX Runtime's own fusions."""
    from onnxruntime.transformers import optimizer

    # What attention is written with decides what the optimizer recognizes: it fuses "eager", and not "sdpa"
    # (onnxruntime 1.31, get_fused_operator_statistics). What is fastest as it is, nobody knows beforehand.
    variants = {attention: folder / f"{attention}.onnx" for attention in ("sdpa", "eager")}
    for attention, file in variants.items():
        model = _PooledModel(model_folder, attention)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tracing, and of the exporter's age: the result is compared
            torch.onnx.export(
                model,
                (_example(), _example()),
                str(file),
                input_names=list(_INPUTS),
                output_names=["vectors"],
                dynamic_axes={name: {0: "sequences", 1: "tokens"} for name in _INPUTS} | {"vectors": {0: "sequences"}},
                opset_version=_OPSET,
                dynamo=False,
            )
    heads, hidden = model.config.num_attention_heads, model.config.hidden_size
    optimized = optimizer.optimize_model(str(variants["eager"]), "bert", num_heads=heads, hidden_size=hidden)
    variants["fused"] = folder / "fused.onnx"
    optimized.save_model_to_file(str(variants["fused"]))
    return variants


def convert_to_openvino(model_folder: Path) -> Any:
    """An `openvino.Model`; its number format is chosen when it is compiled."""
    import openvino

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return openvino.convert_model(
            _PooledModel(model_folder, "sdpa"), example_input={name: _example() for name in _INPUTS}
        )


def _example() -> Tensor:
    return torch.ones(2, 9, dtype=torch.long)
