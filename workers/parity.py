"""Parity: whether an engine gives the vectors of the reference model.

Owns the probe sequences, the figures of the comparison, the bounds, and the remembered vectors of reference models.
Knows no engine and imports no torch.
"""

import base64
import hashlib
import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vecd.base.files import JsonObject, read_json, write_json
from vecd.model.architecture import sees_later_here
from vecd.model.card import ModelCard, ModelError
from vecd.model.digests import digest_of_content, stamp_of
from vecd.model.files import source_of
from vecd.shm.output import Output, span_of
from vecd.shm.views import Rows
from vecd.workers.batch import Engine, PackedBatch
from vecd.workers.config import REFERENCE_FILE, WorkerConfig

# The special tokens that a model's tokenizer puts around a text, as its file says it.
#
# Reads the part of tokenizer.json about them alone: the tables of words behind it have megabytes.

Around: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]

_NONE: Around = ((), ())


def special_tokens(card: ModelCard) -> Around:
    """Nothing for a model without a head that gives scores: only such heads read special tokens."""
    if card.score is None:
        return _NONE
    path = Path(card.tokenizer_file)
    try:
        before, behind = _read_around(path, path.stat().st_mtime_ns)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return _NONE  # the gateway reports a file that is no tokenizer
    is_known = all(0 <= token < card.vocab_size for token in (*before, *behind))
    return (before, behind) if is_known and len(before) + len(behind) < card.max_tokens else _NONE


@lru_cache(4)
def _read_around(path: Path, _changed_at: int) -> Around:
    text, name = path.read_text(encoding="utf-8"), '"post_processor":'
    start = text.index(name) + len(name)  # the library writes it before the words, of which one may have this name
    processor, _ = json.JSONDecoder().raw_decode(text, start + (text[start] == " "))  # one if it is indented
    return next(_templates(processor or {}), _NONE)


