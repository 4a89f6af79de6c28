"""The packed forward pass: all sequences end to end in one pass of batch size 1, without a padding token.

Owns the arguments that make an unmodified transformers model do so.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from types import FunctionType
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from vecd.model.card import POSITIONS_AFTER_PADDING
from vecd.workers.batch import Ints, Layout, Run
from vecd.workers.torch import cuda
from vecd.workers.torch.checkpoint import PrefixStates
from vecd.workers.torch.device import to_device
from vecd.workers.torch.linear import prepack_linears
from vecd.workers.torch.padded import PACKED_ATTENTION, num_token_types

# Attention over packed sequences, for unmodified transformers models.
#
# The mask function keeps the model's rule instead of building a T × T mask from it. The attention function keeps
# sequences apart: it applies SDPA to each run of equal-length sequences or, on a GPU and if `suits_varlen` and the rule
# allow it, one variable-length kernel to all.
#
# Every argument of the model's attention is obeyed or refused (PackingError), never ignored: causal and windowed masks
# are evaluated per sequence length, grouped key/value heads are passed on, unknown arguments are refused. Parity
# (`vecd.workers.parity`) catches models that use no arguments.

MaskRule: TypeAlias = Callable[[Any, Any, Any, Any], Any]
"""transformers' mask functions: (batch, head, query position, key position) → may attend. Works on index tensors."""

# Arguments that transformers' modules pass to every attention function and that need no action: positions and windows
# are in the mask already, the others concern return values or other implementations.
_HARMLESS_ARGUMENTS = frozenset(
    {"position_ids", "sliding_window", "deterministic", "cache_position", "return_dict", "use_cache"}
)


class PackingError(Exception):
    """A model's attention cannot be packed. Raised while it runs; the model then runs padded."""


Window: TypeAlias = tuple[int, int]
"""How many tokens before and after itself a token sees; -1 for all. Flash attention's window_size."""

_EVERYTHING: Window = (-1, -1)
_CAUSAL: Window = (-1, 0)


