"""The calls into CUDA, and nothing else. Everything around them is in `vecd.workers.engines.torch.device`, and tested
without a GPU.

What is in this file has never been run on a GPU (tests/workers/test_gpu.py is what to run first). Safe to import
where torch has no CUDA.
"""

import contextlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

VarlenAttention: TypeAlias = Callable[..., Any]
"""torch.nn.attention.varlen.varlen_attn."""


class Calls:
    """`vecd.workers.engines.torch.device.Calls` for one GPU. Side effects: makes it the process's current one (kernels
    that allocate by themselves do so there, and a context on another GPU would cost hundreds of megabytes of its
    memory); float32 products are computed in float32."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        _compute_float32_in_float32()
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def name(self) -> str:
        return torch.cuda.get_device_name(self._device)

    def upload(self, tensor: Tensor) -> Tensor:
        return upload(tensor, self._device)

    def pin(self, address: int, nbytes: int) -> None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(runtime.cudaHostRegister(address, nbytes, 0))
        if error:
            self._forget_error()
            raise RuntimeError(f"cudaHostRegister returned {error}")

    def _forget_error(self) -> None:
        """CUDA would report the last call's error again at the next kernel, which did nothing wrong."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)
        torch.ones(1, device=self._device)

    def pinned(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, pin_memory=True)

    def start_copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
        # Its memory may go to another tensor only when the copy is over, whoever still holds it.
        source.record_stream(self._copies)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(self._copies)
        return copied

    def free_memory(self) -> None:
        torch.cuda.empty_cache()


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on `device`, in the order of the current stream. From pinned memory the processor need not wait for it."""
    # If no more memory can be pinned, the copy waits; if the device is lost, it says so.
    with contextlib.suppress(RuntimeError):
        tensor = tensor.pin_memory()  # torch keeps it until the copy is over
    return tensor.to(device, non_blocking=True)


def _compute_float32_in_float32() -> None:
    """No TensorFloat-32, whose 10 bits of mantissa the agreement would refuse. It is torch's default for products, not
    for convolutions, and an environment variable changes it."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


@cache
def varlen_attention(device: torch.device) -> VarlenAttention | None:
    """torch's attention over sequences of any lengths, end to end; None where this torch or this GPU has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    # Early versions took no window.
    if not {"scale", "window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys():
        return None
    if not torch.backends.cuda.is_flash_attention_available():
        return None
    # Flash attention needs compute capability 8, Ampere.
    return varlen_attn if torch.cuda.get_device_capability(device) >= (8, 0) else None
