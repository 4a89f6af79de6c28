"""Which of the packages that only some engines need are installed.

Owns the look-up and the words for a missing one. Imports none of them, because the supervisor asks. Called by
`vecd.launch.config` and `vecd.workers.engines.load`.
"""

import importlib.util

from vecd.missing import not_installed

NEEDS_TORCH = f"needs torch and transformers ({not_installed('torch', 'transformers')})"
"""The end of a sentence that says what was requested."""


def has_torch() -> bool:
    """Whether torch and transformers are installed: every engine but the lean one needs both, and so does the
    reference model."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))