class SequenceMask:
    """A model's mask, as its rule within one sequence. Replaces the mask tensor that transformers expects."""

    def __init__(self, rule: MaskRule) -> None:
        self._rule = rule
        self._allowed: dict[tuple[int, int], Tensor | None] = {}
        self._windows: dict[int, Window | None] = {}

    def of_run(self, run: Run, device: torch.device, num_shared: int = 0) -> tuple[bool, Tensor | None]:
        """(is_causal, mask) for SDPA over the sequences of a run behind a shared prefix; mask is bool [length,
        num_shared + length] or None. Raises PackingError when the rule depends on more than the distance of two tokens
        of a sequence, or when tokens of a shared prefix see later ones."""
        if not num_shared:
            if self._rule is bidirectional_mask_function:
                return False, None
            if self._rule is causal_mask_function:
                return run.length > 1, None
        key = (num_shared, run.length)
        if key not in self._allowed:
            allowed = self._evaluate(num_shared + run.length, run.start, device)
            if bool(allowed[:num_shared, num_shared:].any()):
                raise PackingError("a shared prefix of tokens that see later ones")
            allowed = allowed[num_shared:]
            self._allowed[key] = None if bool(allowed.all()) else allowed
        return False, self._allowed[key]

    def window(self, longest: Run, device: torch.device) -> Window | None:
        """The rule as a window that holds for sequences up to the length of `longest`; None if it is no window.
        Evaluated once per rule and 1,024 tokens, because it waits for the device. Raises what `of_run` raises."""
        if self._rule is bidirectional_mask_function:
            return _EVERYTHING
        if self._rule is causal_mask_function:
            return _CAUSAL
        key = rule_key(self._rule)
        # A rule without a key may read tensors that are no longer than the batch.
        length = longest.length if key is None else -(-longest.length // 1024) * 1024
        known = self._windows if key is None else _known_windows.setdefault(key, {})
        if length not in known:
            known[length] = window_of(self._evaluate(length, longest.start, device))
        return known[length]

    def _evaluate(self, length: int, start: int, device: torch.device) -> Tensor:
        positions = torch.arange(length, device=device)
        allowed = self._between(positions)
        if not torch.equal(allowed, self._between(positions + start)):
            raise PackingError("a mask that depends on where in the batch a sequence stands")
        return allowed

    def _between(self, positions: Tensor) -> Tensor:
        zero = positions.new_zeros(())
        allowed: Tensor = self._rule(zero, zero, positions[:, None], positions[None, :])
        return allowed.expand(len(positions), len(positions)).contiguous()


_known_windows: dict[Any, dict[int, Window | None]] = {}
"""By the key of a rule and the length up to which it holds. transformers makes new rules in every pass."""


def rule_key(rule: Any) -> Any:
    """Equal for rules that are made of the same code and numbers; None for a rule that holds anything else."""
    if isinstance(rule, int | float):
        return (rule,)
    if isinstance(rule, FunctionType):
        made_of: list[Any] = [*(cell.cell_contents for cell in rule.__closure__ or ()), *(rule.__defaults__ or ())]
        name: tuple[Any, ...] = (rule.__module__, rule.__code__)
    elif isinstance(rule, tuple):
        made_of, name = list(rule), ()
    else:
        return None
    keys = tuple(rule_key(part) for part in made_of)
    return None if None in keys else (name, keys)


def window_of(allowed: Tensor) -> Window | None:
    """`allowed`, bool [length, length], as a window; None if it is none."""
    length = len(allowed)
    before, behind = int(allowed[:, 0].sum()) - 1, int(allowed[0].sum()) - 1
    positions = torch.arange(length, device=allowed.device)
    queries, keys = positions[:, None], positions[None, :]
    if not torch.equal(allowed, (keys >= queries - before) & (keys <= queries + behind)):
        return None
    return (-1 if before == length - 1 else before, -1 if behind == length - 1 else behind)


# --- the current pass -------------------------------------------------------------------------------------------


class _Pass:
    def __init__(self, runs: Sequence[Run], prefix: PrefixStates | None = None) -> None:
        self.runs = runs
        self.prefix = prefix
        self.num_tokens = runs[-1].stop if runs else 0
        self.attends_to_all = not any(run.attended for run in runs)
        self.boundaries = cache(lambda device: to_device(boundaries(runs), device))
        """On the device."""
        self.keys: Callable[[torch.device], list[Tensor | None]] = cache(
            lambda device: [to_device(run.attended_keys(), device) if run.attended else None for run in runs]
        )
        """For each run: which of its tokens are attended to, bool [count, 1, 1, length]; None if all are."""


def boundaries(runs: Sequence[Run]) -> NDArray[np.int32]:
    """The start of each sequence, and the end of the last one. Shape [B + 1]. Flash attention's cu_seqlens."""
    lengths = np.repeat([run.length for run in runs], [run.count for run in runs])
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


_NO_PASS = _Pass(())

_pass = _NO_PASS
"""Module-level, because most models pass no additional arguments to their attention. A worker has one engine and one
thread."""


@contextmanager
def running(runs: Sequence[Run], prefix: PrefixStates | None = None) -> Iterator[None]:
    """While inside, models with packed attention compute the tokens of a prefix that are not known, and of `runs`,
    which come behind it."""
    global _pass
    assert _pass is _NO_PASS, "forward passes do not nest"
    if prefix is not None and prefix.num_computed:
        behind = [replace(run, start=prefix.num_computed + run.start) for run in runs]
        runs = [Run(start=0, count=1, length=prefix.num_computed), *behind]
    _pass = _Pass(runs, prefix)
    try:
        yield
    finally:
        _pass = _NO_PASS


# --- called by transformers -------------------------------------------------------------------------------------


def register() -> None:
    """Register PACKED_ATTENTION with transformers. Side effect on the whole process."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, sequence_mask)


def sequence_mask(*, mask_function: MaskRule, q_offset: int = 0, kv_offset: int = 0, **_: Any) -> SequenceMask:
    """transformers' mask function: keep the rule. Raises PackingError if a cache has earlier tokens."""
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
    softcap: float | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function, over the runs of the current forward pass.

    query [1, heads, T, head dim], key and value [1, key heads, T, head dim] → [1, T, heads, head dim]. `softcap`: a
    score s becomes softcap · tanh(s / softcap). Raises PackingError for arguments that are not supported here.
    """
    _refuse_unsupported(query, key, arguments, dropout)
    rule = _rule_of(module, attention_mask, is_causal, arguments.get("sliding_window"))
    # The kernel for variable lengths takes no sequence with fewer keys than queries.
    suits = _pass.attends_to_all and suits_varlen(query.device.type, query.dtype, query.shape[-1], value.shape[-1])
    suits = suits and softcap is None
    varlen = cuda.varlen_attention(query.device) if suits else None
    window = None if varlen is None else rule.window(_pass.runs[-1], query.device)
    if varlen is None or window is None:
        attend = scaled_dot_product_attention if softcap is None else partial(_capped_attention, cap=softcap)
        return _attend_by_runs(attend, rule, query, key, value, scaling), None
    return _attend_at_once(varlen, window, query, key, value, scaling), None


def _attend_by_runs(
    attend: Callable[..., Tensor], rule: SequenceMask, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
) -> Tensor:
    _, num_heads, num_tokens, _ = query.shape
    attended = query.new_empty(1, num_tokens, num_heads, value.shape[-1])
    prefix, before = _pass.prefix, None
    if prefix is not None:
        before = prefix.of_next_layer(*(tokens[:, :, : prefix.num_computed] for tokens in (key, value)))
    for run, attended_keys in zip(_pass.runs, _pass.keys(query.device), strict=True):
        num_before = 0 if prefix is None else prefix.num_known if run.start < prefix.num_computed else prefix.num_tokens
        causal, mask = rule.of_run(run, query.device, num_before)
        if attended_keys is not None:
            causal, mask = False, _both(attended_keys, causal, mask)
        keys, values = _sequences(key, run), _sequences(value, run)
        if before is not None and num_before:
            keys, values = _behind(before[0][:, :, :num_before], keys), _behind(before[1][:, :, :num_before], values)
        out = attend(
            _sequences(query, run),
            keys,
            values,
            attn_mask=mask,
            scale=scaling,
            is_causal=causal,
            enable_gqa=key.shape[1] != num_heads,
        )
        attended[0, run.start : run.stop] = out.transpose(1, 2).flatten(0, 1)
    return attended


def _capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None,
    scale: float | None,
    is_causal: bool,
    enable_gqa: bool,
    cap: float,
) -> Tensor:
    """As SDPA, which has no cap, with the scores in memory."""
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.div_(cap).tanh_().mul_(cap)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores.masked_fill_(~attn_mask, -torch.inf)
    return scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype) @ value


def _both(keys: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    if causal:
        length = keys.shape[-1]
        mask = torch.ones(length, length, dtype=torch.bool, device=keys.device).tril()
    return keys if mask is None else keys & mask


def _sequences(tokens: Tensor, run: Run) -> Tensor:
    """The view [count, heads, length, head dim] of one run in [1, heads, T, head dim]."""
    heads = tokens.shape[1]
    return tokens[0, :, run.start : run.stop].view(heads, run.count, run.length, -1).transpose(0, 1)


def _behind(before: Tensor, own: Tensor) -> Tensor:
    return torch.cat([before.expand(own.shape[0], -1, -1, -1), own], dim=2)


def _attend_at_once(
    varlen: cuda.VarlenAttention, window: Window, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
) -> Tensor:
    starts, longest = _pass.boundaries(query.device), _pass.runs[-1].length
    tokens = (_tokens_first(each) for each in (query, key, value))
    is_grouped = key.shape[1] != query.shape[1]
    arguments = {"scale": scaling, "window_size": window, "enable_gqa": is_grouped}
    out: Tensor = varlen(*tokens, starts, starts, longest, longest, **arguments)
    return out[None]


def _tokens_first(tokens: Tensor) -> Tensor:
    """[1, heads, T, head dim] → [T, heads, head dim], a view if the last axis is contiguous, as the kernel asks."""
    swapped = tokens[0].transpose(0, 1)
    return swapped if swapped.stride(-1) == 1 else swapped.contiguous()


def suits_varlen(device_type: str, dtype: torch.dtype, head_dim: int, value_head_dim: int) -> bool:
    """Whether the kernel for variable lengths takes such tensors. Source: mha_varlen_fwd in PyTorch's flash_api.cpp."""
    return (
        device_type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and head_dim == value_head_dim
        and head_dim % 8 == 0
        and head_dim <= 256
    )


def _rule_of(module: torch.nn.Module, mask: Any, is_causal: bool | None, window: Any) -> SequenceMask:
    if isinstance(mask, SequenceMask):
        return mask
    if mask is not None:
        raise PackingError(f"{type(module).__name__} builds a mask tensor of its own")
    if window is not None:
        raise PackingError(f"{type(module).__name__} has a sliding window without a mask")
    # transformers' own SDPA function decides in this way without a mask.
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    return SequenceMask(causal_mask_function if causal else bidirectional_mask_function)


def _refuse_unsupported(query: Tensor, key: Tensor, arguments: dict[str, Any], dropout: float) -> None:
    if dropout:
        raise PackingError("dropout in inference")
    for name, value in arguments.items():
        if name not in _HARMLESS_ARGUMENTS and value is not None and value is not False:
            raise PackingError(f"attention with {name}")
    num_tokens = _pass.num_tokens
    if query.shape[0] != 1 or query.shape[2] != num_tokens or key.shape[2] != num_tokens:
        raise PackingError(f"attention over {tuple(query.shape)}, not over the {num_tokens} packed tokens")


class PackedForward:
    """Side effect of construction: the model's attention is switched to packed, and its linear layers are prepacked. A
    padded forward made later switches both back."""

    path = "packed"
    num_padding_tokens = 0

    def __init__(self, model: PreTrainedModel, device: torch.device, *, has_segments: bool = False) -> None:
        """`has_segments`: as for `PaddedForward`. Raises PackingError when the model takes no positions, or its
        attention cannot be replaced."""
        accepted = inspect.signature(model.forward).parameters
        if "position_ids" not in accepted:
            raise PackingError(f"{type(model).__name__} takes no position_ids")
        register()
        model.set_attn_implementation(PACKED_ATTENTION)
        if model.config._attn_implementation != PACKED_ATTENTION:
            raise PackingError(f"the attention of {type(model).__name__} cannot be replaced")
        prepack_linears(model)
        self._model = model
        self._device = device
        self.can_share = device.type == "cpu"
        self._num_token_types = num_token_types(model)
        self._has_segments = has_segments and self._num_token_types > 1

    def __call__(self, layout: Layout, prefix: PrefixStates | None = None) -> Tensor:
        token_ids = to_device(layout.computed_ids(), self._device)[None]
        arguments: dict[str, Any] = {
            "input_ids": token_ids,
            "position_ids": to_device(self._positions(layout), self._device)[None],
            # All ones, because without a mask transformers looks for packing itself and wraps the model's mask rule.
            "attention_mask": torch.ones_like(token_ids),
        }
        if self._has_segments and layout.borders is not None:
            arguments["token_type_ids"] = to_device(layout.token_types(), self._device)[None]
        elif self._num_token_types:
            arguments["token_type_ids"] = torch.zeros_like(token_ids)
        with running(layout.runs, prefix):
            hidden: Tensor = self._model(**arguments).last_hidden_state
        return hidden[0, layout.prefix.size :]

    def _positions(self, layout: Layout) -> Ints:
        config = self._model.config
        if config.model_type not in POSITIONS_AFTER_PADDING:
            return layout.computed_offsets()
        if layout.num_shared:
            raise PackingError("a shared prefix of tokens that see later ones")  # of RoBERTa's families
        return layout.positions_after(int(config.pad_token_id))
