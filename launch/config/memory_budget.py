"""The reading of `--memory-budget`: bytes, or a share of the memory that the server may use. Pure.

Called by `vecd.launch.config.settings`, which checks the form, and by `vecd.launch.memory.budget`, which knows the
memory.
"""

import re

_AMOUNT = re.compile(r"(\d{1,18}(?:\.\d{1,6})?)\s*(%|B|[KMGT]i?B|[KMGT]i)?", re.ASCII | re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_FORMS = "must be above 0: bytes, as 2GiB or 500MB, or a share of the memory limit of at most 100%, as 80%"


def read_memory_budget(text: str, memory_nbytes: int) -> int:
    """The budget in bytes, 1 or more. `memory_nbytes`: what a share is of. Raises ValueError, which says what it must
    be."""
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise ValueError(_FORMS)
    number, unit = float(match[1]), (match[2] or "").lower()
    if unit == "%":
        if not 0 < number <= 100:
            raise ValueError(_FORMS)
        return max(1, int(memory_nbytes * number / 100))
    nbytes = int(number * (1024 if "i" in unit else 1000) ** _POWERS[unit.rstrip("b").removesuffix("i")])
    if nbytes < 1:
        raise ValueError(_FORMS)
    return nbytes
