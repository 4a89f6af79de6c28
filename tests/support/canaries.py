"""Canaries: words, ids, vectors and keys that callers send, and that a server may never write down.

Owns what is sent (`plant`), every spelling that it could be written in, and the search (`Secrets.find_in`). Knows no
process: `serving.running_server` plants before each server's end and searches what it has left.
"""

import base64
import hashlib
import json
import os
import re
import socket
import ssl
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

WORD = "zqvcanary"
"""Stands in texts. Another word follows it where a search has to tell them apart."""
WORD_IDS = (1062, 4160, 25465, 5162, 2854)
"""What WORD is for the bundled model's tokenizer, first in a text or after a blank."""
IDS = (101, 21423, 19987, 27411, 23130, 102)
"""Ids as a caller might send them: framed as the bundled model's are."""
KEY = "vck-0canary0-5c1d8f5e2a7b"
"""A key that no server knows."""
_TEXT = f"{WORD}text of a caller, for nobody else"
_REPEATED = f"{WORD}word"
"""Stands where a right answer has the text itself: labels, and the words that a model finds in a text."""
_FIELD, _MODEL, _PATH, _QUERY, _HEADER = (WORD + kind for kind in ("field", "model", "path", "query", "header"))
_FORBIDDEN_IN_ANSWERS = (f"{WORD}text", KEY)
"""Not even the caller's own error may quote these. A model's name or a wrong choice it may name."""

_PATIENCE_S = 2.0
"""A server that answers nothing for so long hangs, which its test has wanted."""
_MIN_KEY_CHARACTERS = 12
"""A shorter key stands in a log by chance."""
_MAX_FILE_BYTES = 4 * 2**20
_NUM_FLOATS, _NUM_DIGITS, _DIGEST_CHARACTERS = 6, 7, 12
"""With 5 digits, two floats of a vector stood by chance among the hundreds of figures of /stats."""


@dataclass
class Secrets:
    """What callers of one server have sent and received."""

    keys: list[str] = field(default_factory=list)
    """That the server was given; the first is sent with each request."""
    id_lists: list[Sequence[int]] = field(default_factory=lambda: [WORD_IDS[1:], IDS[1:-1]])
    vectors: list[Sequence[float]] = field(default_factory=list)

    def find_in(self, content: bytes) -> list[str]:
        """The lines of `content` that have a secret in some spelling, each with what it is."""
        found = [(needle, what) for what, needle in self._needles() if needle in content]
        found += [(match[0], "token ids") for ids in self.id_lists for match in _ids_pattern(ids).finditer(content)]
        lines = [f"{what}: {_line_of(content, needle)}" for needle, what in found]
        return lines + self._find_vectors(content)

    def _needles(self) -> Iterator[tuple[str, bytes]]:
        for word in (WORD, _TEXT, KEY, *self.keys):
            yield from _spellings(word.encode(), word)
        for vector in self.vectors:
            yield from _spellings(struct.pack(f"<{_NUM_FLOATS}f", *vector[:_NUM_FLOATS]), "a vector")

    def _find_vectors(self, content: bytes) -> list[str]:
        """Lines with several of a vector's first floats as decimal numbers: one alone may be any figure."""
        found = []
        for vector in self.vectors:
            numbers = [_digits(x) for x in vector[:_NUM_FLOATS]]
            found += [
                f"a vector: {line[:200]!r}"
                for line in content.splitlines()
                if sum(plain in line or scientific in line for plain, scientific in numbers) >= 2
            ]
        return found


