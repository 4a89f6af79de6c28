"""The engine of a model: hidden states from a transformer, vectors from its head.

Owns the steps of a batch. A `Forward` computes the hidden states, fused, packed or padded; the device writes the
vectors into the rows.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from vecd.model.card import ModelCard, ModelError, one_line
from vecd.shm.views import Rows
from vecd.workers import prefix
from vecd.workers.batch import Engine, Finish, Layout, PackedBatch, arrange, begin_or_halve
from vecd.workers.config import WorkerConfig
from vecd.workers.description import NotDescribed
from vecd.workers.families import WITHOUT_CLASS
from vecd.workers.heads import Heads
from vecd.workers.parity import compare
from vecd.workers.prefix import MIN_SHARED_TOKENS, PrefixCache, set_apart
from vecd.workers.torch.checkpoint import KeysValues, PrefixStates, bytes_of
from vecd.workers.torch.device import open_device
from vecd.workers.torch.fused import load_fused
from vecd.workers.torch.heads import load_heads, rows_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


log = logging.getLogger("vecd.selection")

_CPU = torch.device("cpu")

_MAX_PREFIX_BYTES = 64 << 20
"""For the states of prefixes that a worker keeps. A token of Qwen3-Reranker-0.6B has 229 KB of them (28 layers, 8 key
heads of 128, float32), so these are 292 tokens: the prefixes of three or four queries."""


class Forward(Protocol):
    path: str
    num_padding_tokens: int
    can_share: bool

    def __call__(self, layout: Layout, prefix: PrefixStates | None = None) -> Tensor:
        """The last layer's hidden states, [T, H], in the layout's order, without those of a prefix."""


class TransformerEngine(Engine):
    """Runs one model in one way. The model's settings belong to the last engine that was made from it."""

    def __init__(self, forward: Forward, heads: Heads[Tensor], dtype: str, device: torch.device = _CPU) -> None:
        """`device` is where `forward` and `heads` compute."""
        self._forward = forward
        self._heads = heads
        self._device = open_device(device)
        self.facts: dict[str, Any] = {"dtype": dtype, "path": forward.path, **self._device.facts()}
        self.warnings: list[str] = []
        self._num_threads = 1
        self._prefixes: PrefixCache[Sequence[KeysValues]] | None = None

    def share_prefixes(self, batch: PackedBatch) -> None:
        """From now on, compute a prefix of sequences once, if that gives the same hidden states of `batch`, whose
        sequences have MIN_SHARED_TOKENS tokens in common. Its outputs must need the last tokens alone. Raises what the
        model raises without a shared prefix."""
        if not self._forward.can_share:
            return
        layout = arrange(batch)
        with torch.inference_mode():
            expected = self._forward(layout)[torch.from_numpy(layout.offsets() >= MIN_SHARED_TOKENS)]
            states = PrefixStates(0, MIN_SHARED_TOKENS, is_kept=True)
            for num_known in (0, MIN_SHARED_TOKENS, MIN_SHARED_TOKENS // 2):  # nothing, all, and a part
                shared = set_apart(layout, MIN_SHARED_TOKENS, num_known)
                of_pass = PrefixStates(num_known, shared.prefix.size, states.kept) if num_known else states
                try:
                    found = self._forward(shared, of_pass)
                except Exception as error:  # a model may raise anything in a pass that it was not written for
                    log.info("prefixes are not shared: %s", one_line(error))
                    return
                parity = compare(found.float().cpu().numpy(), expected.float().cpu().numpy())
                log.info("a prefix of %d tokens, %d of them known: %s", MIN_SHARED_TOKENS, num_known, parity)
                if not parity.is_within_bounds(self.facts["dtype"]):
                    log.info("prefixes are not shared")
                    return
        self._prefixes = PrefixCache(_MAX_PREFIX_BYTES * MIN_SHARED_TOKENS // bytes_of(states.kept))

    @property
    def num_padding_tokens(self) -> int:
        return self._forward.num_padding_tokens

    def use_threads(self, num_threads: int) -> None:
        if num_threads:
            torch.set_num_threads(num_threads)
            self.thread_choices, self._num_threads = (num_threads,), num_threads

    def allow_leases(self, max_threads: int, *, may_copy_weights: bool) -> Sequence[int]:
        # 1, 2, 4 …: not every number, because oneDNN compiles its kernels for each.
        self.thread_choices = [*(1 << power for power in range((max_threads - 1).bit_length())), max_threads]
        return self.thread_choices

    def lease(self, num_threads: int) -> int:
        num_threads = super().lease(num_threads)
        if num_threads != self._num_threads:
            torch.set_num_threads(num_threads)
            self._num_threads = num_threads
        return num_threads

    def adopt(self, slots: Sequence[Rows]) -> None:
        warning = self._device.adopt(slots)
        if warning is not None:
            self.warnings.append(warning)

    def begin(self, batch: PackedBatch, rows: Rows) -> Finish:
        return begin_or_halve(self._begin, batch, rows, self._device.free_memory)

    def _begin(self, batch: PackedBatch, rows: Rows) -> Finish:
        layout = arrange(batch)
        with torch.inference_mode():
            hidden, layout = self._hidden_behind_prefix(layout, batch.scope)
            made, places = rows_of(layout, hidden, self._heads, rows.shape[1])
            return self._device.write(made, places, rows)

    def _hidden_behind_prefix(self, layout: Layout, scope: int) -> tuple[Tensor, Layout]:
        if self._prefixes is None:
            return self._forward(layout), layout
        shared, known = self._prefixes.share(layout, scope)
        if not shared.num_shared:
            return self._forward(layout), layout
        is_kept = self._prefixes.takes(shared)
        states = PrefixStates(shared.num_known, shared.prefix.size, known or (), is_kept=is_kept)
        hidden = self._forward(shared, states)
        if is_kept:
            self._prefixes.keep(layout.token_ids[: shared.num_shared], states.kept, scope)
        return hidden, shared


# Builds an engine that needs torch by the name of its path.

Load = Callable[[str], "PreTrainedModel"]
"""Gives the transformers model in a dtype."""


def build_engine(config: WorkerConfig, path: str, dtype: str, load: Load | None = None) -> Engine:
    """Raises NotDescribed for a model without a fused path, ModelError for one that cannot be loaded, and anything that
    a model raises on a path that it does not support."""
    card, device = config.card, torch.device(config.device)
    load, score = load or partial(_load, card, device), card.score
    # Where no table describes the head, transformers' class computes that, too.
    has_head = path in ("padded", "unpadded") and score is not None and not score.steps
    own_head: Heads[Tensor] = {card.main_output: lambda logits, layout: logits.float()}
    heads = own_head if has_head else load_heads(card, device)
    engine = TransformerEngine(_forward(card, path, dtype, device, load, has_head), heads, dtype, device)
    if card.shares_beginnings and not has_head:
        engine.share_prefixes(prefix.probe(card))
    return engine


def _forward(card: ModelCard, path: str, dtype: str, device: torch.device, load: Load, has_head: bool) -> Forward:
    if path == "fused":
        if device.type != "cpu":
            raise NotDescribed(f"the fused path is for processors, not for {device.type}")
        return load_fused(card, dtype)
    if path not in ("packed", "padded", "unpadded"):
        raise ModelError(f"{card.folder}: there is no path {path}")
    if path == "packed" and card.model_type in WITHOUT_CLASS:
        raise NotDescribed(f"transformers has no class of {card.model_type} to pack")
    model = load(dtype)
    if card.score is not None and not has_head:
        model = cast("PreTrainedModel", model.base_model)
    if path == "packed":
        from vecd.workers.torch.packed import PackedForward  # not below: it needs names inside transformers

        return PackedForward(model, device, has_segments=card.has_segments)
    from vecd.workers.torch.padded import PaddedForward

    return PaddedForward(model, device, may_pad=path == "padded", has_segments=card.has_segments, has_head=has_head)


def _load(card: ModelCard, device: torch.device, dtype: str) -> "PreTrainedModel":
    from vecd.workers.torch.loading import load_model

    return load_model(card, dtype, device)
