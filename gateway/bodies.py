"""Parses request bodies without holding up the event loop, whatever their size.

Owns the line between small bodies, which are parsed at once, and large ones, which are parsed in a thread and in
pieces (`gateway.json_pieces`), with the same outcome. Knows no dialect: which fields may be large is for its caller to
say, and what the fields mean for the function it passes. Called by the handlers in `gateway.app`.

Measured, 45 MB of token ids: given to orjson at once they hold the GIL for 1.6 s.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import orjson

from gateway.errors import BadRequest, TooManyRequests
from gateway.json_pieces import Bounds, PieceReader
from gateway.threads import Threads

T = TypeVar("T")

_INLINE_BYTES = 64 * 1024
"""Up to so many are parsed on the event loop: 0.06 ms of texts, 0.15 ms of token ids, at worst (empty lists) 1.1 ms."""

_MAX_WAITING_BYTES = 256 * 1024 * 1024
"""Of large bodies that are being parsed, or wait for it. What they become takes as much again. One tenant's take at
most half of it, so that there is room for another's."""

_BYTES_PER_S = 50e6
"""So fast they are parsed at the slowest: token ids."""


class Bodies:
    def __init__(self, threads: Threads, *, max_inputs: int, max_chars: int, max_ids: int) -> None:
        """`max_chars` and `max_ids` are the most that is looked at of one input; see `Bounds`."""
        self._threads = threads
        self._num_waiting_bytes = 0
        self._num_bytes_of: Counter[str] = Counter()
        """By tenant; those with none are not there."""
        self._bounds = Bounds(max_items=max_inputs, max_chars=max_chars, max_ids=max_ids)

    async def parse(
        self,
        body: bytes,
        large_fields: frozenset[str],
        parse_fields: Callable[[dict[str, Any]], T],
        tenant: str = "",
        small_fields: frozenset[str] = frozenset(),
    ) -> T:
        """What `parse_fields` makes of the fields of the object that the body is. `tenant`: whose it is, if anybody's.

        `large_fields`: names of the fields that may hold megabytes: a string, a list of strings, of numbers or of
        lists of numbers. `small_fields`: others that an error may name. In a large body, lists of int32 in large
        fields come as `array("i")`, and strings and lists of numbers without what goes beyond the bounds.
        `parse_fields` is then called in a thread. Raises BadRequest for anything but a JSON object, TooManyRequests
        when too much waits to be parsed, of all bodies or of this tenant's, and what `parse_fields` raises.
        """
        if len(body) <= _INLINE_BYTES:
            return parse_fields(_parse_object(body))
        with self._waiting(len(body), tenant):
            steps = _parse_steps(PieceReader(body, large_fields, self._bounds, small_fields), parse_fields)
            return await self._threads.run(steps, tenant)

    @contextmanager
    def _waiting(self, num_bytes: int, tenant: str) -> Iterator[None]:
        """Raises TooManyRequests instead, where something waits already and this would be too much beside it."""
        _check_room(self._num_waiting_bytes, num_bytes, _MAX_WAITING_BYTES, "bodies of")
        if tenant:
            _check_room(self._num_bytes_of[tenant], num_bytes, _MAX_WAITING_BYTES // 2, "this caller's bodies of")
        self._num_waiting_bytes += num_bytes
        self._num_bytes_of[tenant] += num_bytes
        try:
            yield
        finally:
            self._num_waiting_bytes -= num_bytes
            self._num_bytes_of[tenant] -= num_bytes
            if not self._num_bytes_of[tenant]:
                del self._num_bytes_of[tenant]


def _check_room(num_waiting: int, num_bytes: int, limit: int, whose: str) -> None:
    if num_waiting and num_waiting + num_bytes > limit:
        raise TooManyRequests(
            f"{whose} {num_waiting} bytes wait to be parsed, this one has {num_bytes}, at most {limit} may",
            retry_after_s=num_waiting / _BYTES_PER_S,
        )


def _parse_object(body: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        # The library says what and where, and quotes nothing.
        raise BadRequest(f"The body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadRequest("The body must be a JSON object")
    return fields


def _parse_steps(reader: PieceReader, parse_fields: Callable[[dict[str, Any]], T]) -> Generator[None, None, T]:
    fields = yield from reader.read_object()
    yield
    return parse_fields(fields)
