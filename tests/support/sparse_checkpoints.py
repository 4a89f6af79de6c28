"""Tiny SPLADE models with random weights, as sentence-transformers saves them, and its weights for token ids.

Imports torch, transformers and sentence-transformers: only for the tests of workers and the golden ones.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers.sentence_transformer.modules import Transformer
from sentence_transformers.sparse_encoder import SparseEncoder
from sentence_transformers.sparse_encoder.modules import Router, SparseStaticEmbedding, SpladePooling

from tests.support.checkpoints import MAX_TOKENS, _save_transformer, sequences_of, worker_config
from vecd.model.card import read_card
from vecd.shm.arena import ArenaSpec
from vecd.shm.output import Output, span_of
from vecd.workers.batch import Engine, PackedBatch
from vecd.workers.config import WorkerConfig
from vecd.workers.parity import vectors_of
from vecd.workers.select import build


def save_masked_words(folder: Path, family: str = "bert", **settings: Any) -> Path:
    """A plain model for masked words, without modules."""
    _save_transformer(folder, family, MAX_TOKENS, "float32", True, settings)
    return folder


def save_splade(
    folder: Path,
    family: str = "bert",
    *,
    pooling: str = "max",
    activation: str = "relu",
    query_weights: torch.Tensor | None = None,
    **settings: Any,
) -> Path:
    """A SparseEncoder. With `query_weights` [vocab_size]: a Router that gives queries their static weights."""
    plain = save_masked_words(folder / "plain", family, **settings)
    transformer = Transformer(str(plain), transformer_task="fill-mask")
    documents: list[Any] = [transformer, SpladePooling(pooling_strategy=pooling, activation_function=activation)]  # type: ignore[arg-type]
    modules = documents
    if query_weights is not None:
        queries = SparseStaticEmbedding(tokenizer=transformer.tokenizer, weight=query_weights, frozen=True)
        modules = [Router.for_query_document(query_modules=[queries], document_modules=documents)]
    SparseEncoder(modules=modules, device="cpu").save(str(folder / "splade"))
    return folder / "splade"


class SparseReference:
    """sentence-transformers' weights for token ids, each sequence by itself."""

    def __init__(self, folder: Path) -> None:
        self._model = SparseEncoder(str(folder), device="cpu", local_files_only=True).eval()

    def __call__(self, batch: PackedBatch) -> NDArray[np.float32]:
        """float32 [B, vocab_size]"""
        return np.stack([self.of_ids(ids) for ids in sequences_of(batch)])

    def of_ids(self, ids: NDArray[np.int32], task: str = "document") -> NDArray[np.float32]:
        token_ids = torch.from_numpy(ids.astype(np.int64))[None]
        features: Any = {"input_ids": token_ids, "attention_mask": torch.ones_like(token_ids)}
        with torch.inference_mode():
            for module in self._model:
                features = module(features, task=task) if isinstance(module, Router) else module(features)
        weights: NDArray[np.float32] = features["sentence_embedding"][0].float().numpy()
        return weights


def sparse_engine(folder: Path, path: str, dtype: str = "float32") -> Engine:
    return build(sparse_config(folder), path, dtype)


def sparse_config(folder: Path) -> WorkerConfig:
    return worker_config(folder, "sparse", arena=ArenaSpec(2, 64, read_card(folder, "sparse").row_dim))


def asking_for_weights(batch: PackedBatch, config: WorkerConfig) -> PackedBatch:
    outputs = np.full(batch.lengths.size, Output.SPARSE, dtype=np.uint8)
    return PackedBatch(batch.lengths, batch.token_ids, outputs, None, span_of(config.card))


def weights_of(engine: Engine, config: WorkerConfig, batch: PackedBatch) -> NDArray[np.float32]:
    """float32 [B, vocab_size]; the zeros behind them are asserted."""
    card = config.card
    rows = vectors_of(engine, asking_for_weights(batch, config), card.row_dim).reshape(batch.lengths.size, -1)
    assert not rows[:, card.vocab_size :].any()
    return rows[:, : card.vocab_size]
