"""Parses request bodies of any size, compressed or not, without blocking the event loop.

Owns the line between small bodies, which are parsed at once, and large ones, which are parsed in a thread and in pieces
(`vecd.gateway.api.large_json`), with the same result. Knows no dialect. Measured, 45 MB of token ids: given to orjson
at once they hold the GIL for 1.6 s.
"""

from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import TypeVar

import orjson

from vecd.base.files import JsonObject
from vecd.gateway.api.large_json import Bounds, FieldNames, PieceReader, invalid_json, is_about_surrogate
from vecd.gateway.errors import BadRequest
from vecd.gateway.http.framing import Decompression
from vecd.gateway.request import Coding
from vecd.gateway.scheduling.admission import TenantRoom
from vecd.gateway.tokenization.fair_pool import Threads

T = TypeVar("T")

INLINE_BYTES = 64 * 1024
"""Bodies up to this many bytes are parsed on the event loop: 0.06 ms for texts, 0.15 ms for token ids, at worst
(empty lists) 1.1 ms."""
MAX_WAITING_BYTES = 256 * 1024 * 1024
"""Of all large bodies that are being parsed or wait for it. Their parsed values take as much again. Those of one tenant
take at most half of it, so that there is room for another's."""
_BYTES_PER_S = 50e6
"""The lowest rate of parsing, which token ids have; for Retry-After."""
INFLATED_AT_A_TIME_BYTES = 1024 * 1024
"""Bytes that one step decompresses: 3 ms with gzip, which releases the GIL meanwhile."""
MAX_INFLATED_RATIO = 64
_MIN_INFLATED_BYTES = 4 * 1024 * 1024
"""A compressed body may become 64 times as long, or this if that is more: JSON of texts becomes 2 to 20 times as long,
and a bomb of 64 KB would otherwise take 180 MB of memory before any quota counts it."""
_DECOMPRESSOR_BYTES = 256 * 1024
"""Memory of a zstd decompressor; gzip's is smaller."""


class Bodies:
    max_bytes: int
    """A body may become so long when it is decompressed."""
    bounds: Bounds
    """How much of a large body is kept, whatever model it is for."""

    def __init__(self) -> None:
        self.room = TenantRoom(MAX_WAITING_BYTES, "bodies of {} bytes wait to be parsed", _BYTES_PER_S)

    async def parse(
        self,
        body: bytes,
        names: FieldNames,
        parse_fields: Callable[[JsonObject], T],
        threads: Threads,
        tenant: str = "",
        coding: Coding | None = None,
    ) -> T:
        """The result of `parse_fields` for the fields of the JSON object in `body`. Of a large body it is called in one
        of the threads, lists of int32 in large fields come as `array("i")`, and strings and lists of numbers are cut.

        `tenant`: the owner of the body, "" if there is none.

        Raises BadRequest for anything but a JSON object in that coding, PayloadTooLarge for one that is too long when
        decompressed, TooManyRequests when too many bytes wait to be parsed, of all bodies or of this tenant's, and
        what `parse_fields` raises.
        """
        bounds = self.bounds  # a reload may change them while this body waits
        most = min(self.max_bytes, max(_MIN_INFLATED_BYTES, MAX_INFLATED_RATIO * len(body)))
        inflating = None if coding is None else Decompression(body, coding, most)
        if inflating is not None and len(body) <= INLINE_BYTES:
            inflating.advance(INLINE_BYTES)
            if inflating.is_complete:
                body, inflating = inflating.take(), None
        if inflating is None and len(body) <= INLINE_BYTES:
            return parse_fields(_parse_small(body, names))
        with self.room.share(tenant) as share:
            share.take(len(body))
            if inflating is not None:
                num_sent_bytes, advance = len(body), partial(inflating.advance, INFLATED_AT_A_TIME_BYTES)
                while not inflating.is_complete:  # bytes are counted before each step: the whole size is not known
                    share.take(num_sent_bytes + inflating.num_bytes + _DECOMPRESSOR_BYTES)
                    await threads.call(advance, tenant)
                share.take(num_sent_bytes + inflating.num_bytes)
                body = inflating.take()
            reader = PieceReader(body, names, bounds)
            return await threads.run(_parse_steps(reader, parse_fields), tenant)


def _parse_small(body: bytes, names: FieldNames) -> JsonObject:
    """The JSON object in a body of at most `INLINE_BYTES`, not compressed; otherwise as `Bodies.parse`."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if is_about_surrogate(error):  # the reader finds out in which field, and of which input
            bounds = Bounds(max_items=INLINE_BYTES, max_chars=INLINE_BYTES, max_ids=INLINE_BYTES)
            deque(PieceReader(body, names, bounds).read_object(), maxlen=0)
        # The message of the library has the fault and its place, and quotes nothing.
        raise invalid_json(str(error), body, 0, len(body)) from None
    if names.bare_list and isinstance(fields, list):
        return {names.bare_list: fields}
    if not isinstance(fields, dict):
        raise BadRequest("The body must be a JSON object")
    return fields


def _parse_steps(reader: PieceReader, parse_fields: Callable[[JsonObject], T]) -> Generator[None, None, T]:
    fields = yield from reader.read_object()
    yield
    return parse_fields(fields)
