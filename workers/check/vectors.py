"""The rows that the served engine's are compared with: the reference model's, and those of libraries that read texts.

Owns the batches of the comparison, the comparison by length of text, and the search for weights that are not finite.
The bounds are those of `vecd.workers.parity`.
"""

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from vecd.base.files import JsonMapping, JsonObject
from vecd.model.card import ModelCard, ModelError, one_line
from vecd.shm.output import MAX_BATCH_TOKENS, Output, span_of
from vecd.workers.batch import Engine, PackedBatch
from vecd.workers.check.order import is_query, pairs_of
from vecd.workers.config import WorkerConfig
from vecd.workers.parity import Parity, compare, vectors_of
from vecd.workers.torch.checkpoint import Tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Rows: TypeAlias = NDArray[np.float32]

_LENGTH_STEPS = (16, 64, 256, 1024, 4096)
"""Upper limits, in tokens, of the classes of lengths; longer texts are one more class."""

_SCANNED_ELEMENTS = 1 << 24


def batch_of(card: ModelCard, sequences: Sequence[list[int]], borders: Sequence[int]) -> PackedBatch:
    lengths = np.array([len(ids) for ids in sequences], dtype=np.int32)
    token_ids = np.concatenate([np.array(ids, dtype=np.int32) for ids in sequences])
    output = card.main_output
    if output is Output.VECTORS:
        return PackedBatch(lengths, token_ids)
    outputs = np.full(lengths.size, output, dtype=np.uint8)
    is_divided = any(borders)
    span = span_of(card) if output.spans_rows else 1
    return PackedBatch(lengths, token_ids, outputs, np.array(borders, np.int32) if is_divided else None, span)


def embed(engine: Engine, card: ModelCard, batch: PackedBatch) -> Rows:
    """The engine's rows, [`batch.num_rows`, row_dim], in batches of several lengths: that is where paths fail."""
    firsts, num_tokens = [0], 0
    for index, length in enumerate(batch.lengths.tolist()):
        if num_tokens and num_tokens + length > MAX_BATCH_TOKENS:
            firsts.append(index)
            num_tokens = 0
        num_tokens += length
    parts = itertools.pairwise([*firsts, batch.lengths.size])
    return np.concatenate([vectors_of(engine, batch.part(first, last), card.row_dim) for first, last in parts])


def reference_model_vectors(config: WorkerConfig, dtype: str, batch: PackedBatch) -> Rows:
    """The rows of transformers' own modules, [`batch.num_rows`, row_dim], one sequence at a time. Raises ModelError."""
    from vecd.workers.torch.loading import load_model
    from vecd.workers.torch.reference import reference_rows

    def load(dtype: str) -> "PreTrainedModel":
        return load_model(config.card, dtype, torch.device(config.device))

    try:
        return reference_rows(config, dtype, load, batch)
    except ModelError:
        raise
    except Exception as error:  # a model may raise anything
        raise ModelError(f"{config.card.folder}: the reference model cannot be run: {one_line(error)}") from error


def compare_by_length(
    ours: Rows,
    theirs: Rows,
    batch: PackedBatch,
    rows_of_each: Sequence[int],
    output: Output,
    dtype: str,
    probes: JsonMapping,
) -> JsonObject:
    """Parity of two sets of rows of an output, for all texts and for each class of lengths. `rows_of_each`: how many
    of the rows each sequence of `batch` has. `dtype`: of ours, sets the bounds. `probes`: the figures of the engine's
    parity on random probes; empty if there are none."""
    tokens, num_rows = batch.lengths, np.asarray(rows_of_each)
    span = batch.span if output.spans_rows else 1
    classes = np.searchsorted(_LENGTH_STEPS, tokens)
    whole = compare(ours, theirs, span, output)
    by_length = []
    for number in np.unique(classes):
        is_of_class = np.repeat(classes == number, num_rows)
        if is_of_class.any():
            parity = compare(ours[is_of_class], theirs[is_of_class], span, output)
            by_length.append(_figures(parity, tokens[classes == number]))
    is_within_bounds = _in_units_of(probes, whole).is_within_bounds(dtype)
    return {**_figures(whole, tokens), "is_within_bounds": is_within_bounds, "by_length": by_length}


def _in_units_of(probes: JsonMapping, parity: Parity) -> Parity:
    """Scores may hardly differ between a few texts: the spread of the probes counts, if it is larger."""
    if not parity.relative_diff or not probes.get("relative_diff"):
        return parity
    unit = probes["max_abs_diff"] / probes["relative_diff"]
    return replace(parity, relative_diff=min(parity.relative_diff, parity.max_abs_diff / unit))


def _figures(parity: Parity, lengths: NDArray[Any]) -> JsonObject:
    return {
        "num_texts": lengths.size,
        "longest_tokens": int(lengths.max()),
        "min_cosine": None,
        **parity.to_json(),
    }


_TEXT_PART = "language_model."
"""Before the names of tensors in a model with parts for images and sounds, too, which are not loaded."""


def refuse_not_finite(card: ModelCard) -> None:
    folders = [card.weights_folder, *(f"{card.folder}/{step.path}" for step in card.all_steps if step.path)]
    found: list[str] = []
    for path in (path for folder in folders for path in sorted(Path(folder).glob("*.safetensors"))):
        try:
            tensors = Tensors([path])
            of_text = [name for name in tensors if name.startswith(_TEXT_PART)]
            found += [f"{path}: {name}" for name in of_text or tensors if not _is_finite(tensors[name])]
        except KeyError as error:  # a type that torch does not know
            raise ModelError(f"{path}: cannot be read: {one_line(error)}") from error
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise ModelError(f"{found[0]}{more}: weights are not finite (nan or infinity)")


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    parts: tuple[torch.Tensor, ...] = torch.split(tensor.flatten(), _SCANNED_ELEMENTS)
    return all(bool(torch.isfinite(part if part.element_size() > 1 else part.float()).all()) for part in parts)


