"""Tells users what to do about a package that is not there.

Imports nothing of vecd, so that every room may call it. Called where a package that is optional is looked up.
"""

import shlex
import sys


def not_installed(*packages: str) -> str:
    """The end of a sentence about `packages`, which are named as for pip. The binary has no pip."""
    if getattr(sys, "frozen", False):
        return "not in this binary: use an installed vecd"
    return f"not installed: pip install {shlex.join(packages)}"
