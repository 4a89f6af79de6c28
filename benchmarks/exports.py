"""A model as other runtimes want it: ONNX files, made once and kept, and an OpenVINO model, made for every run.

Owns the graph that they run, which is transformers' model, pooling and normalization in one, so that a peer does the
whole work inside its own runtime; and the folders below `.bench/exports`. Called by `benchmarks.peers`, and as
`python -m benchmarks.exports MODEL` by `benchmarks.engine`, which does not import torch; that prints the files' folder.
"""

import hashlib
import inspect
import os
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel

from vecd.model.card import ModelCard, read_card

_FOLDER = Path(__file__).parents[1] / ".bench" / "exports"
_INPUTS = ("token_ids", "mask")
_OPSET = 17
_POOLINGS = ("mean", "cls", "lasttoken")


class NotExportable(Exception):
    """Raised for a model that has more behind its layers than these graphs do. One line."""


class _PooledModel(torch.nn.Module):
    """Raises NotExportable."""

    def __init__(self, card: ModelCard, attention: str) -> None:
        super().__init__()
        [*others, pooling] = card.pooling
        if others or pooling not in _POOLINGS or any(step.kind != "normalize" for step in card.steps):
            raise NotExportable("peers are exported with mean, cls or lasttoken pooling and a normalization alone")
        self._pooling = pooling
        try:
            model: Any = AutoModel.from_pretrained(card.weights_folder, attn_implementation=attention).eval()
        except ValueError as error:  # the class has not this attention; the rest of the message is advice
            raise NotExportable(str(error).partition(".")[0]) from None
        self._model = model.encoder if hasattr(model, "decoder") else model  # of T5, the half that embeds
        self._model.config.use_cache = False
        self._has_segments = "token_type_ids" in inspect.signature(self._model.forward).parameters

    @property
    def config(self) -> Any:
        return self._model.config

    def forward(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        """[B, L] each → vectors of length 1, [B, H]."""
        segments = {"token_type_ids": torch.zeros_like(token_ids)} if self._has_segments else {}
        hidden = self._model(input_ids=token_ids, attention_mask=mask, **segments).last_hidden_state
        return torch.nn.functional.normalize(self._pool(hidden, mask), dim=-1)

    def _pool(self, hidden: Tensor, mask: Tensor) -> Tensor:
        if self._pooling == "cls":
            return hidden[:, 0]
        if self._pooling == "lasttoken":
            last = (mask.sum(1) - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
            return hidden.gather(1, last)[:, 0]
        weights = mask[..., None].to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1)


def exported(model_folder: Path, cache: Path = _FOLDER) -> Path:
    """The folder of the model's ONNX files, each named for its variant; made if it is not there yet.

    Raises NotExportable. Side effect: the folder appears when whole.
    """
    card = read_card(model_folder)
    folder = cache / f"{model_folder.name}-{_digest(card)}"
    if not folder.is_dir():
        print(f"exporting {model_folder.name} …", file=sys.stderr, flush=True)
        unfinished = cache / f".{folder.name}.{os.getpid()}"
        unfinished.mkdir(parents=True)
        _export_onnx(card, unfinished)
        unfinished.rename(folder)
    return folder


def convert_to_openvino(model_folder: Path) -> Any:
    """An `openvino.Model`; its number format is chosen when it is compiled. Raises NotExportable."""
    import openvino

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return openvino.convert_model(
            _PooledModel(read_card(model_folder), "sdpa"), example_input={name: _example() for name in _INPUTS}
        )


def _export_onnx(card: ModelCard, folder: Path) -> None:
    """The model as torch exports it, written in two ways, and with ONNX Runtime's own fusions where these work."""
    # What attention is written with decides what the optimizer recognizes: it fuses "eager", and not "sdpa"
    # (onnxruntime 1.31, get_fused_operator_statistics). What is fastest as it is, nobody knows beforehand.
    for attention in ("sdpa", "eager"):
        model = _PooledModel(card, attention)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tracing, and of the exporter's age: the result is compared
            torch.onnx.export(
                model,
                (_example(), _example()),
                str(folder / f"{attention}.onnx"),
                input_names=list(_INPUTS),
                output_names=["vectors"],
                dynamic_axes={name: {0: "sequences", 1: "tokens"} for name in _INPUTS} | {"vectors": {0: "sequences"}},
                opset_version=_OPSET,
                dynamo=False,
            )
    try:
        _fuse(folder, model.config)
    except Exception as error:  # the optimizer is written for BERT, and raises anything for other families
        print(f"no fused export: {type(error).__name__}: {error}", file=sys.stderr)


def _fuse(folder: Path, config: Any) -> None:
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # read when onnxruntime is imported
    from onnxruntime.transformers import optimizer

    heads, hidden = config.num_attention_heads, config.hidden_size
    optimized = optimizer.optimize_model(str(folder / "eager.onnx"), "bert", num_heads=heads, hidden_size=hidden)
    optimized.save_model_to_file(str(folder / "fused.onnx"))


def _digest(card: ModelCard) -> str:
    """Of what an export depends on: which weights, by size and time, and which exporters."""
    facts = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in card.weight_files]
    versions = [version(package) for package in ("torch", "transformers", "onnxruntime")]
    return hashlib.sha256(repr([facts, versions]).encode()).hexdigest()[:12]


def _example() -> Tensor:
    return torch.ones(2, 9, dtype=torch.long)


if __name__ == "__main__":
    try:
        print(exported(Path(sys.argv[1])))
    except NotExportable as error:
        sys.exit(str(error))
