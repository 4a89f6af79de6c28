"""The memory of a model's processes: as predicted from its files, and as the kernel reports it.

Owns `Footprint` and the constants of the prediction. Memory is proportional (PSS): a page that several processes share
is counted once over all of them. The memory of GPUs is not counted. Reads headers and no tensor. Called by
`vecd.launch.memory.book`.

Predicted is what a model needs once every word of its vocabulary has been used, with full batches; a worker that has
cores leased may need a little more. The constants are measured on 2 cores of an AMD EPYC with AVX512-BF16, of servers
of one model with 2 workers, to which 4 clients had sent 24 requests of 16 texts with 600 random words, and one client
some more. The predictions are 1.10 to 1.34 times what such servers needed on 2 cores of an Intel Xeon, which
`tests/unit/launch/memory` has.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vecd.launch.config.plan import Plan
from vecd.shm.batch_limits import MAX_BATCH_TOKENS
from vecd.shm.card import ModelCard, ModelError
from vecd.shm.model_files import tensor_facts
from vecd.workers.config import WorkerConfig
from vecd.workers.engines.formats import LARGEST_MEASURED, formats_of, is_lean_wanted
from vecd.workers.families.encoders import FUSED_FAMILIES
from vecd.workers.process.kernel import kilobytes
from vecd.workers.weights import weight_files

_MB = 1 << 20

_IMPORTS = {"": (62 * _MB, 25 * _MB), "torch": (310 * _MB, 45 * _MB), "transformers": (420 * _MB, 70 * _MB)}
"""Of a fork server with its imports, and without weights: in a server of one model, and beside a zygote, whose imports
it shares."""
_ZYGOTE_NBYTES = {"": 75 * _MB, "torch": 270 * _MB, "transformers": 360 * _MB}
_SUPERVISOR_NBYTES, _GATEWAY_NBYTES = 36 * _MB, 50 * _MB
_TOKENIZER_NBYTES, _PER_TOKENIZER_BYTE = 2 * _MB, 12
"""Of a gateway, for each model: its tokenizer has tables of what a file of JSON says."""
_WORKER_NBYTES, _DUMMY_NBYTES = 15 * _MB, 30 * _MB
"""What a worker has for itself before its first batch and after: Python's and the allocator's."""
_GPU_WORKER_NBYTES = 1536 * _MB
"""Of CUDA's libraries and context, in main memory. A guess: not measured."""
_LEAN_TOKENS = 512
"""Of a pass of the engine without torch."""
_FLOATS_PER_HIDDEN = 8
"""Floats that are in memory at a time for each float of the hidden states: four of the layer in the middle, three of
queries, keys and values, and itself."""
_LOGIT_NBYTES = 16 * _MB
"""Of sparse vectors: logits are computed for a part of the tokens or of the vocabulary at a time."""
_BYTES_PER_FLOAT = 4
_BYTES = {"bfloat16": 2, "float16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory of a model's fork server and workers, in bytes."""

    shared: int
    """Of the fork server, with all that the workers share with it."""
    per_worker: int
    """What each worker has for itself."""
    num_workers: int

    @property
    def total(self) -> int:
        return self.shared + self.per_worker * self.num_workers

    @property
    def parked(self) -> int:
        """Without workers."""
        return self.shared


def predict(plan: Plan, *, is_only_model: bool = True) -> Footprint:
    """What the processes of `plan` will need, as far as the model's files say it. `is_only_model`: the server has no
    other, and so no zygote. Reads the file system. Raises ModelError for weights that are missing or broken."""
    config, num_workers = plan.workers[0], len(plan.workers)
    arena = config.arena
    rows = min(arena.rows_per_slot, MAX_BATCH_TOKENS)
    arena_nbytes = arena.num_all_slots * rows * arena.dim * _BYTES_PER_FLOAT
    alone, beside_others = _IMPORTS[_library(config)]
    base = alone if is_only_model else beside_others
    if config.is_dummy:
        return Footprint(_DUMMY_NBYTES, _WORKER_NBYTES + arena_nbytes, num_workers)
    if config.device != "cpu":
        return Footprint(base, _GPU_WORKER_NBYTES + arena_nbytes, num_workers)
    has_torch = bool(_library(config))
    tokens = plan.gateway.max_batch_tokens if has_torch else min(plan.gateway.max_batch_tokens, _LEAN_TOKENS)
    activations = 0 if config.card.is_static else tokens * config.card.hidden_size * _FLOATS_PER_HIDDEN
    if config.card.sparse is not None:
        activations += _LOGIT_NBYTES // _BYTES_PER_FLOAT
    per_worker = _WORKER_NBYTES + activations * _BYTES_PER_FLOAT + arena_nbytes
    return Footprint(base + _weights_nbytes(config), per_worker, num_workers)


def predict_server(plans: Sequence[Plan]) -> int:
    """Bytes of the processes that belong to no model, and of what they share: the supervisor, the gateways, the zygote.
    `plans`: of all models. Reads the file system."""
    first = plans[0].gateway
    tokenizers = sum(_TOKENIZER_NBYTES + _PER_TOKENIZER_BYTE * _size_of(plan.gateway.card) for plan in plans)
    zygote = max(_ZYGOTE_NBYTES[_library(plan.workers[0])] for plan in plans) if len(plans) > 1 else 0
    return _SUPERVISOR_NBYTES + first.num_gateways * (_GATEWAY_NBYTES + tokenizers) + zygote + first.vector_cache


def measured(pids: Sequence[int], worker_pids: Sequence[int]) -> Footprint | None:
    """What the kernel reports of a model's processes. `pids`: of all of them. None if one has ended meanwhile. Reads
    /proc, which takes milliseconds for each process."""
    own = [_of_process(pid, "Private_Clean") + _of_process(pid, "Private_Dirty") for pid in worker_pids]
    every = [_of_process(pid, "Pss") for pid in pids]
    if not all([*own, *every]):
        return None
    per_worker = sum(own) // max(1, len(own))
    return Footprint(sum(every) - per_worker * len(own), per_worker, len(own))


def _of_process(pid: int, name: str) -> int:
    return kilobytes(Path(f"/proc/{pid}/smaps_rollup"), name) << 10


def _size_of(card: ModelCard) -> int:
    try:
        return Path(card.tokenizer_file).stat().st_size
    except OSError:
        return 0


def _library(config: WorkerConfig) -> str:
    """What a fork server imports beside ONNX Runtime: "", "torch" or "transformers", which needs torch, too."""
    card = config.card
    if config.is_dummy or card.is_static or is_lean_wanted(config):
        return ""
    is_fused = config.engine in ("auto", "fused") and card.model_type in FUSED_FAMILIES
    return "torch" if is_fused else "transformers"


def _weights_nbytes(config: WorkerConfig) -> int:
    """What an engine keeps of the files' tensors: layers in the type and the order in which they are computed, tables
    of embeddings in float32. What a load reads and gives back is not counted, as it is not when measured."""
    card = config.card
    if card.is_static:
        return card.weights_bytes
    if card.export_file:
        return 2 * card.weights_bytes  # ONNX Runtime lays matrices out anew, and keeps what it has read
    dtype = _expected_dtype(config)
    stored = made = 0
    try:
        for path in weight_files(Path(card.weights_folder)):
            stored += path.stat().st_size
            for name, (_, shape) in tensor_facts(path).items():
                nbytes = _BYTES_PER_FLOAT if "embed" in name else _BYTES.get(dtype, _BYTES_PER_FLOAT)
                made += max(0, math.prod(shape)) * nbytes
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{card.weights_folder}: the weights cannot be read: {error}") from None
    return max(0, card.weights_bytes - stored) + made


def _expected_dtype(config: WorkerConfig) -> str:
    if config.dtype != "auto":
        return config.dtype
    return formats_of(config)[0] if config.card.weights_bytes > LARGEST_MEASURED else "float32"