# What sentence-transformers and transformers make of texts. They read the model's files themselves, from text to
# result, in float32 for any stored type, on the processor, one text at a time, and run none of the model's code. All
# raise ModelError for an output of another size, and whatever the library and the model raise.

_SAFE: JsonObject = {"local_files_only": True, "trust_remote_code": False}
_OF_A_MODEL: JsonObject = {"device": "cpu", "model_kwargs": {"dtype": torch.float32}, **_SAFE}


class OfText(NamedTuple):
    rows: Rows
    token_ids: list[int] | None
    """None where no model of transformers is given any."""


def library_of(card: ModelCard) -> tuple[str, Output]:
    """The package that reads texts for a model of this kind, and which of its outputs are compared."""
    is_classifier = card.score is not None and "rerank" not in card.capabilities
    output = Output.VECTORS if card.main_output is Output.HYBRID else card.main_output
    return "transformers" if is_classifier else "sentence-transformers", output


def rows_of_texts(card: ModelCard, max_tokens: int, texts: Sequence[str]) -> list[OfText]:
    warnings.simplefilter("ignore")
    from transformers import PreTrainedModel

    name, output = library_of(card)
    load = _label_scores if name == "transformers" else _pair_scores if output is Output.SCORES else _encoder
    model, rows_of = load(card, max_tokens, texts)
    model.float()  # StaticEmbedding ignores the type
    width = output.width_of(card)
    given: list[list[int]] = []

    def record(_module: torch.nn.Module, args: Any) -> None:
        given.append(args[0].flatten().tolist())

    transformer = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if transformer is not None:
        # The table of words, because sentence-transformers calls no hook of the model's own.
        transformer.get_input_embeddings().register_forward_pre_hook(record)
    found = []
    for index in range(len(texts)):
        given.clear()
        rows = np.atleast_2d(np.asarray(rows_of(index), dtype=np.float32))
        if rows.shape[1] != width:
            raise ModelError(f"its vectors have {rows.shape[1]} dimensions, vecd's {width}")
        if output.spans_rows:
            rows = np.pad(rows, ((0, 0), (0, span_of(card) * card.row_dim - width))).reshape(-1, card.row_dim)
        found.append(OfText(rows, given[0] if given else None))
    return found


def our_rows(rows: Rows, card: ModelCard, batch: PackedBatch, kept: Sequence[list[int]]) -> tuple[Rows, list[int]]:
    """The part of the engine's `rows` that a library has, too, and how many rows each sequence has of it."""
    num_rows = batch.rows_of_each.tolist()
    if card.main_output is Output.HYBRID:
        return rows[batch.first_rows, : card.dim], [1] * len(num_rows)
    if card.main_output is Output.TOKEN_VECTORS:
        places = zip(batch.first_rows.tolist(), kept, strict=True)
        rows = rows[[first + place for first, places in places for place in places]]
        num_rows = [len(places) for places in kept]
    return rows if card.main_output.spans_rows else rows[:, : card.main_output.width_of(card)], num_rows


# A model, and what gives the rows of the text with an index.

_ENCODERS = {
    Output.VECTORS: ("SentenceTransformer", "encode", "encode"),
    Output.SPARSE: ("SparseEncoder", "encode_document", "encode_document"),
    Output.TOKEN_VECTORS: ("MultiVectorEncoder", "encode_document", "encode_query"),
}
"""The class, and its methods for documents and for queries."""


def _encoder(card: ModelCard, max_tokens: int, texts: Sequence[str]) -> tuple[Any, Callable[[int], Any]]:
    import sentence_transformers

    _, output = library_of(card)
    name, *methods = _ENCODERS[output]
    model = getattr(sentence_transformers, name)(card.folder, **_OF_A_MODEL)
    # StaticEmbedding takes texts of any length, and a multi-vector model has limits of its own.
    if output is Output.SPARSE or (output is Output.VECTORS and hasattr(model[0], "auto_model")):
        model.max_seq_length = max_tokens

    routed = {"task": card.task, "prompt": card.prompt} if card.task in ("query", "document") else {}

    def rows(index: int) -> Any:
        made = getattr(model, methods[is_query(index)])([texts[index]], show_progress_bar=False, **routed)[0]
        return made.to_dense() if output is Output.SPARSE else made

    return model, rows


def _pair_scores(card: ModelCard, max_tokens: int, texts: Sequence[str]) -> tuple[Any, Callable[[int], Any]]:
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder.modules import LogitScore

    model = CrossEncoder(card.folder, max_length=max_tokens, **_OF_A_MODEL)
    theirs = [(each.true_token_id, each.false_token_id, 1.0) for each in model if isinstance(each, LogitScore)]
    if card.score is not None and theirs != card.score.logits:
        raise ModelError("it scores this model by other tokens, or by another multiple of their logits")
    pairs, identity = pairs_of(texts), torch.nn.Identity()
    return model, lambda index: model.predict([pairs[index]], activation_fn=identity, show_progress_bar=False)


def _label_scores(card: ModelCard, max_tokens: int, texts: Sequence[str]) -> tuple[Any, Callable[[int], Any]]:
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

    return model, logits
