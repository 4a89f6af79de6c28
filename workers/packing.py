"""Attention over packed sequences, put into stock transformers models.

Owns two functions registered with transformers under one name: a mask function that keeps the model's rule instead of
building a T × T mask from it, and an attention function that applies SDPA to each run of equal-length sequences, so
that no token sees another sequence. Knows no model and no weights. Called by `workers.engines.packed`.

What the model asks of its attention is done or refused (PackingError), never ignored: causal and windowed masks are
evaluated per sequence length, grouped key/value heads are passed on, anything unknown is refused. `workers.agreement`
is the second net, for models that never ask.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from workers.layout import Run

PACKED_ATTENTION = "vecd_packed"
"""The `attn_implementation` under which transformers finds the functions below."""

MaskRule: TypeAlias = Callable[[Any, Any, Any, Any], Any]
"""transformers' mask functions: (batch, head, query position, key position) → may attend. Works on index tensors."""

# Arguments that transformers' modules hand to every attention function, and that say nothing it must do: positions and
# windows are in the mask already, the rest concerns what is returned or other implementations.
_HARMLESS_ARGUMENTS = frozenset(
    {"position_ids", "sliding_window", "deterministic", "cache_position", "return_dict", "use_cache"}
)


class PackingError(Exception):
    """A model whose attention cannot be packed. Raised while it runs; the model is then run padded."""


class SequenceMask:
    """A model's mask, as its rule within one sequence. Stands where transformers expects a mask tensor."""

    def __init__(self, rule: MaskRule) -> None:
        self._rule = rule
        self._allowed: dict[int, Tensor | None] = {}

    def of_run(self, run: Run, device: torch.device) -> tuple[bool, Tensor | None]:
        """(is_causal, mask) for SDPA over the sequences of a run; mask is bool [length, length] or None.

        Raises PackingError when the rule depends on more than how far two tokens of a sequence are apart.
        """
        if self._rule is bidirectional_mask_function:
            return False, None
        if self._rule is causal_mask_function:
            return run.length > 1, None
        if run.length not in self._allowed:
            self._allowed[run.length] = self._evaluate(run, device)
        return False, self._allowed[run.length]

    def _evaluate(self, run: Run, device: torch.device) -> Tensor | None:
        positions = torch.arange(run.length, device=device)
        allowed = self._between(positions)
        if not torch.equal(allowed, self._between(positions + run.start)):
            raise PackingError("a mask that depends on where in the batch a sequence stands")
        return None if bool(allowed.all()) else allowed

    def _between(self, positions: Tensor) -> Tensor:
        zero = positions.new_zeros(())
        allowed: Tensor = self._rule(zero, zero, positions[:, None], positions[None, :])
        return allowed.expand(len(positions), len(positions)).contiguous()


_runs: Sequence[Run] = ()
"""The runs of the forward pass going on. A module-level value, because most models hand no argument of ours down to
their attention; a worker has one engine and one thread."""


@contextmanager
def running(runs: Sequence[Run]) -> Iterator[None]:
    """While inside, models with packed attention compute the tokens of `runs`."""
    global _runs
    assert not _runs, "forward passes do not nest"
    _runs = runs
    try:
        yield
    finally:
        _runs = ()


def register() -> None:
    """Make PACKED_ATTENTION known to transformers. Side effect: on the process, once and for all."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, sequence_mask)


def sequence_mask(*, mask_function: MaskRule, q_offset: int = 0, kv_offset: int = 0, **_: Any) -> SequenceMask:
    """transformers' mask function: keeps the rule. Raises PackingError when there are earlier tokens in a cache."""
    if q_offset or kv_offset:
        raise PackingError("a cache of earlier tokens")
    return SequenceMask(mask_function)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function, over the runs of the forward pass going on.

    query [1, heads, T, head dim], key and value [1, key heads, T, head dim] → [1, T, heads, head dim]. Raises
    PackingError when the model asks for something that is not done here.
    """
    _refuse_unknown(arguments, dropout)
    _check_shapes(query, key)
    has_groups = key.shape[1] != query.shape[1]
    rule = _rule_of(module, attention_mask, is_causal, arguments.get("sliding_window"))
    _, num_heads, num_tokens, _ = query.shape
    attended = query.new_empty(1, num_tokens, num_heads, value.shape[-1])
    for run in _runs:
        causal, mask = rule.of_run(run, query.device)
        out = scaled_dot_product_attention(
            _sequences(query, run),
            _sequences(key, run),
            _sequences(value, run),
            attn_mask=mask,
            scale=scaling,
            is_causal=causal,
            enable_gqa=has_groups,
        )
        attended[0, run.start : run.stop] = out.transpose(1, 2).flatten(0, 1)
    return attended, None


def _sequences(tokens: Tensor, run: Run) -> Tensor:
    """The view [count, heads, length, head dim] of one run in [1, heads, T, head dim]."""
    heads = tokens.shape[1]
    return tokens[0, :, run.start : run.stop].view(heads, run.count, run.length, -1).transpose(0, 1)


def _rule_of(module: torch.nn.Module, mask: Any, is_causal: bool | None, window: Any) -> SequenceMask:
    if isinstance(mask, SequenceMask):
        return mask
    if mask is not None:
        raise PackingError(f"{type(module).__name__} builds a mask tensor of its own")
    if window is not None:
        raise PackingError(f"{type(module).__name__} has a sliding window without a mask")
    # Without a mask, transformers' own SDPA function decides like this.
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    return SequenceMask(causal_mask_function if causal else bidirectional_mask_function)


def _refuse_unknown(arguments: dict[str, Any], dropout: float) -> None:
    if dropout:
        raise PackingError("dropout in inference")
    for name, value in arguments.items():
        if name not in _HARMLESS_ARGUMENTS and value is not None and value is not False:
            raise PackingError(f"attention with {name}")


def _check_shapes(query: Tensor, key: Tensor) -> None:
    num_tokens = _runs[-1].stop if _runs else 0
    if query.shape[0] != 1 or query.shape[2] != num_tokens or key.shape[2] != num_tokens:
        raise PackingError(f"attention over {tuple(query.shape)}, not over the {num_tokens} packed tokens")
