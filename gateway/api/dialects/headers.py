"""Headers that mean the same in every dialect. Pure.

Owns the request headers `x-vecd-priority`, `x-vecd-timeout-ms` and the reading of `Accept`. If a dialect has a field
for the same, the field wins over the header, because it is more explicit. Owns the response headers for inputs that
were not embedded as they came: `x-vecd-truncated` and `x-vecd-chunked` (numbers of inputs) and `x-vecd-token-ids` (the
vocabularies of the token ids). Called by the dialects.
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
BINARY_MEDIA_TYPES = {Encoding.BYTES: "application/octet-stream", Encoding.NPY: "application/x-npy"}
_MAY_BE_BINARY = re.compile("|".join(map(re.escape, BINARY_MEDIA_TYPES.values())), re.IGNORECASE)
_TEXTS = frozenset((Source.TEXT,))


def parse_priority(headers: Mapping[str, str]) -> Priority | None:
    """The priority in `x-vecd-priority`. Raises BadRequest."""
    name = headers.get("x-vecd-priority")
    return None if name is None else priority_named(name, "header x-vecd-priority:")


def priority_named(name: str, where: str, param: str | None = None) -> Priority:
    """The priority of that name. Raises BadRequest with a message that begins with `where`."""
    if name not in _PRIORITIES:
        raise BadRequest(f"{where} must be 'interactive', 'normal' or 'bulk', is {quoted(name)}", param=param)
    return _PRIORITIES[name]


def priority_numbered(number: int) -> Priority:
    """The priority of a number of vLLM's and Cohere's: lower goes first, 0 is normal."""
    return Priority.NORMAL if number == 0 else Priority.INTERACTIVE if number < 0 else Priority.BULK


def parse_timeout_s(headers: Mapping[str, str]) -> float | None:
    """The timeout in `x-vecd-timeout-ms`, in seconds. Raises BadRequest."""
    value = headers.get("x-vecd-timeout-ms")
    if value is None:
        return None
    if not _WHOLE_NUMBER.fullmatch(value) or not 1 <= int(value) <= MAX_TIMEOUT_MS:
        raise BadRequest(
            f"header x-vecd-timeout-ms: must be a whole number from 1 to {MAX_TIMEOUT_MS}, is {quoted(value)}"
        )
    return int(value) / 1000


def parse_accept(headers: Mapping[str, str]) -> Encoding | None:
    """The binary encoding that `Accept` prefers to JSON; None if there is none.

    The response is JSON if the client likes it as much, or accepts none of the types, instead of a 406.
    Source: RFC 9110, section 12.5.1; only the parameter q counts.
    """
    accept = headers.get("accept")
    if accept is None or not _MAY_BE_BINARY.search(accept):
        return None
    accept = accept.lower()
    qualities = dict(map(_media_range, accept.split(",", _MAX_MEDIA_RANGES)[:_MAX_MEDIA_RANGES]))
    preferred, highest = None, _quality_of("application/json", qualities)
    for encoding, media_type in BINARY_MEDIA_TYPES.items():
        if (quality := _quality_of(media_type, qualities)) > highest:
            preferred, highest = encoding, quality
    return preferred


def _media_range(text: str) -> tuple[str, float]:
    """A media range and its quality: 1 if there is none, 0 if it cannot be parsed."""
    media_range, *parameters = text.split(";")
    for parameter in parameters:
        if parameter.strip().startswith("q"):
            match = _QUALITY.fullmatch(parameter)
            return media_range.strip(), float(match[1]) if match else 0.0
    return media_range.strip(), 1.0


def _quality_of(media_type: str, qualities: Mapping[str, float]) -> float:
    """The quality of the most specific range that includes the type."""
    for media_range in (media_type, "application/*", "*/*"):
        if media_range in qualities:
            return qualities[media_range]
    return 0.0


def response_headers(embedded: Embedded) -> dict[str, str]:
    """The headers for inputs that were cut, split or token ids; empty if all were texts and embedded whole."""
    headers = {}
    if embedded.num_truncated:
        headers["x-vecd-truncated"] = str(embedded.num_truncated)
    if embedded.num_chunked:
        headers["x-vecd-chunked"] = str(embedded.num_chunked)
    if embedded.sources != _TEXTS and (vocabularies := sorted(x.value for x in embedded.sources - _TEXTS)):
        headers["x-vecd-token-ids"] = ", ".join(vocabularies)
    return headers
