"""Those whom vecd's engine is measured against, each as a class with one method.

Owns how each is set up: its number of threads, everything else as its makers advise for latency. Called by
`benchmarks.duels`, in a process that has one core and OMP_NUM_THREADS=1, and by `benchmarks.inprocess`, with all cores.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.exports import convert_to_openvino, exported

_NUM_LOOKS = 3
_OPENVINO_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


class Peer(Protocol):
    variant: str
    """What is particular about this one among those of its name."""

    def embed(self, token_ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[np.float32]:
        """Token ids and mask [B, L] → vectors [B, D] of length 1."""


class OnnxRuntime:
    def __init__(self, file: Path, variant: str, num_threads: int = 1) -> None:
        os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # read at the import; without it a thread reports to its maker
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = num_threads, 1
        self._session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self.variant = variant

    def embed(self, token_ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[np.float32]:
        vectors: NDArray[np.float32] = self._session.run(None, {"token_ids": token_ids, "mask": mask})[0]
        return vectors


class OpenVino:
    def __init__(self, model: Any, dtype: str, num_threads: int = 1) -> None:
        import openvino

        properties = {
            "INFERENCE_NUM_THREADS": num_threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": _OPENVINO_PRECISIONS[dtype],
        }
        self._model = openvino.Core().compile_model(model, "CPU", properties)
        # What it really runs in: a processor without bfloat16 may make it something else.
        self.variant = str(self._model.get_property("INFERENCE_PRECISION_HINT").get_type_name())

    def embed(self, token_ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[np.float32]:
        vectors: NDArray[np.float32] = self._model([token_ids, mask])[0]
        return vectors


class SentenceTransformers:
    """Its modules on token ids: what `encode` does, without its tokenizer's time."""

    variant = "modules on token ids"

    def __init__(self, folder: Path) -> None:
        from sentence_transformers import SentenceTransformer

        self._model = SentenceTransformer(str(folder), device="cpu").eval()

    def embed(self, token_ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[np.float32]:
        features = {"input_ids": torch.from_numpy(token_ids), "attention_mask": torch.from_numpy(mask)}
        with torch.inference_mode():
            vectors: NDArray[np.float32] = self._model(features)["sentence_embedding"].numpy()
        return vectors


class Peers:
    """Makes peers of one model, each export once.

    `has_memory_for_all`: False for a model of gigabytes, of which all variants of a peer do not fit side by side.
    `num_threads`: of ONNX Runtime and OpenVINO; torch's are the process's.
    """

    def __init__(self, model_folder: Path, has_memory_for_all: bool = True, num_threads: int = 1) -> None:
        self._model_folder = model_folder
        self._num_threads = num_threads
        self._has_memory_for_all = has_memory_for_all
        self._openvino_model: Any = None

    def load(self, name: str, dtype: str) -> list[Peer]:
        """All variants of a peer, of which the caller finds out the fastest; without memory for all the one that is the
        fastest with a few short texts.

        Raises KeyError for an unknown one, and NotExportable.
        """
        makers: Mapping[str, Callable[[str], list[Peer]]] = {
            "onnxruntime": self._load_onnxruntime,
            "openvino": self._load_openvino,
            "sentence-transformers": self._load_sentence_transformers,
        }
        return makers[name](dtype)

    def _load_onnxruntime(self, dtype: str) -> list[Peer]:
        if dtype != "float32":
            raise ValueError(f"onnxruntime is exported in float32, not {dtype}")
        files = sorted(exported(self._model_folder).glob("*.onnx"))
        if not self._has_memory_for_all:
            files = [min(files, key=lambda file: _look(OnnxRuntime(file, file.stem, self._num_threads)))]
        return [OnnxRuntime(file, file.stem, self._num_threads) for file in files]

    def _load_openvino(self, dtype: str) -> list[Peer]:
        self._openvino_model = self._openvino_model or convert_to_openvino(self._model_folder)
        return [OpenVino(self._openvino_model, dtype, self._num_threads)]

    def _load_sentence_transformers(self, dtype: str) -> list[Peer]:
        if dtype != "float32":
            raise ValueError(f"sentence-transformers is loaded in float32, not {dtype}")
        return [SentenceTransformers(self._model_folder)]


def _look(peer: Peer) -> float:
    """Seconds of a short pass, the shortest of three."""
    token_ids = np.ones((4, 64), np.int64)
    seconds = []
    for _ in range(_NUM_LOOKS + 1):
        started = time.perf_counter()
        peer.embed(token_ids, token_ids)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])  # the first prepares