def _spellings(secret: bytes, name: str) -> Iterator[tuple[str, bytes]]:
    yield name, secret
    yield f"{name} in hexadecimal", secret.hex().encode()
    yield f"SHA-256 of {name}", hashlib.sha256(secret).hexdigest()[:_DIGEST_CHARACTERS].encode()
    for shift in range(3):
        # However many bytes stand before it; what shares a character with them, or with what follows, is cut off.
        shifted = base64.b64encode(bytes(shift) + secret)
        start = -(-shift * 8 // 6)
        yield f"{name} in base64", shifted[start : (shift + len(secret)) * 8 // 6]


def _ids_pattern(ids: Sequence[int]) -> re.Pattern[bytes]:
    return re.compile(rb"\b" + rb"\D{1,3}".join(b"%d" % number for number in ids) + rb"\b")


def _digits(x: float) -> tuple[bytes, bytes]:
    """The first significant digits, cut and not rounded, as they stand in decimal and in scientific spellings of it."""
    whole, _, decimals = f"{abs(x):.12f}".partition(".")
    zeros = len(decimals) - len(decimals.lstrip("0"))
    scientific = f"{abs(x):.11e}"[: _NUM_DIGITS + 1]
    return f"{whole}.{decimals[: zeros + _NUM_DIGITS]}".encode(), scientific.encode()


def _line_of(content: bytes, needle: bytes) -> str:
    at = content.index(needle)
    start, end = content.rfind(b"\n", 0, at) + 1, content.find(b"\n", at)
    return repr(content[start : end if end >= 0 else None][:300])


def search_files(secrets: Secrets, paths: Iterable[Path]) -> list[str]:
    """Where in these files a secret stands. Files that have gone meanwhile have none."""
    found = []
    for path in paths:
        with suppress(FileNotFoundError), path.open("rb") as file:
            found += [f"{path.name}: {line}" for line in secrets.find_in(file.read(_MAX_FILE_BYTES))]
    return found


def keys_of(flags: Sequence[str], env: dict[str, str]) -> list[str]:
    """The keys that a server was given on its command line or in its environment, if they are long enough to be told
    from other words."""
    given = [value for flag, value in pairwise(flags) if flag in ("--api-key", "--api-keys")]
    given += [value for name, value in env.items() if name in ("VECD_API_KEY", "VECD_API_KEYS")]
    keys = [part.rpartition("=")[2].strip() for value in given for part in value.split(",")]
    return [key for key in keys if len(key) >= _MIN_KEY_CHARACTERS]


# --- planting ---------------------------------------------------------------------------------------------------


def plant(url: str, secrets: Secrets) -> list[str]:
    """Send the canaries to a server; returns what its answers should not have said.

    Takes tens of milliseconds, some seconds at most, and nothing of a server that is dead. Side effects: vectors that
    were answered are added to `secrets`.
    """
    key = secrets.keys[0] if secrets.keys else None
    requests = list(_requests(key))
    answers = _exchange(url, requests)
    for answer in answers:
        _learn_vectors(answer, secrets)
    wrong = [f"an answer: {word}" for answer in answers for word in _FORBIDDEN_IN_ANSWERS if word.encode() in answer]
    paths = (b"/health", b"/info", b"/metrics", b"/stats")
    others = _exchange(url, [_request(b"GET", path, b"", key) for path in paths])
    return wrong + [f"another caller's answer: {found}" for answer in others for found in secrets.find_in(answer)]


def _learn_vectors(answer: bytes, secrets: Secrets) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 200"):
        with suppress(ValueError, KeyError, TypeError):
            secrets.vectors += [item["embedding"] for item in json.loads(body)["data"]]


_RANKED: dict[str, object] = {"query": _TEXT, "documents": [_TEXT, {"text": _TEXT, _FIELD: _TEXT}]}
_OF_KINDS: dict[str, list[dict[str, object]]] = {
    "/rerank": [
        _RANKED,
        {"query": _TEXT, "texts": [_TEXT, "x"], "raw_scores": _FIELD},
        {**_RANKED, "documents": [_TEXT * 100], "overflow": "error"},
        {**_RANKED, "documents": {_FIELD: _TEXT}},
    ],
    "/v1/rerank": [{**_RANKED, "instruction": _TEXT}, {**_RANKED, "rank_fields": [_FIELD, _TEXT]}],
    "/v2/rerank": [{**_RANKED, "query": {_FIELD: _TEXT}}, {**_RANKED, "documents": [_TEXT, [_TEXT]]}],
    "/score": [{"text_1": _TEXT, "text_2": [_TEXT, "x"]}, {"queries": [_TEXT], "documents": [_TEXT, {_FIELD: _TEXT}]}],
    "/predict": [
        {"inputs": [[_TEXT, _TEXT]]},
        {"inputs": _REPEATED, "ignore_labels": [_FIELD]},
        {"inputs": [{"text": _TEXT, _FIELD: _TEXT}, [_TEXT, {_FIELD: _TEXT}]], "function_to_apply": _FIELD},
    ],
    "/v1/classify": [
        {"input": [_REPEATED, _REPEATED]},
        {"input": [_TEXT], "labels": [_REPEATED, "x"]},
        {"input": [_TEXT], "labels": [_TEXT, {_FIELD: _TEXT}], "temperature": _FIELD},
    ],
    "/pooling": [{"input": _TEXT}, {"input": _TEXT, "task": _FIELD}],
    "/embed_sparse": [{"inputs": [_TEXT, "x"]}, {"inputs": [_TEXT, {_FIELD: _TEXT}], "min_weight": _FIELD}],
    "/v1/embeddings": [
        {"input": [_TEXT, _TEXT], "late_chunking": True},
        {"input": _TEXT, "late_chunking": {"ranges": [[0, 5], [3, 10**6]]}},
        {"input": _TEXT, "late_chunking": {_FIELD: _TEXT}},
        {"input": _TEXT, "output": ["sparse", "multi-vector"], "return_tokens": True},
        {"input": _TEXT, "output": ["sparse", _FIELD], "sparse_format": _FIELD},
    ],
}
"""By path: right and wrong requests for what only models of some kinds have; the others refuse them."""


def _requests(key: str | None) -> Iterator[bytes]:
    """One of each kind of place where a secret can stand."""

    def post(body: object, headers: dict[str, str] | None = None, path: bytes = b"/v1/embeddings") -> bytes:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return _request(b"POST", path, content, key, headers)

    yield post({"input": [_TEXT, "x"], "user": _FIELD, "model": _MODEL})
    yield post({"input": list(IDS)})
    yield post({"input": [list(IDS), _TEXT]})  # of two kinds
    yield post({"input": [*IDS, 10**9]})
    yield post({"input": _TEXT, "encoding_format": _FIELD})
    yield post({"input": _TEXT, "dimensions": _FIELD, "priority": _FIELD})
    yield post({"input": {_FIELD: _TEXT}, "model": 5})
    yield post({_FIELD: _TEXT, "user": [_FIELD], "model": {_FIELD: 1}})
    yield post(b'{"input": ["' + _TEXT.encode())  # cut short
    yield post(b'{"input": "' + _TEXT.encode() + b'\xff\\ud800"}')
    yield post(b'{"input": [' + json.dumps(_TEXT).encode() * 2 + b"]}")
    yield post(b'{"input": [' + b",".join([json.dumps(_TEXT).encode()] * 2000) + b", 5]}")
    for path, bodies in _OF_KINDS.items():
        for body in bodies:
            yield post(body, path=path.encode())
    yield post({"input": "x"}, path=b"/v1/" + _PATH.encode() + b"?input=" + _QUERY.encode())
    yield post({"input": "x"}, path=b"/v1/embeddings?key=" + KEY.encode() + b"&" + _QUERY.encode())
    yield _request(b"GET", b"/v1/models/" + _MODEL.encode(), b"", key)
    yield post({"input": "x"}, {"authorization": f"Bearer {KEY}", "user-agent": _HEADER, "cookie": _HEADER})
    yield post({"input": "x"}, {"x-vecd-priority": _HEADER, "x-api-key": KEY})
    yield post({"input": "x"}, {"x-vecd-timeout-ms": _HEADER, "accept": _HEADER})
    yield post({"input": "x"}, {"content-encoding": _HEADER})
    yield post({"input": "x"}, {_HEADER: _HEADER * 5000})  # too long
    yield _HEADER.encode() + b" / HTTP/1.1\r\n" + KEY.encode() + b"\r\n\r\n"
    yield b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + _TEXT.encode() + b"\r\n"


def _request(method: bytes, path: bytes, body: bytes, key: str | None, headers: dict[str, str] | None = None) -> bytes:
    fields = {"host": "x", "connection": "close", "content-length": str(len(body)), "x-vecd-timeout-ms": "1000"}
    if key is not None:
        fields["authorization"] = f"Bearer {key}"
    fields.update(headers or {})
    lines = [method + b" " + path + b" HTTP/1.1", *(f"{name}: {value}".encode() for name, value in fields.items())]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def _exchange(url: str, requests: Sequence[bytes]) -> list[bytes]:
    """Each request on a connection of its own, all at once; what has come back when the server closes or hangs."""
    with ThreadPoolExecutor(len(requests)) as threads:
        return list(threads.map(partial(_ask, url), requests))


def _ask(url: str, request: bytes) -> bytes:
    answer, gives_up_at = bytearray(), time.monotonic() + _PATIENCE_S
    with suppress(OSError), _connect(url) as connection:
        with suppress(OSError):  # it may be refused before its end
            connection.sendall(request)
        while time.monotonic() < gives_up_at and (data := connection.recv(1 << 20)):
            answer += data
    return bytes(answer)


def _connect(url: str) -> socket.socket:
    """Raises OSError."""
    scheme, _, rest = url.partition(":")
    if scheme == "unix":
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_PATIENCE_S)
        connection.connect(rest)
        return connection
    host, _, port = rest.removeprefix("//").rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE_S)
    if scheme == "https":
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context.wrap_socket(connection)
    return connection


def recent_json_files(folder: Path, since: float) -> list[Path]:
    """JSON files anywhere below `folder` that were written after `since`, by `time.time`."""
    found = []
    for parent, _, names in os.walk(folder):
        for path in (Path(parent) / name for name in names if name.endswith(".json")):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime >= since - 1:
                    found.append(path)
    return found