def _templates(processor: JsonObject) -> Iterator[Around]:
    """Source: processors of the tokenizers library."""
    match processor.get("type"):
        case "Sequence":
            for each in processor["processors"]:
                yield from _templates(each)
        case "BertProcessing" | "RobertaProcessing":
            yield (int(processor["cls"][1]),), (int(processor["sep"][1]),)
        case "TemplateProcessing":
            before: list[int] = []
            behind: list[int] = []
            side = before
            for piece in processor["single"]:
                if "SpecialToken" in piece:
                    side += map(int, processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"])
                else:
                    side = behind
            yield tuple(before), tuple(behind)


# The reference model is transformers' own modules on one sequence at a time, without packing, padding or neighbours.

_MAX_ABS_DIFF = 1e-5
"""For float32: the largest difference of an element that rounding may cause, relative to the largest element if that is
beyond 1. Measured on all-MiniLM-L6-v2, packed: 1.5e-7."""

_MIN_COSINE = {"bfloat16": 0.998, "float16": 0.998, "int8": 0.99}
"""Measured on all-MiniLM-L6-v2, bfloat16 against float32: 0.9989 at worst, typically 0.9998."""

_NUMBERS = frozenset({Output.SCORES, Output.TOKEN_SCORES, Output.LEXICAL})

_MAX_RELATIVE_DIFF = {"bfloat16": 0.15, "float16": 0.15, "int8": 0.75}
_MIN_SAME_ORDER = {"bfloat16": 0.95, "float16": 0.95, "int8": 0.9}
"""Measured on all-MiniLM-L6-v2 with heads of random weights, three of one label and one of three, against float32: in
bfloat16 0.026 to 0.056, in float16 up to 0.007, and all in the same order; in int8 0.24 to 0.63, and 95 to 98 %."""

_LEAST_UNIT = 1 / 32
"""Of the largest number: of numbers that hardly differ, rounding to 16 bits is not what matters."""

_TOO_CLOSE = 0.05

_NEIGHBOURS = 16

# Most wrong paths fail at a border, at a length, or in an order, and short sequences show that as well as long ones:
# 136 tokens in all; 392 took 60 ms on a core for all-MiniLM-L6-v2. Unsorted, and with equal lengths, which have a
# border inside a run.
_SHORT_LENGTHS = (5, 1, 34, 3, 13, 1, 55, 2, 5, 8, 3, 6)
# Beyond the thresholds of engines, and of models with windows.
_LONG_LENGTHS = (256, 170)

_LONGEST_COST = 1e12
"""Multiplications by weights that the longest probe may take: some 20 s on a core. 2,000 tokens of a model with 250
million parameters; models of billions are compared up to 256 tokens, however long it takes."""


@dataclass(frozen=True, slots=True)
class Parity:
    """The largest distances of vectors from the reference vectors. Not finite if a vector is not."""

    max_abs_diff: float
    min_cosine: float
    """Of vectors; 1 for numbers."""
    scale: float
    """The largest absolute element of the reference vectors."""
    relative_diff: float | None = None
    """Of numbers, such as scores, not of vectors: the largest difference in units of their spread, which is the
    standard deviation of a column of the reference, or _LEAST_UNIT of `scale` if that is more."""
    same_order: float = 1.0
    """Of numbers: the part of pairs of rows in the same order, of those that are clearly apart."""

    def is_within_bounds(self, dtype: str) -> bool:
        """False if they are not finite."""
        if not math.isfinite(self.max_abs_diff):
            return False
        if dtype == "float32":
            return self.max_abs_diff <= _MAX_ABS_DIFF * max(1.0, self.scale)
        if self.relative_diff is not None:
            return self.relative_diff <= _MAX_RELATIVE_DIFF[dtype] and self.same_order >= _MIN_SAME_ORDER[dtype]
        return self.min_cosine >= _MIN_COSINE[dtype]

    def to_json(self) -> JsonObject:
        others = ("min_cosine",) if self.relative_diff is None else ("relative_diff", "same_order")
        return {name: getattr(self, name) for name in ("max_abs_diff", *others)}

    def __str__(self) -> str:
        if self.relative_diff is not None:
            return (
                f"largest difference {self.max_abs_diff:.1e}, {self.relative_diff:.4f} of their spread, "
                f"{self.same_order:.1%} in the same order"
            )
        return f"largest difference {self.max_abs_diff:.1e}, smallest cosine {self.min_cosine:.5f}"


def all_probes(card: ModelCard, num_parameters: int) -> PackedBatch:
    """Like `random_batch`, from 1 token to the longest affordable length. The first of them are `short_probes`."""
    affordable = max(*_LONG_LENGTHS, int(_LONGEST_COST / 2 / max(1, num_parameters)))
    return random_batch(card, (*_SHORT_LENGTHS, *_LONG_LENGTHS, affordable))


def short_probes(card: ModelCard) -> PackedBatch:
    return random_batch(card, _SHORT_LENGTHS)


def random_batch(card: ModelCard, wanted_lengths: Sequence[int]) -> PackedBatch:
    """Sequences of random ids, the same at every call, cut to the model's limit, that ask for its main output. For a
    head that gives scores they are between the special tokens of the model's tokenizer, with at least one token, and
    have these nowhere else: some heads fail without."""
    before, behind = special_tokens(card)
    lengths = np.clip(wanted_lengths, len(before) + 1 + len(behind), card.max_tokens).astype(np.int32)
    others = np.setdiff1d(np.arange(card.vocab_size, dtype=np.int32), [*before, *behind])
    token_ids = others[np.random.default_rng(seed=0).integers(0, others.size, lengths.sum(), dtype=np.int32)]
    ends = np.cumsum(lengths)
    for place, token in enumerate(before):
        token_ids[ends - lengths + place] = token
    for place, token in enumerate(reversed(behind)):
        token_ids[ends - 1 - place] = token
    output = card.main_output
    if output is Output.VECTORS:
        return PackedBatch(lengths, token_ids)
    # Every other sequence of more than two tokens has a second part, so that both kinds are compared.
    borders = np.where((np.arange(lengths.size) % 2 == 0) & (lengths > 2), lengths // 2, 0).astype(np.int32)
    has_borders = output is Output.SCORES or (card.tokens is not None and card.tokens.has_unattended)
    outputs = np.full(lengths.size, output, dtype=np.uint8)
    span = span_of(card) if output.spans_rows else 1
    return PackedBatch(lengths, token_ids, outputs, borders if has_borders else None, span)


def vectors_of(engine: Engine, batch: PackedBatch, row_dim: int) -> Rows:
    rows = np.full((batch.num_rows, row_dim), np.nan, dtype=np.float32)
    engine.embed(batch, rows)
    return rows


def vectors_one_by_one(engine: Engine, batch: PackedBatch, row_dim: int) -> Rows:
    parts = (batch.part(index, index + 1) for index in range(batch.lengths.size))
    return np.concatenate([vectors_of(engine, part, row_dim) for part in parts])


def compare(
    vectors: Rows,
    reference: Rows,
    span: int = 1,
    output: Output = Output.VECTORS,
) -> Parity:
    """Compare rows, each [B, D]: vectors by row, numbers by column. `span`: the number of rows that are one vector."""
    ours, theirs = (rows.reshape(-1, span * rows.shape[1]).astype(np.float64) for rows in (vectors, reference))
    if output in _NUMBERS:
        return _compare_numbers(ours, theirs)
    with np.errstate(invalid="ignore", divide="ignore"):
        differences = np.abs(ours - theirs)
        norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        cosines = np.einsum("bd,bd->b", ours, theirs) / norms
    # A zero vector has no direction, but two zero vectors are equal.
    cosines[differences.max(axis=1) == 0] = 1.0
    return Parity(
        max_abs_diff=float(differences.max()),
        min_cosine=float(cosines.min()),
        scale=float(np.abs(theirs).max()),
    )


def _compare_numbers(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> Parity:
    differences, scale = np.abs(ours - theirs), float(np.abs(theirs).max())
    units = np.maximum(theirs.std(axis=0), _LEAST_UNIT * scale)
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.where(differences == 0, 0.0, differences / units)
    num_apart = num_same = 0
    for shift in range(1, min(_NEIGHBOURS, len(theirs))):
        expected = theirs - np.roll(theirs, shift, axis=0)
        is_apart = np.abs(expected) > _TOO_CLOSE * units
        num_apart += int(is_apart.sum())
        num_same += int((is_apart & (np.sign(ours - np.roll(ours, shift, axis=0)) == np.sign(expected))).sum())
    return Parity(
        max_abs_diff=float(differences.max()),
        min_cosine=1.0,
        scale=scale,
        relative_diff=float(relative.max()),
        same_order=num_same / num_apart if num_apart else 1.0,
    )


# Remembered vectors of reference models: what every engine on every processor has to give.
#
# The reference model computes it once, in float32 and with transformers (`vecd.workers.select`). From then on an
# engine is compared with it without torch.
#
# A reference belongs to the content of a model's files, not to their place, so it can travel:
#
#     <model's folder>/vecd-reference.json        beside the model, written by `vecd check --remember`
#     <this package>/references/<digest>.json     of the models that come with vecd
#     <cache directory>/references/<digest>.json  of the models that were served here
#
# An ONNX export without safetensors beside it has no reference model, and so no digest either: the file beside it is
# the one of the weights that it was made of, copied there. That it is of the right model shows in the comparison
# itself.

log = logging.getLogger("vecd.selection")

_SHIPPED = Path(__file__).parent / "references"
_FORMAT = 2
_NUM_REMEMBERED = 4
"""The start of a model needs its digest twice."""


@dataclass(frozen=True, slots=True)
class Reference:
    lengths: tuple[int, ...]
    """Tokens of each probe; `vecd.workers.parity.random_batch` gives their ids. Shape [P]."""
    vectors: Rows
    """Shape [P, D]."""
    dtype: str = "float32"

    def figures(self, parity: Parity) -> JsonObject:
        lengths = {"probes": len(self.lengths), "longest_probe_tokens": max(self.lengths)}
        return {**parity.to_json(), "compared_with": self.dtype, **lengths}


def recall_reference(config: WorkerConfig) -> Reference | None:
    try:
        digest = "" if config.card.reference_card.export_file else digest_of(config.card)
    except (OSError, ModelError):
        return None
    for path in _places(config, digest):
        try:
            return _read(path, digest, config.card.row_dim)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
            log.warning("%s is not used: %s", path, error)
    return None


def remember_reference(config: WorkerConfig, reference: Reference) -> None:
    """If that fails, log a warning."""
    if config.cache_dir is None:
        return
    try:
        digest = digest_of(config.card)
        write_reference(reference, digest, config.cache_dir / "references" / f"{digest}.json")
    except OSError as error:
        log.warning("the reference vectors cannot be remembered: %s", error)


def write_reference(reference: Reference, digest: str, path: Path) -> None:
    """Raises OSError."""
    fields = {
        "format": _FORMAT,
        "digest": digest,
        "lengths": list(reference.lengths),
        "vectors": base64.b64encode(reference.vectors.astype("<f4").tobytes()).decode(),
    }
    write_json(path, fields, mode=0o644)  # beside a model it is for every user who serves that


def digest_of(card: ModelCard) -> str:
    """Of all that the probes and their vectors depend on: settings, special tokens and weights. Reads all weights: 0.1
    s for 100 MB, once while they do not change. Raises OSError or ModelError."""
    card = card.reference_card
    facts = [card.model_type, card.max_tokens, card.vocab_size, list(card.pooling)]
    facts += [[step.kind, step.in_dim, step.out_dim, step.bias, step.activation] for step in card.steps]
    if card.main_output is not Output.VECTORS:
        heads = (head and asdict(head) for head in (card.score, card.sparse, card.tokens))
        facts += [list(card.capabilities), *heads, special_tokens(card)]
    if sees_later_here(read_json(Path(card.weights_folder) / "config.json")):
        facts.append("sees later")
    return _digest(json.dumps(facts), tuple((path, *stamp_of(path)) for path in _files_of(card)))


@lru_cache(_NUM_REMEMBERED)
def _digest(facts: str, files: tuple[tuple[Any, ...], ...]) -> str:
    digest = hashlib.sha256(facts.encode())
    for path, *_ in files:
        digest.update(bytes.fromhex(digest_of_content(path)))
    return digest.hexdigest()


def _files_of(card: ModelCard) -> Iterator[Path]:
    yield Path(card.weights_folder) / "config.json"
    yield from card.weight_files
    yield from card.step_files


def _places(config: WorkerConfig, digest: str) -> Iterator[Path]:
    yield Path(source_of(config.card.folder)) / REFERENCE_FILE
    if not digest:
        return
    yield _SHIPPED / f"{digest}.json"
    if config.cache_dir is not None:
        yield config.cache_dir / "references" / f"{digest}.json"


def _read(path: Path, digest: str, dim: int) -> Reference:
    """Raises ValueError for a file of another model than `digest`, if that is not empty, and what a broken file
    raises."""
    fields = read_json(path)
    if fields["format"] != _FORMAT:
        raise ValueError(f"its format is {fields['format']}, and this version of vecd reads {_FORMAT}")
    if digest and fields["digest"] != digest:
        raise ValueError("it belongs to a model with other weights or settings")
    lengths = tuple(int(length) for length in fields["lengths"])
    vectors = np.frombuffer(base64.b64decode(fields["vectors"]), dtype="<f4").reshape(-1, dim)
    return Reference(lengths, vectors.astype(np.float32))
