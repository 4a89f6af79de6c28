"""Cuts the inputs of a call into bodies of requests.

Owns the JSON of inputs, each of which is written once. Called by `vecd.client.sdk.calls`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from vecd.client.sdk.endpoint import RequestLimits

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY


class Cut(NamedTuple):
    """Inputs `start`–`end` of a call, in one body."""

    start: int
    end: int
    body: bytes
    where: str
    """For messages: "" if these are all inputs of the call."""


def write(value: Any) -> bytes:
    """Its JSON. Raises TypeError when it has none."""
    try:
        return orjson.dumps(value, option=_OPTIONS)
    except orjson.JSONEncodeError as error:
        if "surrogates" not in str(error):
            raise TypeError(f"an input cannot be sent: {error}") from error
        return json.dumps(value).encode()  # half of a surrogate pair: the server says which input has it


def cut(fields: Mapping[str, Any], name: str, inputs: Sequence[Any], limits: RequestLimits) -> Iterator[Cut]:
    """Bodies of `fields` and a list `name` with some of `inputs`, in their order, all within `limits`.

    An input that is too large for a request has one to itself, and the server refuses it. Raises TypeError.
    """
    rest = write({key: value for key, value in fields.items() if value is not None})[1:]
    head = b'{"' + name.encode() + b'":['
    tail = b"]," + rest if len(rest) > 1 else b"]}"
    room = limits.max_bytes - len(head) - len(tail)
    start, written, size = 0, list[bytes](), 0
    for each in inputs:
        one = write(each)
        if written and (len(written) == limits.max_inputs or size + len(one) >= room):
            yield _cut(head, written, tail, start, len(inputs))
            start, written, size = start + len(written), [], 0
        written.append(one)
        size += len(one) + 1
    if written:
        yield _cut(head, written, tail, start, len(inputs))


def _cut(head: bytes, written: list[bytes], tail: bytes, start: int, num_inputs: int) -> Cut:
    end = start + len(written)
    where = "" if end - start == num_inputs else f" (inputs {start} to {end - 1} of the call are counted from 0 here)"
    return Cut(start, end, b"".join((head, b",".join(written), tail)), where)
