"""What sentence-transformers and transformers make of texts: what the served engine's rows are compared with.

Owns how a model of each kind is read by them, and how their output becomes rows like ours. They read the model's files
themselves, from text to result, in float32 for any stored type, on the processor, one text at a time, and run none of
the model's code. Called by `vecd.workers.check.run`, each function in a process of its own. All raise ModelError for an
output of another size, and whatever the library and the model raise.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from vecd.shm.card import ModelCard, ModelError
from vecd.shm.output import Output, span_of
from vecd.workers.check.order import is_query, pairs_of
from vecd.workers.check.vectors import Rows
from vecd.workers.engine import PackedBatch

_SAFE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
_OF_A_MODEL: dict[str, Any] = {"device": "cpu", "model_kwargs": {"dtype": torch.float32}, **_SAFE}


class OfText(NamedTuple):
    """What a library makes of a text."""

    rows: Rows
    token_ids: list[int] | None
    """None where no model of transformers is given any."""


class Library(NamedTuple):
    """A library that can make what the main output of a model is."""

    name: str
    """Of the package."""
    compute: Callable[[ModelCard, int, Sequence[str]], list["OfText"]]
    """The card, the limit on tokens and the texts, to what it makes of each."""
    output: Output
    """What is compared."""


def library_of(card: ModelCard) -> Library:
    """The one for models of this kind."""
    match card.main_output:
        case Output.VECTORS | Output.HYBRID:
            return Library("sentence-transformers", dense_vectors, Output.VECTORS)
        case Output.SPARSE:
            return Library("sentence-transformers", sparse_weights, Output.SPARSE)
        case Output.TOKEN_VECTORS:
            return Library("sentence-transformers", token_vectors, Output.TOKEN_VECTORS)
        case Output.SCORES if "rerank" in card.capabilities:
            return Library("sentence-transformers", pair_scores, Output.SCORES)
    return Library("transformers", label_scores, card.main_output)


def our_rows(rows: Rows, card: ModelCard, batch: PackedBatch, kept: Sequence[list[int]]) -> tuple[Rows, list[int]]:
    """The part of the engine's `rows` of `batch` that a library has, too, and how many rows each sequence has of it.
    `kept`: as in `Order`."""
    num_rows = batch.rows_of_each.tolist()
    if card.main_output is Output.HYBRID:
        return rows[batch.first_rows, : card.dim], [1] * len(num_rows)
    if card.main_output is Output.TOKEN_VECTORS:
        places = zip(batch.first_rows.tolist(), kept, strict=True)
        rows = rows[[first + place for first, places in places for place in places]]
        num_rows = [len(places) for places in kept]
    return rows if card.main_output.spans_rows else rows[:, : card.main_output.width_of(card)], num_rows


def dense_vectors(card: ModelCard, max_tokens: int, texts: Sequence[str]) -> list[OfText]:
    """Of each text: float32 [1, dim]"""
    warnings.simplefilter("ignore")
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(card.folder, **_OF_A_MODEL)
    model.float()  # StaticEmbedding ignores the type
    if hasattr(model[0], "auto_model"):  # StaticEmbedding takes texts of any length
        model.max_seq_length = max_tokens

    def vectors(index: int) -> Any:
        return model.encode([texts[index]], convert_to_numpy=True, show_progress_bar=False)

    return _of_each(texts, model, vectors, card.dim)


def pair_scores(card: ModelCard, max_tokens: int, texts: Sequence[str]) -> list[OfText]:
    """Logits of each pair, float32 [1, labels]"""
    warnings.simplefilter("ignore")
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(card.folder, max_length=max_tokens, **_OF_A_MODEL)
    model.float()
    pairs = pairs_of(texts)

    def scores(index: int) -> Any:
        identity = torch.nn.Identity()
        made = model.predict([pairs[index]], activation_fn=identity, convert_to_numpy=True, show_progress_bar=False)
        return np.asarray(made).reshape(1, -1)

    return _of_each(texts, model, scores, card.num_labels)


def label_scores(card: ModelCard, max_tokens: int, texts: Sequence[str]) -> list[OfText]:
    """Logits of each text, float32 [1, labels], or of its tokens, [T, labels]"""
    warnings.simplefilter("ignore")
    import transformers

    auto: Any = transformers.AutoModelForTokenClassification
    if card.main_output is Output.SCORES:
        auto = transformers.AutoModelForSequenceClassification
    model = auto.from_pretrained(card.weights_folder, dtype=torch.float32, use_safetensors=True, **_SAFE).train(False)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(card.weights_folder, **_SAFE)

    def logits(index: int) -> Any:
        features = tokenizer(texts[index], truncation=True, max_length=max_tokens, return_tensors="pt")
        with torch.inference_mode():
            return model(**features).logits.reshape(-1, model.config.num_labels).numpy()

    return _of_each(texts, model, logits, card.num_labels)


def sparse_weights(card: ModelCard, max_tokens: int, texts: Sequence[str]) -> list[OfText]:
    """Of each document: float32 [span, row_dim]"""
    warnings.simplefilter("ignore")
    from sentence_transformers import SparseEncoder

    model = SparseEncoder(card.folder, **_OF_A_MODEL)
    model.float()
    model.max_seq_length = max_tokens

    def weights(index: int) -> Any:
        found: Any = model.encode_document(
            [texts[index]], convert_to_tensor=True, convert_to_sparse_tensor=False, show_progress_bar=False
        )
        rows = np.zeros((1, span_of(card) * card.row_dim), dtype=np.float32)
        rows[:, : card.vocab_size] = _checked(found.cpu().numpy(), card.vocab_size)
        return rows.reshape(-1, card.row_dim)

    return _of_each(texts, model, weights, card.row_dim)


def token_vectors(card: ModelCard, max_tokens: int, texts: Sequence[str]) -> list[OfText]:
    """Of the tokens of each text that have a vector: float32 [rows, token_dim]"""
    warnings.simplefilter("ignore")
    from sentence_transformers import MultiVectorEncoder

    model = MultiVectorEncoder(card.folder, **_OF_A_MODEL)
    model.float()

    def vectors(index: int) -> Any:
        encode: Any = model.encode_query if is_query(index) else model.encode_document
        return encode([texts[index]], convert_to_numpy=True, show_progress_bar=False)[0]

    return _of_each(texts, model, vectors, card.token_dim)


def _of_each(texts: Sequence[str], model: torch.nn.Module, rows_of: Callable[[int], Any], width: int) -> list[OfText]:
    """`rows_of` the index of each text, and the token ids that the transformer in `model` is given for it."""
    from transformers import PreTrainedModel

    given: list[list[int]] = []

    def record(_module: torch.nn.Module, args: Any) -> None:
        given.append(args[0].flatten().tolist())

    transformer = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if transformer is not None:  # the table of words, because sentence-transformers calls no hook of the model's own
        transformer.get_input_embeddings().register_forward_pre_hook(record)
    found = []
    for index in range(len(texts)):
        given.clear()
        rows = _checked(rows_of(index), width)
        found.append(OfText(rows, given[0] if given else None))
    return found


def _checked(rows: Any, width: int) -> Rows:
    if rows.shape[1] != width:
        raise ModelError(f"its vectors have {rows.shape[1]} dimensions, vecd's {width}")
    return np.asarray(rows, dtype=np.float32)
