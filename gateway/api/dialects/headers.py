"""Headers that mean the same in every dialect. Pure.

Of requests it owns `x-vecd-priority`, `x-vecd-timeout-ms` and what is read of `Accept`: a field of the body, where a
dialect has one for the same, wins over the header, because it is the more explicit of the two. Of answers it owns what
says that an input was not embedded as it came: `x-vecd-truncated`, `x-vecd-chunked` (each how many inputs) and
`x-vecd-token-ids` (whose vocabulary token ids were taken for). Called by the dialects.
"""

import re
from collections.abc import Mapping

from vecd.gateway.types.errors import BadRequest
from vecd.gateway.types.quoting import quoted
from vecd.gateway.types.request import Embedded, Encoding, Priority, Source

MAX_TIMEOUT_MS = 24 * 60 * 60 * 1000

_PRIORITIES = {priority.name.lower(): priority for priority in Priority}
_WHOLE_NUMBER = re.compile(r"[0-9]{1,8}")
_QUALITY = re.compile(r"\s*q\s*=\s*(0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)\s*", re.IGNORECASE)
_MAX_MEDIA_RANGES = 32
_BINARY_TYPES = {"application/octet-stream": Encoding.BYTES, "application/x-npy": Encoding.NPY}
_MAY_BE_BINARY = re.compile("|".join(map(re.escape, _BINARY_TYPES)), re.IGNORECASE)
_TEXTS = frozenset((Source.TEXT,))


def parse_priority(headers: Mapping[str, str]) -> Priority | None:
    """What `x-vecd-priority` asks for. Raises BadRequest."""
    name = headers.get("x-vecd-priority")
    return None if name is None else priority_named(name, "header x-vecd-priority:")


def priority_named(name: str, where: str, param: str | None = None) -> Priority:
    """The priority of that name. Raises BadRequest, which begins with `where`."""
    if name not in _PRIORITIES:
        raise BadRequest(f"{where} must be 'interactive', 'normal' or 'bulk', is {quoted(name)}", param=param)
    return _PRIORITIES[name]


def priority_numbered(number: int) -> Priority:
    """As vLLM and Cohere have it: lower goes first, 0 is the usual."""
    return Priority.NORMAL if number == 0 else Priority.INTERACTIVE if number < 0 else Priority.BULK


def parse_timeout_s(headers: Mapping[str, str]) -> float | None:
    """What `x-vecd-timeout-ms` asks for, in seconds. Raises BadRequest."""
    value = headers.get("x-vecd-timeout-ms")
    if value is None:
        return None
    if not _WHOLE_NUMBER.fullmatch(value) or not 1 <= int(value) <= MAX_TIMEOUT_MS:
        raise BadRequest(
            f"header x-vecd-timeout-ms: must be a whole number from 1 to {MAX_TIMEOUT_MS}, is {quoted(value)}"
        )
    return int(value) / 1000


def parse_accept(headers: Mapping[str, str]) -> Encoding | None:
    """The encoding without JSON that `Accept` prefers to JSON; None when there is none.

    JSON is answered to whoever likes it as much, or accepts nothing that there is: a 406 would help nobody.
    Source: RFC 9110, section 12.5.1; of the parameters only q counts.
    """
    accept = headers.get("accept")
    if accept is None or not _MAY_BE_BINARY.search(accept):
        return None
    accept = accept.lower()
    qualities = dict(map(_media_range, accept.split(",", _MAX_MEDIA_RANGES)[:_MAX_MEDIA_RANGES]))
    preferred, highest = None, _quality_of("application/json", qualities)
    for media_type, encoding in _BINARY_TYPES.items():
        if (quality := _quality_of(media_type, qualities)) > highest:
            preferred, highest = encoding, quality
    return preferred


def _media_range(text: str) -> tuple[str, float]:
    """A range and its quality, which is 1 when it is not given, and 0 when it cannot be read."""
    media_range, *parameters = text.split(";")
    for parameter in parameters:
        if parameter.strip().startswith("q"):
            match = _QUALITY.fullmatch(parameter)
            return media_range.strip(), float(match[1]) if match else 0.0
    return media_range.strip(), 1.0


def _quality_of(media_type: str, qualities: Mapping[str, float]) -> float:
    """By the most specific range that has the type."""
    for media_range in (media_type, "application/*", "*/*"):
        if media_range in qualities:
            return qualities[media_range]
    return 0.0


def response_headers(embedded: Embedded) -> dict[str, str]:
    """What an answer's headers say of its inputs; nothing where all were texts that the model takes whole."""
    headers = {}
    if embedded.num_truncated:
        headers["x-vecd-truncated"] = str(embedded.num_truncated)
    if embedded.num_chunked:
        headers["x-vecd-chunked"] = str(embedded.num_chunked)
    if embedded.sources != _TEXTS and (vocabularies := sorted(x.value for x in embedded.sources - _TEXTS)):
        headers["x-vecd-token-ids"] = ", ".join(vocabularies)
    return headers
