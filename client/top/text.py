"""Figures as text: short, with their unit, and of one width where they stand below one another.

Owns numbers, bars and sparklines in words. Pure. Called by `vecd.client.top.view`.
"""

import math
from collections.abc import Iterable

NOTHING = "–"
"""Stands for a figure that is not known."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-=+*%#"
_EIGHTHS = " ▏▎▍▌▋▊▉"
_LARGE = ((1e9, "G"), (1e6, "M"), (1e4, "k"))


def number(value: float | None) -> str:
    """Three figures or so: 0.4, 12.5, 1,234, 56.7k."""
    if value is None:
        return NOTHING
    for limit, letter in _LARGE:
        if value >= limit:
            unit = 1e3 if letter == "k" else limit
            return f"{value / unit:.{0 if value / unit >= 100 else 1}f}{letter}"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def rate(per_s: float | None) -> str:
    return f"{number(per_s)}/s" if per_s is not None else NOTHING


def duration(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    if seconds < 0.1:
        return f"{seconds * 1000:.{2 if seconds < 0.01 else 1}f} ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.{2 if seconds < 10 else 1}f} s"


def age(seconds: float) -> str:
    """How long a process has run."""
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days} d {h} h"
    if hours:
        return f"{h} h {m:02} min"
    return f"{m} min {s:02} s" if m else f"{s} s"


def size(num_bytes: float | None) -> str:
    if num_bytes is None:
        return NOTHING
    mb = num_bytes / 1e6
    return f"{mb / 1000:.1f} GB" if mb >= 1000 else f"{mb:.0f} MB"


def share(part: float | None) -> str:
    if part is None:
        return NOTHING
    percent = 100 * part
    return f"{percent:.{1 if 0 < percent < 9.95 else 0}f} %"


def bar(part: float | None, width: int, *, is_ascii: bool = False) -> str:
    """`width` columns, of which the share `part` is full, rounded to an eighth of a column, in ASCII to one."""
    filled = min(1.0, max(0.0, part or 0.0)) * width
    if is_ascii:
        return ("#" * round(filled)).ljust(width, ".")
    whole, eighths = divmod(round(filled * 8), 8)
    return ("█" * whole + (_EIGHTHS[eighths] if eighths else "")).ljust(width)


def sparkline(values: Iterable[float], width: int, *, is_ascii: bool = False) -> str:
    """The last `width` values as blocks, the newest on the right. The highest value has a full block."""
    blocks = _ASCII_BLOCKS if is_ascii else _BLOCKS
    shown = list(values)[-width:] if width > 0 else []
    highest = max(shown, default=0.0)
    if highest <= 0:
        return (blocks[0] * len(shown)).rjust(max(0, width))
    last = len(blocks) - 1
    return "".join(blocks[min(last, math.ceil(value / highest * last))] for value in shown).rjust(width)
