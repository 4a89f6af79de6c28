"""Out of memory: which errors mean it, and the second try with a batch in two halves.

Imports no torch. Called by the engines of transformers, and by `vecd.workers.process.loop`, which reports the errors
that remain.
"""

import logging
from collections.abc import Callable

import numpy as np

from vecd.shm.views import Rows
from vecd.workers.engine import Finish, PackedBatch

log = logging.getLogger("vecd.worker")


def begin_or_halve(
    begin: Callable[[PackedBatch, Rows], Finish],
    batch: PackedBatch,
    rows: Rows,
    free_memory: Callable[[], None] = lambda: None,
) -> Finish:
    """Begin a batch, like `Engine.begin`. After out of memory `free_memory` is called, and the batch is computed once
    more, in two halves. Raises the error if there is only one sequence, or if a half is too large as well."""
    try:
        return begin(batch, rows)
    except Exception as error:
        if batch.lengths.size == 1 or not means_out_of_memory(error):
            raise
    # Outside of `except`, because the error's traceback holds the arrays of the failed pass.
    log.warning(
        "out of memory: %d sequences of %d tokens are computed in two halves",
        batch.lengths.size,
        batch.token_ids.size,
    )
    free_memory()
    first, second = halves(batch)
    begin(first, rows)()  # finished, so that nothing writes to the rows if the second fails
    return begin(second, rows[first.num_rows :])


def means_out_of_memory(error: Exception) -> bool:
    """Whether `error` means out of memory: Python's, torch's on a GPU, or torch's or ONNX Runtime's on a processor."""
    # By name, because a worker without a model does not import torch.
    names = {cls.__name__ for cls in type(error).__mro__}
    # Neither has a class for it on a CPU. Sources: torch's c10/core/impl/alloc_cpu.cpp, "DefaultCPUAllocator: …"; ONNX
    # Runtime's core/framework/bfc_arena.cc, "Failed to allocate memory for requested buffer …".
    texts = ("DefaultCPUAllocator", "Failed to allocate memory", "bad_alloc")
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or any(text in str(error) for text in texts)


def means_no_more_code(error: Exception) -> bool:
    """Whether oneDNN could not compile a kernel. It compiles one for every new number of rows.

    oneDNN accepts a shape at every size or not at all, so this error means out of memory. It is permanent: after one
    failure the same thread cannot compile any kernel, even with free memory. Measured with torch 2.13: after RLIMIT_AS
    was lifted again, every new shape still failed; shapes compiled before and other threads did not.
    """
    return isinstance(error, RuntimeError) and "could not create a primitive" in str(error)


def halves(batch: PackedBatch) -> tuple[PackedBatch, PackedBatch]:
    """The first sequences of `batch` and the rest, cut so that their numbers of tokens are as equal as possible. Both
    borrow what `batch` borrows. `batch` holds at least two sequences."""
    ends = np.cumsum(batch.lengths, dtype=np.int64)
    count = 1 + int(np.abs(2 * ends[:-1] - ends[-1]).argmin())
    return batch.part(0, count), batch.part(count, batch.lengths.size)
