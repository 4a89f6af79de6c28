"""How many documents a second a server embeds: a few seconds to find the load that it needs, and then the measurement.

Owns the texts' length, which is fitted to the wanted tokens, and the number of requests at a time. Sends with
`vecd bench`'s own loops, and reads no flag. Called by `vecd.client.plan.command`.
"""

import base64
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import orjson

from vecd.client.bench.command import INTERRUPTED, run_loads
from vecd.client.bench.load import Load, RequestShape, Unreachable, render_requests
from vecd.client.bench.result import RunResult
from vecd.client.bench.texts import Lengths, draw_texts
from vecd.client.connection import BadResponse, ServerResponse, Target, connect, name_failure, render_request

_PATH = "/v1/embeddings"
_TIMEOUT_S = 120.0
_NUM_PROBES, _PROBED_TOKENS = 16, 16_384
_NUM_FITS = 4
_TOKENS_PER_WORD = 1.3
"""Of English in the usual vocabularies, to begin with."""
_FITTED = 0.01
"""Error of the tokens at which the length is not fitted further."""
_NEAR = 0.15
"""With a larger error, the model does not read as many tokens."""
_SEARCH_S = 2.0
_NUM_SEARCHES = 4
_WORK_S = 1.0
"""Of the server's work that is under way: it never waits for this program."""
_FIRST_TOKENS = 2048
"""Under way at first, in at most `_FIRST_IN_FLIGHT` documents."""
_FIRST_IN_FLIGHT, _MAX_IN_FLIGHT = 16, 16_384
_ENOUGH = 1.5
"""If the load that the measured rate asks for is not so many times the present one, the present one is enough."""
_MAX_TEXTS_PER_REQUEST, _MAX_CLIENTS = 64, 256
_MAX_TEXTS = 65_536
_MAX_TEXTS_BYTES = 1 << 27


