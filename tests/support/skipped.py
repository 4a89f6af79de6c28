"""Says at the end of a run what its skipped tests need: a line for each target of the Makefile that has it, and for
each other reason. pytest's own `-rs` has a line for each place that skips, 150 of them.

Called by `tests/conftest.py`. The reason of a test that a target runs names the target, or VECD_SOAK.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

_TARGET = re.compile(r"\bmake (?:soak|binary|test-[a-z]+)")
_MAX_WIDTH = 100


def what_skipped_tests_need(reasons: Iterable[str]) -> Iterator[str]:
    """One line for each need, the most frequent first; `reasons` has one entry for each skipped test."""
    for need, count in Counter(map(_need, reasons)).most_common():
        yield f"{count:5} skipped: {need}"[:_MAX_WIDTH]


def _need(reason: str) -> str:
    named = _TARGET.search(reason)
    if named:
        return named[0]
    return "make soak" if "VECD_SOAK" in reason else " ".join(reason.split())
