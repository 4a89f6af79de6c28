"""Golden files of the dialects: requests as they go over the wire, and what a server without a model answers to them.

Owns their format, and the comparison. A file holds a list of exchanges; `VECD_WRITE_GOLDEN=1` writes the answers anew,
which is then read as a diff like any other change. Long lists of numbers and long strings are kept as a digest. Other
tests compare vectors with the real model's; here it is the shape that counts, to the last byte.
"""

import hashlib
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import httpx
from jsonschema_rs import validator_for

from vecd.gateway.api.operation import Dialect

FOLDER = Path(__file__).parent / "goldens"
_OF_SEVERAL = re.compile(r"\. Models of this server that can: [^\"]*")
_MAX_NUMBERS, _MAX_CHARS = 8, 400
_HEADERS = ("content-type", "retry-after", "allow")
"""And all that begin with x-, but for the ids and times."""
_VOLATILE = {
    "x-request-id", "x-compute-time", "x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time",
}  # fmt: skip


def exchanges(dialect: str) -> list[dict[str, Any]]:
    """Of `goldens/<dialect>.json`: each has a "name", a "request" and the "answer" that is expected."""
    return json.loads((FOLDER / f"{dialect}.json").read_text(encoding="utf-8"))


def check(dialect: str, url: str, volatile: set[str]) -> None:
    """Replay all exchanges of a dialect. `volatile`: keys and headers whose values, wherever they are, differ from time
    to time, or with the versions of libraries. The files are of servers of one model: of one of several (`/m/NAME`),
    what names the model is not compared."""
    expected = exchanges(dialect)
    given = [{**exchange, "answer": _answer(url, exchange["request"], volatile)} for exchange in expected]
    if "/m/" in url:
        given, expected = _without_names(given), _without_names(expected)
    if os.environ.get("VECD_WRITE_GOLDEN"):
        text = json.dumps(given, indent=1, ensure_ascii=False) + "\n"
        (FOLDER / f"{dialect}.json").write_text(text, encoding="utf-8")
        return
    for ours, theirs in zip(given, expected, strict=True):
        assert _is_same(ours, theirs), f"{dialect}: {theirs['name']}: {ours} instead of {theirs}"


def _without_names(value: Any) -> Any:
    match value:
        case dict():
            names = {"model", "x-vecd-model", "x-vecd-identity"}
            return {key: _without_names(item) for key, item in value.items() if key not in names}
        case list():
            return [_without_names(item) for item in value]
        case str():
            return _OF_SEVERAL.sub("", value)
    return value


def _is_same(ours: Any, theirs: Any) -> bool:
    """Equal, but for the rounding of sums, which differs among processors."""
    match ours, theirs:
        case float(), float():
            return math.isclose(ours, theirs, rel_tol=1e-5)
        case dict(), dict():
            return ours.keys() == theirs.keys() and all(_is_same(ours[key], theirs[key]) for key in ours)
        case list(), list():
            return len(ours) == len(theirs) and all(map(_is_same, ours, theirs))
    return bool(ours == theirs)


def check_document(url: str, dialect: Dialect) -> None:
    """What is answered to a dialect's exchanges is what its schemas say; so is what was asked, where it was granted."""
    with httpx.Client(base_url=url, timeout=30) as client:
        for exchange in exchanges(dialect.name):
            request = exchange["request"]
            answer = client.request(
                request["method"], request["path"], headers=request.get("headers"), content=_content(request)
            )
            operation = dialect.operations.get(f"{request['method']} {request['path']}")
            if not answer.headers["content-type"].startswith("application/json"):
                continue
            if answer.status_code >= 400:
                _validate(dialect.error, answer.json(), exchange["name"])
            elif operation is not None:
                _validate(operation.response, answer.json(), exchange["name"])
                if isinstance(request.get("body"), dict):
                    _validate(operation.fields.schema(), request["body"], exchange["name"])


def _validate(schema: dict[str, Any], value: Any, name: str) -> None:
    wrong = [f"{error.instance_path}: {error.message[:200]}" for error in validator_for(schema).iter_errors(value)]
    assert not wrong, f"{name}: {wrong}"


def _content(request: dict[str, Any]) -> str | None:
    body = request.get("body")
    return None if body is None else body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)


def _answer(url: str, request: dict[str, Any], volatile: set[str]) -> dict[str, Any]:
    """`request`: "method", "path", and if given "headers" and "body", which is JSON, or a string sent as it is."""
    answer = httpx.request(
        request["method"], url + request["path"], headers=request.get("headers"), content=_content(request), timeout=30
    )
    headers = {
        name: "$volatile" if name in volatile else value
        for name, value in sorted(answer.headers.items())
        if (name in _HEADERS or name.startswith("x-")) and name not in _VOLATILE
    }
    return {"status": answer.status_code, "headers": headers, "body": _compact(_body(answer), volatile)}


def _body(answer: httpx.Response) -> Any:
    if answer.headers.get("content-type", "").startswith("application/json"):
        return json.loads(answer.content)
    if answer.headers.get("content-type", "").startswith("text/"):
        return answer.text
    return {"$bytes": len(answer.content), "$sha256": _digest(answer.content)}


def _compact(value: Any, volatile: set[str]) -> Any:
    match value:
        case dict():
            return {key: "$volatile" if key in volatile else _compact(item, volatile) for key, item in value.items()}
        case list() if len(value) > _MAX_NUMBERS and all(type(item) in (int, float) for item in value):
            return {"$numbers": len(value), "$sha256": _digest(json.dumps(value).encode())}
        case list():
            return [_compact(item, volatile) for item in value]
        case str() if len(value) > _MAX_CHARS:
            return {"$chars": len(value), "$sha256": _digest(value.encode())}
    return value


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
