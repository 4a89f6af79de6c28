"""What may have been meant by a flag, a setting or a command that there is not.

Called where command lines are read, by the commands of `vecd.client` and `vecd.launch`, and for the other sources of
settings.
"""

import argparse
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

_CUTOFF = 0.65


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like `name`; None if none is like it."""
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=_CUTOFF)), None)


def flag_hints(words: Sequence[str], known: Sequence[str]) -> str:
    """The end of a message: what may have been meant by each flag in `words` that is not known. Empty if none is like a
    known one."""
    names = [flag.removeprefix("--") for flag in known if flag.startswith("--")]
    hints = ""
    for word in words:
        flag = word.partition("=")[0]
        name = flag.removeprefix("--").replace("_", "-")
        if flag.startswith("--") and flag not in known and (meant := closest(name, names)):
            hints += f"; {flag}: did you mean --{meant}?"
    return hints


def flags_of(parser: argparse.ArgumentParser) -> list[str]:
    """All spellings of its flags."""
    return list(parser._option_string_actions)
