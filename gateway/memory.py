"""How much freed memory the process keeps, instead of giving it back and asking for it again.

Owns one setting of the C library. Called by `vecd.gateway.main`, once, at the start.
"""

_LARGEST_COUNTED_BYTES = 31 * 1024 * 1024


def keep_freed_memory() -> None:
    """Keep up to some 62 MB of freed memory for the next answers.

    glibc gives freed memory at the end of its heap back at 128 KB, and with every answer of megabytes the kernel has to
    hand out fresh pages: 4,000 page faults for 2,048 × 384 floats, which cost as much as half of their encoding. It
    stops once a large block has been freed, and this frees one that was never touched. Measured: 128 × 1024 floats as
    JSON 6.1 → 3.1 ms, 2,048 × 384 30.6 → 20.0 ms. With another C library it does nothing. Source: mallopt(3),
    M_MMAP_THRESHOLD, "dynamic mmap threshold"; 32 MB is the largest that it adjusts to.
    """
    bytes(_LARGEST_COUNTED_BYTES)
