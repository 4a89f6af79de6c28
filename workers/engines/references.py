"""Remembered vectors of reference models: what every engine on every processor has to give.

Owns `Reference`, its file, and the places where one is found. The plain model computes it once, in float32 and with
transformers (`vecd.workers.engines.selection`). From then on an engine is compared with it without torch.
Imports no torch. Called by that module.

A reference belongs to the content of a model's files, not to their place, so it can travel:

    <model's folder>/vecd-reference.json        beside the model, written by `vecd check --remember`
    <this package>/references/<digest>.json     of the models that come with vecd
    <cache directory>/references/<digest>.json  of the models that were served here

An ONNX export has no reference model, and so no digest either: the file beside it is the one of the weights that it
was made of, copied there. That it is of the right model shows in the comparison itself.
"""

import base64
import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vecd.shm.card import ModelCard
from vecd.shm.model_files import source_of
from vecd.shm.output import Output
from vecd.workers.config import REFERENCE_FILE, WorkerConfig
from vecd.workers.engine import PackedBatch
from vecd.workers.engines.parity import Parity, random_batch
from vecd.workers.json_file import read_json, write_json
from vecd.workers.special_tokens import special_tokens
from vecd.workers.weights import weight_files

log = logging.getLogger("vecd.selection")

_SHIPPED = Path(__file__).parent / "references"
_FORMAT = 2
_NUM_REMEMBERED = 4
"""Digests that a process remembers. The start of a model needs its digest twice."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The reference model's vectors of some probes."""

    lengths: tuple[int, ...]
    """Tokens of each probe; `vecd.workers.engines.parity.random_batch` gives their ids. Shape [P]."""
    vectors: NDArray[np.float32]
    """Shape [P, D]."""
    dtype: str = "float32"
    """The format that the reference model was computed in."""

    def figures(self, parity: Parity) -> dict[str, Any]:
        """The figures of a comparison with these vectors, as JSON values."""
        lengths = {"probes": len(self.lengths), "longest_probe_tokens": max(self.lengths)}
        return {**parity.to_json(), "compared_with": self.dtype, **lengths}

    def probes(self, card: ModelCard) -> PackedBatch:
        return random_batch(card, self.lengths)


def recall_reference(config: WorkerConfig) -> Reference | None:
    """The remembered float32 vectors of the model of `config`; None if there are none."""
    try:
        digest = "" if config.card.export_file else digest_of(config.card)
    except (OSError, ValueError, KeyError):
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
    """Write `reference` to the cache. If that fails, log a warning; it is then computed again."""
    if not config.cache_folder:
        return
    try:
        digest = digest_of(config.card)
        write_reference(reference, digest, Path(config.cache_folder) / "references" / f"{digest}.json")
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
    """Of all that the probes and their vectors depend on: settings, special tokens and weights, not names of folders.
    Reads all weights: 0.1 s for 100 MB, once while they do not change. Raises OSError, ValueError or KeyError."""
    facts = [card.model_type, card.max_tokens, card.vocab_size, list(card.pooling)]
    facts += [[step.kind, step.in_dim, step.out_dim, step.bias, step.activation] for step in card.steps]
    if card.main_output is not Output.VECTORS:
        heads = (head and asdict(head) for head in (card.score, card.sparse, card.tokens))
        facts += [list(card.capabilities), *heads, special_tokens(card)]
    return _digest(json.dumps(facts), tuple(map(_stamped, _files_of(card))))


def _stamped(path: Path) -> tuple[Path, int, int, int, int]:
    """A file, and values that change when it does."""
    stat = path.stat()
    return path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


@lru_cache(_NUM_REMEMBERED)
def _digest(facts: str, files: tuple[tuple[Path, int, int, int, int], ...]) -> str:
    digest = hashlib.sha256(facts.encode())
    for path, *_ in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _files_of(card: ModelCard) -> Iterator[Path]:
    yield Path(card.weights_folder) / "config.json"
    yield from weight_files(Path(card.weights_folder))
    yield from (Path(card.folder) / step.path / "model.safetensors" for step in card.all_steps if step.path)
    yield from (Path(card.folder) / step.file for step in card.all_steps if step.file)


def _places(config: WorkerConfig, digest: str) -> Iterator[Path]:
    yield Path(source_of(config.card.folder)) / REFERENCE_FILE
    if not digest:
        return
    yield _SHIPPED / f"{digest}.json"
    if config.cache_folder:
        yield Path(config.cache_folder) / "references" / f"{digest}.json"


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
