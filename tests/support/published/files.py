"""Models in the files that other programs read: ONNX exports without other weights, GGUF, and quantized checkpoints.

Each is made of a plain model, which is made again for the reference.
"""

import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel

from tests.support.exports import export_of, halved, quantized
from tests.support.gguf_files import as_stored, save_gguf
from tests.support.published import Layout, RowsOf
from tests.support.published.usual import dense_reference, save_dense, save_transformer
from tests.support.quantized_checkpoints import save_quantized

_Make = Callable[[Path, Path], object]
"""Writes the plain model into the first of two empty folders, and what is published into the second."""


def _layout(name: str, make: _Make, reference: Callable[[Path], RowsOf], family: str, **fields: Any) -> Layout:
    def save(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as plain:
            make(Path(plain), folder)

    def rows_of(folder: Path) -> RowsOf:
        with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as made:
            make(Path(plain), Path(made))
            return reference(Path(plain))

    return Layout(name, save, rows_of, family, **fields)


# --- ONNX ---------------------------------------------------------------------------------------------------------


def _export(plain: Path, folder: Path, *, at_top: bool = False) -> None:
    """As Xenova and onnx-community publish them, in several formats; `at_top`: as Qdrant does, for fastembed."""
    save_transformer(plain, "bert", "bert")
    exported = export_of(plain, plain / "exported")
    shutil.copytree(exported, folder, dirs_exist_ok=True)
    if at_top:
        shutil.move(folder / "onnx/model.onnx", folder / "model.onnx")
        (folder / "onnx").rmdir()
    else:
        for make in (quantized, halved):
            make(folder / "onnx/model.onnx")


def _first_token(plain: Path) -> RowsOf:
    model: Any = AutoModel.from_pretrained(plain, dtype=torch.float32, local_files_only=True).eval()

    def rows(ids: NDArray[np.int64], border: int) -> NDArray[np.float32]:
        with torch.inference_mode():
            found: NDArray[np.float32] = model(input_ids=torch.from_numpy(ids)[None]).last_hidden_state[0, 0].numpy()
        return found

    return rows


_UNVERIFIED = {"path": "export", "dtype": "float32", "settings": {"unverified": True, "pooling": "cls"}}

# --- GGUF and quantized checkpoints -------------------------------------------------------------------------------


def _gguf(plain: Path, folder: Path, family: str, tokenizer: str, pooling: str, file: str, form: str) -> None:
    save_dense(plain, family, tokenizer, pooling)
    named = {"mean_tokens": "mean", "lasttoken": "lasttoken"}[pooling]
    save_gguf(plain, folder / file, form, pooling=named, adds_end=True)
    as_stored(plain, form)


def _quantized(plain: Path, folder: Path, scheme: str, dtype: str) -> None:
    save_dense(plain, "qwen3", "qwen", "lasttoken", prompts={"query": "Query: ", "document": ""}, stored=dtype)
    save_quantized(plain, folder, scheme, dtype)


LAYOUTS = (
    _layout("Xenova/bge-small-en-v1.5", _export, _first_token, "onnx alone", **_UNVERIFIED),
    _layout(
        "Qdrant/bge-small-en-v1.5-onnx", partial(_export, at_top=True), _first_token, "onnx alone", **_UNVERIFIED,
    ),
    _layout(
        "Qwen/Qwen3-Embedding-0.6B-GGUF",
        partial(
            _gguf, family="qwen3", tokenizer="qwen", pooling="lasttoken", file="Qwen3-Embedding-0.6B-Q8_0.gguf",
            form="Q8_0",
        ),
        dense_reference, "made",
    ),
    _layout(
        "nomic-ai/nomic-embed-text-v1.5-GGUF",
        partial(
            _gguf, family="nomic_bert", tokenizer="bert", pooling="mean_tokens",
            file="nomic-embed-text-v1.5.f16.gguf", form="F16",
        ),
        dense_reference, "made",
    ),
    _layout(
        "drawais/Qwen3-Embedding-8B-AWQ-INT4", partial(_quantized, scheme="awq", dtype="float16"), dense_reference,
        "made",
    ),
    _layout(
        "maywell/Qwen3-Embedding-8B-FP8-Dynamic", partial(_quantized, scheme="fp8 of rows", dtype="bfloat16"),
        dense_reference, "made",
    ),
    _layout(
        "boboliu/Qwen3-Embedding-4B-W4A16-G128", partial(_quantized, scheme="int4", dtype="bfloat16"),
        dense_reference, "made",
    ),
    _layout(
        "AXERA-TECH/Qwen3-Embedding-0.6B-GPTQ-Int8", partial(_quantized, scheme="gptq of 8 bits", dtype="float16"),
        dense_reference, "made",
    ),
)  # fmt: skip
