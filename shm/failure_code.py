"""The failure codes that a worker sends to the gateway.

Processes send codes, never exceptions: to unpickle an exception is to execute code, and its message may quote one
client's text to another. The worker logs the exception itself, under the batch number.
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
    """The worker could not read the batch: a bug, or two versions of vecd."""
