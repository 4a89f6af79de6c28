"""Return memory that was freed to the kernel, which the allocator of libc keeps otherwise. Called by workers and
gateways after they have used much."""

import ctypes


def return_free_memory() -> None:
    """Return freed memory to the kernel; takes a few milliseconds. Does nothing if libc is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
