"""The check of a response of embeddings, for little CPU.

Owns the reading of each encoding and its shortcuts: a JSON body is parsed only if counting bytes is not enough.
Opens no socket. Called by `vecd.client.bench.stream`.
"""

import ast
import functools
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import orjson

from vecd.client.connection import BadResponse, ServerResponse

_TOTAL_TOKENS = re.compile(rb'"total_tokens"\s*:\s*(\d+)')
# `usage` is the last field of every server seen, and this is more than any of them writes there.
_TAIL_BYTES = 256
_FLOAT32_BYTES = 4
_NPY_MAGIC = b"\x93NUMPY"
_NPY_ITEM = re.compile(r"[<>=|][fiu](\d+)")


class Receipt(NamedTuple):
    """What a good response contains."""

    num_embeddings: int
    num_tokens: int
    """0 when the server does not say."""


ReadResponse: TypeAlias = Callable[[ServerResponse, int], Receipt]
"""Checks that a response of status 200 has an embedding for each of `num_texts` texts, and counts its tokens. Raises
BadResponse when it has not."""


def read_json(response: ServerResponse, num_texts: int) -> Receipt:
    """OpenAI's JSON, with any encoding of the embeddings."""
    body = response.body
    usage = _TOTAL_TOKENS.search(body, max(0, len(body) - _TAIL_BYTES))
    # Once per item, and in nothing else: no value of such a response can hold a quote followed by a colon.
    if usage is not None and body.count(b'"embedding":') == num_texts:
        return Receipt(num_texts, int(usage[1]))
    return _parse_json(body, num_texts)


def _parse_json(body: bytes, num_texts: int) -> Receipt:
    """Parse the whole response, of a server that writes it in another order or spacing."""
    try:
        fields: dict[str, Any] = orjson.loads(body)
        vectors = [item["embedding"] for item in fields["data"]]
        num_tokens = int((fields.get("usage") or {}).get("total_tokens", 0))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise BadResponse("not an OpenAI-shaped list of embeddings") from error
    if len(vectors) != num_texts or not all(vectors):
        raise BadResponse(f"{len(vectors)} embeddings for {num_texts} texts")
    return Receipt(num_texts, num_tokens)


def read_bytes(response: ServerResponse, num_texts: int) -> Receipt:
    """Bare float32 rows of one length. Without the dimensions in a header, any length that fits is accepted."""
    body = response.body
    if body[:1] == b"{":
        with suppress(ValueError):
            orjson.loads(body)
            raise BadResponse("JSON instead of bytes")  # from a server that does not know this encoding
    row_bytes = _FLOAT32_BYTES * (response.num_dimensions or len(body) // (_FLOAT32_BYTES * num_texts))
    if not body or len(body) != num_texts * row_bytes:
        raise BadResponse(f"{len(body)} bytes are not {num_texts} rows of float32")
    return Receipt(num_texts, response.num_tokens or 0)


def read_npy(response: ServerResponse, num_texts: int) -> Receipt:
    """A NumPy file with a row for each text."""
    body = response.body
    if not body.startswith(_NPY_MAGIC) or len(body) < 12:
        raise BadResponse("not a NumPy file")
    start = 10 + int.from_bytes(body[8:10], "little") if body[6] == 1 else 12 + int.from_bytes(body[8:12], "little")
    num_rows, row_bytes = _read_npy_header(body[:start])
    if num_rows != num_texts:
        raise BadResponse(f"{num_rows} embeddings for {num_texts} texts")
    if len(body) != start + num_rows * row_bytes:
        raise BadResponse(f"{len(body) - start} bytes for {num_rows} rows of {row_bytes}")
    return Receipt(num_texts, response.num_tokens or 0)


@functools.lru_cache(maxsize=64)
def _read_npy_header(header: bytes) -> tuple[int, int]:
    """Rows, and bytes of each. The headers of one server are alike, so each is parsed once."""
    try:
        fields = ast.literal_eval(header[header.index(b"{") :].decode("latin-1").strip())
        num_rows, dim = fields["shape"]
        item = _NPY_ITEM.fullmatch(fields["descr"])
        if item is None or not (isinstance(num_rows, int) and isinstance(dim, int) and num_rows > 0 and dim > 0):
            raise ValueError(header)
    except (ValueError, SyntaxError, LookupError, TypeError, MemoryError, RecursionError) as error:
        raise BadResponse("not a NumPy file of rows") from error
    return num_rows, dim * int(item[1])


READERS: dict[str, ReadResponse] = {
    "base64": read_json,
    "float": read_json,
    "bytes": read_bytes,
    "npy": read_npy,
}
"""By encoding. The keys are all encodings."""
