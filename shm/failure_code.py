"""The failure codes that travel from a worker to the gateway.

Across processes travels a code, never an exception: a pickled exception is code execution in the reader, and its
message may quote one caller's text to another. The worker logs the exception itself, under the batch number.
"""

from enum import IntEnum


class FailureCode(IntEnum):
    """Why a batch has no rows. Sent by `vecd.workers.process.loop`, turned into an HTTP error by
    `vecd.gateway.types.errors`."""

    ENGINE_ERROR = 1
    """The forward pass raised."""

    OUT_OF_MEMORY = 2
    """The forward pass ran out of memory; a smaller batch may succeed."""

    BAD_MESSAGE = 3
    """The worker could not read the batch: a bug, or two versions of vecd speaking to each other."""
