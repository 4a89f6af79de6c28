"""What to do about a batch that memory does not suffice for: cut it in two.

Owns what counts as running out of memory, and as never recovering from it, and where a batch is cut. Pure, no torch.
Called by `vecd.workers.engines.torch.transformer`, which runs the halves, and by `vecd.workers.process.loop`, which
reports what is left of it.
"""

import numpy as np

from vecd.workers.engine import PackedBatch


def means_out_of_memory(error: Exception) -> bool:
    """Whether `error` is Python's, torch's on a GPU, or torch's on a processor."""
    # By name, because torch is not imported in a worker without a model.
    names = {cls.__name__ for cls in type(error).__mro__}
    # Torch on a CPU has no class for it. Source: c10/core/impl/alloc_cpu.cpp, "DefaultCPUAllocator: …".
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "DefaultCPUAllocator" in str(error)


def means_no_more_code(error: Exception) -> bool:
    """Whether oneDNN could not compile a product. It does for every number of rows that it has not seen.

    Shapes that it takes at all it takes at every size, so this is a lack of memory; and one that does not pass: after
    one failure, the same thread can compile nothing, however much memory there is. Measured with torch 2.13: with
    RLIMIT_AS lifted again, every new shape still failed; those compiled before, and another thread, did not.
    """
    return isinstance(error, RuntimeError) and "could not create a primitive" in str(error)


def halves(batch: PackedBatch) -> tuple[PackedBatch, PackedBatch]:
    """The first sequences of `batch` and the rest, cut where the two have most nearly as many tokens. Both borrow what
    `batch` borrows. `batch` holds at least two sequences."""
    ends = np.cumsum(batch.lengths, dtype=np.int64)
    count = 1 + int(np.abs(2 * ends[:-1] - ends[-1]).argmin())
    cut = int(ends[count - 1])
    first, second = (None, None) if batch.outputs is None else (batch.outputs[:count], batch.outputs[count:])
    return (
        PackedBatch(batch.lengths[:count], batch.token_ids[:cut], first),
        PackedBatch(batch.lengths[count:], batch.token_ids[cut:], second),
    )
