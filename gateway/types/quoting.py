"""How much of what a client sent appears in an error.

Owns the two limits. Called wherever an error names a value. Knows no HTTP.
"""

_MAX_QUOTED_CHARS, _MAX_SHOWN_CHARS = 32, 64


def quoted(text: str) -> str:
    """The part of a name from a client that helps to find it, in ASCII."""
    shown = ascii(text[:_MAX_QUOTED_CHARS])  # ten characters for each that is not ASCII
    return shown if len(shown) <= _MAX_SHOWN_CHARS else f"{shown[:_MAX_SHOWN_CHARS]}..."
