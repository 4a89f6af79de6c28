"""Quote values of a client in error messages, shortened.

Owns the two limits. Called wherever an error names a value. Knows no HTTP.
"""

_MAX_QUOTED_CHARS, _MAX_SHOWN_CHARS = 32, 64


def quoted(text: str) -> str:
    """The beginning of a client's value, in ASCII."""
    shown = ascii(text[:_MAX_QUOTED_CHARS])  # ten characters for each that is not ASCII
    return shown if len(shown) <= _MAX_SHOWN_CHARS else f"{shown[:_MAX_SHOWN_CHARS]}..."
