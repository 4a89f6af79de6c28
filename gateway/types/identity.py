"""The identity of a model: what tells whether two servers put a text to the same vector.

Owns `Identity`, what one gateway knows of the identity of one generation's model, as one of its names has it. The hex
comes from the supervisor (`vecd.shm.control.ModelIdentity`), the number format from the workers. Decides nothing:
`vecd.gateway.api.conditions` compares it with what a request demands. Made by `vecd.gateway.service`; use it on the
event loop, but for `text`.
"""

import asyncio
from collections.abc import Iterable, Mapping

HEADER = "x-vecd-identity"
"""Of a response: the identity of the model that has answered."""


class Identity:
    __slots__ = ("_formats", "by_alias", "digest", "has_format", "known", "problem", "text")

    def __init__(self, aliases: Iterable[str] = ()) -> None:
        """`aliases`: those with request defaults, which have identities of their own."""
        self.digest = ""
        """32 hexadecimal digits; "" while they are not known."""
        self.problem = ""
        """Why they are not, if it is no use waiting for them."""
        self.text: str | None = None
        """The digest and the number format; None until both are known, and from the moment on that a worker has another
        format than the workers before it: a row may then have been computed in either."""
        self.known = asyncio.Event()
        """Set while there is a digest or a problem."""
        self.has_format = asyncio.Event()
        """Set from the first worker on."""
        self.by_alias = {alias: Identity() for alias in aliases}
        self._formats: tuple[str, ...] = ()
        """Of all workers that this generation has had."""

    @property
    def formats(self) -> str:
        """The number format of the workers, several with a + between them; "" before the first worker."""
        return "+".join(self._formats)

    def describe(self) -> str:
        """What is known, for an error message."""
        return f"{self.digest};dtype={self.formats}" if self._formats else self.digest

    def set_digests(self, digest: str, by_alias: Mapping[str, str]) -> None:
        self.digest, self.problem = digest, ""
        self._renew()
        self.known.set()
        for alias, identity in self.by_alias.items():
            identity.set_digests(by_alias[alias], {})

    def set_unknown(self, problem: str) -> None:
        """The digest cannot be found out, or is not that of what the workers have read."""
        self.digest, self.problem = "", problem
        self._renew()
        self.known.set()
        for identity in self.by_alias.values():
            identity.set_unknown(problem)

    def add_format(self, number_format: str) -> None:
        """A worker with this format is up."""
        if number_format in self._formats:
            return
        self._formats = tuple(sorted((*self._formats, number_format)))
        self._renew()
        self.has_format.set()
        for identity in self.by_alias.values():
            identity.add_format(number_format)

    def _renew(self) -> None:
        is_one = self.digest and len(self._formats) == 1
        self.text = f"{self.digest};dtype={self._formats[0]}" if is_one else None
