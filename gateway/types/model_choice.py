"""Which model a request is for, where several are served.

Owns the type. `vecd.gateway.service` makes one for each request, and reads the path and the header; for a request that
names no model there, `vecd.gateway.api.handlers` chooses by the body.
"""

from collections.abc import Callable


class ModelChoice:
    """The choice of one request. Use it on the event loop."""

    __slots__ = ("is_by_path", "is_made", "named", "on_chosen")

    def __init__(self, named: str, *, is_made: bool, is_by_path: bool = False) -> None:
        self.named = named
        """By the path or the header, as the client wrote it; "" if neither names a model."""
        self.is_made = is_made
        """The path or the header has named a model that is served."""
        self.is_by_path = is_by_path
        """The path has named it: the request is about the model, and about nothing of the operator's."""
        self.on_chosen: Callable[[str], None] = lambda model: None
        """Called with the name of the model once the body has been read; no other is held for the request from then
        on."""
