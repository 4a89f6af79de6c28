"""Where a model's processes and weights are at the moment, and how long they stay.

Owns the states' names and the reading of `keep_alive` values. The supervisor changes states
(`vecd.launch.processes.residency`); gateways are told of each change (`vecd.shm.control.ModelIs`), and let requests
wait for a model that is not ready. Imports nothing but the standard library.
"""

import math
import re
from enum import StrEnum


class ModelState(StrEnum):
    UNLOADED = "unloaded"
    """No process, no weights. A request for it has it loaded."""
    LOADING = "loading"
    READY = "ready"
    """A worker has been ready since it was loaded; one that dies is restarted."""
    PARKED = "parked"
    """The workers have ended; the fork server keeps the weights, and new workers are forked from it."""
    DRAINING = "draining"
    """No batch is sent any more. Once those in flight are answered, the workers end; new requests wait for what comes
    after that."""
    FAILED = "failed"
    """It could not be loaded, and is not tried again for a while."""


_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)"
_PART = re.compile(rf"({_NUMBER})({'|'.join(_UNITS_S)})", re.ASCII)
_DURATION = re.compile(rf"(?:{_PART.pattern})+", re.ASCII)
_MAX_CHARS = 32
_FOR_EVER_S = 9e9
"""285 years. A date that far away can still be written."""


def parse_keep_alive(value: object) -> float | None:
    """Seconds that a model stays after its last request, 0 or more; None: for ever. `value` is what Ollama's clients
    send: a number of seconds, as a string, too, or a duration as Go writes it, "5m" or "1h30m"; a negative one,
    and one of centuries, means for ever. Raises ValueError, whose message says what it must be."""
    seconds = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str) and len(value) <= _MAX_CHARS:
        text = value.strip()
        unsigned = text.removeprefix("-")
        if re.fullmatch(_NUMBER, unsigned, re.ASCII):
            seconds = float(text)
        elif _DURATION.fullmatch(unsigned):
            total = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(unsigned))
            seconds = -total if text.startswith("-") else total
    if math.isnan(seconds):
        raise ValueError("must be seconds or a duration like 5m; a negative one means for ever")
    return seconds if 0 <= seconds < _FOR_EVER_S else None
