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
from safetensors import safe_open

from vecd.base.files import JsonMapping, JsonObject
from vecd.model.card import ModelCard, ModelError, one_line
from vecd.shm.output import MAX_BATCH_TOKENS, Output, span_of
from vecd.workers.batch import Engine, PackedBatch
from vecd.workers.check.order import is_query, pairs_of
from vecd.workers.config import WorkerConfig
from vecd.workers.parity import Parity, compare, vectors_of
from vecd.workers.weights import broken

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


def refuse_not_finite(card: ModelCard) -> None:
    folders = [card.weights_folder, *(f"{card.folder}/{step.path}" for step in card.all_steps if step.path)]
    found: list[str] = []
    for path in (path for folder in folders for path in sorted(Path(folder).glob("*.safetensors"))):
        try:
            with safe_open(path, framework="pt") as weights:
                found += [f"{path}: {name}" for name in weights.keys() if not _is_finite(weights.get_tensor(name))]  # noqa: SIM118
        except Exception as error:  # SafetensorError, OSError, types that torch does not know
            raise broken(path, error) from error
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


Loaded: TypeAlias = tuple[Any, Callable[[int], Any]]
"""A model, and what gives its rows of the text with an index, [rows, width of the output]."""


class Library(NamedTuple):
    name: str
    """Of the package."""
    load: Callable[[ModelCard, int, Sequence[str]], Loaded]
    """Takes the card, the limit on tokens, and the texts."""
    output: Output

    def compute(self, card: ModelCard, max_tokens: int, texts: Sequence[str]) -> list[OfText]:
        warnings.simplefilter("ignore")
        from transformers import PreTrainedModel

        model, rows_of = self.load(card, max_tokens, texts)
        model.float()  # StaticEmbedding ignores the type
        width = self.output.width_of(card)
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
            rows = np.asarray(rows_of(index), dtype=np.float32)
            if rows.shape[1] != width:
                raise ModelError(f"its vectors have {rows.shape[1]} dimensions, vecd's {width}")
            if self.output.spans_rows:
                rows = np.pad(rows, ((0, 0), (0, span_of(card) * card.row_dim - width))).reshape(-1, card.row_dim)
            found.append(OfText(rows, given[0] if given else None))
        return found


def library_of(card: ModelCard) -> Library:
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
    """The part of the engine's `rows` that a library has, too, and how many rows each sequence has of it."""
    num_rows = batch.rows_of_each.tolist()
    if card.main_output is Output.HYBRID:
        return rows[batch.first_rows, : card.dim], [1] * len(num_rows)
    if card.main_output is Output.TOKEN_VECTORS:
        places = zip(batch.first_rows.tolist(), kept, strict=True)
        rows = rows[[first + place for first, places in places for place in places]]
        num_rows = [len(places) for places in kept]
    return rows if card.main_output.spans_rows else rows[:, : card.main_output.width_of(card)], num_rows


def dense_vectors(card: ModelCard, max_tokens: int, texts: Sequence[str]) -> Loaded:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(card.folder, **_OF_A_MODEL)
    if hasattr(model[0], "auto_model"):  # StaticEmbedding takes texts of any length
        model.max_seq_length = max_tokens

    def vectors(index: int) -> Any:
        return model.encode([texts[index]], convert_to_numpy=True, show_progress_bar=False)

    return model, vectors


def pair_scores(card: ModelCard, max_tokens: int, texts: Sequence[str]) -> Loaded:
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(card.folder, max_length=max_tokens, **_OF_A_MODEL)
    pairs = pairs_of(texts)

    def scores(index: int) -> Any:
        identity = torch.nn.Identity()
        made = model.predict([pairs[index]], activation_fn=identity, convert_to_numpy=True, show_progress_bar=False)
        return np.asarray(made).reshape(1, -1)

    return model, scores


def label_scores(card: ModelCard, max_tokens: int, texts: Sequence[str]) -> Loaded:
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


def sparse_weights(card: ModelCard, max_tokens: int, texts: Sequence[str]) -> Loaded:
    from sentence_transformers import SparseEncoder

    model = SparseEncoder(card.folder, **_OF_A_MODEL)
    model.max_seq_length = max_tokens

    def weights(index: int) -> Any:
        found: Any = model.encode_document(
            [texts[index]], convert_to_tensor=True, convert_to_sparse_tensor=False, show_progress_bar=False
        )
        return found.cpu().numpy()

    return model, weights


def token_vectors(card: ModelCard, max_tokens: int, texts: Sequence[str]) -> Loaded:
    from sentence_transformers import MultiVectorEncoder

    model = MultiVectorEncoder(card.folder, **_OF_A_MODEL)

    def vectors(index: int) -> Any:
        encode: Any = model.encode_query if is_query(index) else model.encode_document
        return encode([texts[index]], convert_to_numpy=True, show_progress_bar=False)[0]

    return model, vectors
