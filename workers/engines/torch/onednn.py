"""oneDNN's linear kernels inside torch: which of them this processor and this torch have, and the calls to them.

Owns every private name of torch that vecd uses; all are in `FLOAT_NAMES` and `BFLOAT16_NAME`. A version
of torch may drop a private name or change what it does. So a kernel is resolved by name and run on a small input before
its first use. One that is missing or gives a wrong result is reported once in the log and not used; the engine's
selection then goes on to the next path or dtype. Called by `vecd.workers.engines.torch.linear`.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, TypeAlias

import torch

from vecd.shm.card import one_line

log = logging.getLogger("vecd.engine")

Operation: TypeAlias = Callable[..., Any]

FLOAT_NAMES = {
    "prepack": "ops.mkldnn._reorder_linear_weight.default",
    "linear": "ops.mkldnn._linear_pointwise.default",
    "linear_with": "ops.mkldnn._linear_pointwise.binary",
}
BFLOAT16_NAME = "ops.mkldnn._is_mkldnn_bf16_supported.default"
"""Attributes of `torch`, by the field that they fill. A resolved overload saves microseconds at every call."""


@dataclass(frozen=True, slots=True)
class FloatKernels:
    """For x [T, K] and weights [N, K] of one float type."""

    prepack: Operation
    """(weight, None) → the weight in oneDNN's own layout."""
    linear: Operation
    """(x, weight, bias, activation, [], algorithm) → [T, N]."""
    linear_with: Operation
    """(x, other [T, N], weight, bias, "add" or "mul") → [T, N], the layer's output plus or times the other."""


@cache
def float_kernels(dtype: torch.dtype) -> FloatKernels | None:
    """The kernels for float32 or bfloat16; None for other types, and if this processor or this torch has none."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if dtype not in (torch.float32, torch.bfloat16) or not has_onednn:
        return None
    if dtype is torch.bfloat16:
        supported = _resolve({"supported": BFLOAT16_NAME}, "bfloat16")
        if supported is None or not supported["supported"]():
            return None
    found = _resolve(FLOAT_NAMES, str(dtype).removeprefix("torch."))
    kernels = None if found is None else FloatKernels(**found)
    return kernels if kernels is not None and _works(lambda: _probe_float(kernels, dtype), FLOAT_NAMES) else None


def _resolve(names: Mapping[str, str], dtype: str) -> dict[str, Operation] | None:
    found = {}
    for field, name in names.items():
        try:
            found[field] = attrgetter(name)(torch)
        except AttributeError:
            log.warning("torch %s has no torch.%s: oneDNN's %s kernels are not used", torch.__version__, name, dtype)
            return None
    return found


def _works(probe: Callable[[], bool], names: Mapping[str, str]) -> bool:
    why = "a wrong result"
    try:
        with torch.inference_mode():
            if probe():
                return True
    except Exception as error:  # a changed signature may raise anything
        why = one_line(error)
    log.warning("torch %s: %s are not used: %s", torch.__version__, ", ".join(names.values()), why)
    return False


def _probe_float(kernels: FloatKernels, dtype: torch.dtype) -> bool:
    x, bias = torch.arange(32, dtype=dtype).view(4, 8), torch.ones(8, dtype=dtype)
    weight = kernels.prepack(torch.eye(8, dtype=dtype), None)
    relu = kernels.linear(-x, weight, bias, "relu", [], "")
    with_itself = {how: kernels.linear_with(x[:2], x[:2], weight, bias, how) for how in ("add", "mul")}
    return (
        torch.equal(relu, (1 - x).relu())
        and torch.equal(with_itself["add"], 2 * x[:2] + 1)
        and torch.equal(with_itself["mul"], x[:2] * (x[:2] + 1))
    )