class MeasureFailed(Exception):
    """Raised when a rate cannot be measured. The message says why in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    documents_per_s: float
    """Of documents with the wanted tokens, or with as many of them as the model reads."""
    tokens_per_s: float
    document_tokens: float
    """That the model read of each text, on average."""
    bytes_per_token: float
    """UTF-8 of the texts."""
    is_cut: bool
    """The model reads fewer tokens than wanted."""
    dimensions: int
    model: str
    seconds: float
    in_flight: int
    """Documents under way at a time."""


async def measure(
    target: Target, *, num_tokens: int, seconds: float, api_key: str | None, show: Callable[[str], None]
) -> Measurement:
    """Measure for `seconds`, after some 10 s at most. Raises MeasureFailed."""
    probe = await _fit(target, num_tokens, api_key)
    shape = RequestShape(path=_PATH, lengths=Lengths(probe.num_words), api_key=api_key)
    show("finding the load")
    in_flight = max(2, min(_FIRST_IN_FLIGHT, _FIRST_TOKENS // num_tokens))
    for _ in range(_NUM_SEARCHES):
        found = await _run(_load(target, shape, in_flight, probe, 0.5, _SEARCH_S), show)
        needed = min(_MAX_IN_FLIGHT, int(found.num_texts / max(found.elapsed_s, _SEARCH_S) * _WORK_S))
        if needed < _ENOUGH * in_flight:
            break
        in_flight = needed
    result = await _run(_load(target, shape, in_flight, probe, 1.0, seconds), show)
    rate = _rate(result)
    read = result.num_tokens / result.num_texts
    is_cut = read < num_tokens * (1 - _NEAR)
    return Measurement(
        documents_per_s=rate if is_cut else rate * read / num_tokens,
        tokens_per_s=rate * read,
        document_tokens=read,
        bytes_per_token=probe.bytes_per_token,
        is_cut=is_cut,
        dimensions=probe.dimensions,
        model=probe.model,
        seconds=result.elapsed_s,
        in_flight=in_flight,
    )


@dataclass(frozen=True, slots=True)
class _Probe:
    """Texts that have about the wanted tokens."""

    num_words: int
    bytes_per_token: float
    text_bytes: float
    dimensions: int
    model: str


async def _fit(target: Target, num_tokens: int, api_key: str | None) -> _Probe:
    """Find the words of a text that make `num_tokens` tokens."""
    guess = num_words = max(1, round(num_tokens / _TOKENS_PER_WORD))
    num_texts = max(2, min(_NUM_PROBES, _PROBED_TOKENS // num_tokens))
    words_before, found_before = num_words, 0.0
    for _ in range(_NUM_FITS):
        answer = await _ask(target, draw_texts(num_texts, Lengths(num_words), seed=1), api_key)
        try:
            found = answer["usage"]["prompt_tokens"] / num_texts
            dimensions, model = len(base64.b64decode(answer["data"][0]["embedding"])) // 4, str(answer["model"])
        except (LookupError, TypeError, ValueError) as error:
            raise MeasureFailed(f"{target} does not answer as OpenAI's embeddings: {type(error).__name__}") from error
        if not found or not dimensions:
            raise MeasureFailed(f"{target} counts no tokens, or has vectors without dimensions")
        if abs(found / num_tokens - 1) <= _FITTED:
            break
        if num_words > words_before and found <= found_before * (1 + _FITTED):
            num_words = guess  # longer texts have no more tokens: the model reads no more of them
            break
        words_before, found_before = num_words, found
        num_words = max(1, round(num_words * num_tokens / found))
    text_bytes = sum(len(text.encode()) for text in draw_texts(_NUM_PROBES, Lengths(num_words), seed=1)) / _NUM_PROBES
    read = num_tokens if found >= num_tokens * (1 - _NEAR) else num_words * _TOKENS_PER_WORD
    return _Probe(num_words, text_bytes / read, text_bytes, dimensions, model)


async def _ask(target: Target, texts: list[str], api_key: str | None) -> Any:
    """The JSON of the response. Raises MeasureFailed unless its status is 200."""
    body = orjson.dumps({"input": texts, "encoding_format": "base64"})
    try:
        connection = await connect(target, _TIMEOUT_S)
        response = await connection.exchange(render_request(target, _PATH, body, api_key=api_key), _TIMEOUT_S)
        connection.close()
    except (OSError, TimeoutError, BadResponse) as error:
        raise MeasureFailed(f"{target} cannot be measured: {str(error) or name_failure(error)}") from error
    if response.status != 200:
        raise MeasureFailed(f"{target} refuses to embed: {response.status}, {_message_of(response)}")
    try:
        return orjson.loads(response.body)
    except ValueError as error:
        raise MeasureFailed(f"{target} does not answer in JSON") from error


def _message_of(response: ServerResponse) -> str:
    try:
        return str(orjson.loads(response.body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return response.body[:200].decode(errors="replace")


def _load(
    target: Target, shape: RequestShape, in_flight: int, probe: _Probe, warmup_s: float, duration_s: float
) -> Load:
    """`in_flight` documents at a time, in requests that are several, so that one is parsed while others are computed.
    The texts differ: a server computes identical ones once that wait at the same time."""
    texts_per_request = max(1, min(_MAX_TEXTS_PER_REQUEST, in_flight // 8))
    clients = max(1, min(_MAX_CLIENTS, round(in_flight / texts_per_request)))
    shape = replace(shape, texts_per_request=texts_per_request)
    most = min(_MAX_TEXTS, int(_MAX_TEXTS_BYTES / probe.text_bytes)) // texts_per_request
    requests = render_requests(target, shape, max(clients + 1, min(most, 4 * clients + 256)))
    return Load(
        target=target,
        shape=shape,
        requests=requests,
        clients=clients,
        warmup_s=warmup_s,
        duration_s=duration_s,
        timeout_s=_TIMEOUT_S,
    )


async def _run(load: Load, show: Callable[[str], None]) -> RunResult:
    try:
        [result] = await run_loads([load], lambda result: None, show)
    except Unreachable as error:
        raise MeasureFailed(str(error)) from error
    if result.ended_early == INTERRUPTED:
        raise KeyboardInterrupt
    if result.ended_early is not None:
        raise MeasureFailed(f"the measurement ended early: {result.ended_early}")
    for kind, num in result.errors.items():
        detail = result.first_details.get(kind, "")
        raise MeasureFailed(f"{num} requests failed: {kind} {detail}".rstrip())
    return result


def _rate(result: RunResult) -> float:
    """Texts a second. Raises MeasureFailed if none was embedded."""
    if not result.num_texts or result.elapsed_s <= 0:
        raise MeasureFailed(f"no response within {result.elapsed_s:.0f} s: give --measure-s more")
    return result.num_texts / result.elapsed_s
