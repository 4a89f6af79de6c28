"""The calls into CUDA, and nothing else.

This file has never been run on a GPU; run tests/system/gpu/test_gpu.py first. Safe to import where torch has no CUDA. A
function that torch lacks is a RuntimeError or None, which the callers handle.
"""

import contextlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from vecd.model.card import ModelError, one_line

VarlenAttention: TypeAlias = Callable[..., Any]
"""torch.nn.attention.varlen.varlen_attn."""


class Cuda:
    """One GPU. Side effects: the GPU becomes the process's current one,
    because some kernels allocate memory on the current GPU and a context on another GPU costs hundreds of megabytes;
    float32 matrices are multiplied in float32."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        _compute_float32_in_float32()
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def name(self) -> str:
        return torch.cuda.get_device_name(self._device)

    def upload(self, tensor: Tensor) -> Tensor:
        """A copy on the device of a tensor in the processor's memory, for use by the next computation."""
        return upload(tensor, self._device)

    def pin(self, address: int, nbytes: int) -> None:
        """Pin memory of this process until its end. Raises RuntimeError when the driver refuses it."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        register = getattr(runtime, "cudaHostRegister", None)
        if register is None:
            raise RuntimeError(f"torch {torch.__version__} has no cudaHostRegister")
        error = int(register(address, nbytes, 0))
        if error:
            self._forget_error()
            raise RuntimeError(f"cudaHostRegister returned {error}")

    def _forget_error(self) -> None:
        """Without this, CUDA reports the last call's error again at the next kernel."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)
        torch.ones(1, device=self._device)

    def pinned(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, pin_memory=True)

    def start_copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        """Copy `source` on the device to `target` in pinned memory, after the computations so far and in parallel to
        the next ones. Copies run one after the other. The caller keeps `target` until the event has occurred."""
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
        # The allocator may reuse its memory only after the copy.
        source.record_stream(self._copies)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(self._copies)
        return copied

    def free_memory(self) -> None:
        torch.cuda.empty_cache()


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy, in the order of the current stream. The processor does not wait for a copy from pinned memory."""
    # If no more memory can be pinned, the copy waits; if the device is lost, the copy raises.
    with contextlib.suppress(RuntimeError):
        tensor = tensor.pin_memory()  # torch keeps it until the copy is over
    return tensor.to(device, non_blocking=True)


def _compute_float32_in_float32() -> None:
    """Switch TensorFloat-32 off: its 10 bits of mantissa are outside the bounds of parity. It is torch's default for
    convolutions, and an environment variable switches it on for matrices."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def describe(device: str) -> str:
    """The properties of a GPU such as "cuda:0", in one line. Raises ModelError if CUDA cannot be used on it."""
    try:
        return str(torch.cuda.get_device_properties(device))
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch has no CUDA, or no such GPU
        raise ModelError(f"{device} cannot be used: {one_line(error)} (--device cpu uses the processor)") from error


def has_native_bfloat16(device: torch.device) -> bool:
    """Compute capability 8, Ampere, has bfloat16; older GPUs emulate it."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def varlen_attention(device: torch.device) -> VarlenAttention | None:
    """torch's attention over sequences of any lengths, end to end; None without one, or without a GPU that has it."""
    if not torch.cuda.is_available():  # torch's build for CUDA raises when it is asked for the capability of no GPU
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    # Early versions took no window.
    if not {"scale", "window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys():
        return None
    is_flash_available = getattr(torch.backends.cuda, "is_flash_attention_available", None)
    if is_flash_available is None or not is_flash_available():
        return None
    # Flash attention needs compute capability 8, Ampere.
    return varlen_attn if torch.cuda.get_device_capability(device) >= (8, 0) else None
