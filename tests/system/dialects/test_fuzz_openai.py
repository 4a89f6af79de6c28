"""Whatever is sent to the embeddings API, as fields, as headers or as a whole request, is answered as it is declared.

Short by default; with VECD_SOAK set, for minutes.
"""

import re
import socket
from collections.abc import Mapping
from contextlib import closing
from http.client import HTTPResponse
from typing import Any
from urllib.parse import unquote_to_bytes

import orjson
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.asking import ask, read_in_pieces
from tests.support.soak.form import LONG
from vecd.gateway.api.operation import Operation
from vecd.gateway.dialects.openai import EMBEDDINGS
from vecd.gateway.dialects.vllm import DIALECT as VLLM
from vecd.gateway.errors import ApiError, BadRequest

TIMEOUT_S = 60.0
pytestmark = pytest.mark.timeout(3600 if LONG else 240)
SECRET = "S3cr3t"
STATUSES = {200, 400, 401, 403, 404, 405, 408, 413, 415, 429, 431, 501, 503, 505}
BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "uint8": 8, "binary": 1, "ubinary": 1}
"""Of an element in an answer without JSON."""
POOLING = VLLM.operations["POST /pooling"]
FIELDS = tuple(field.name for field in EMBEDDINGS.fields)

_SLOW_IS_NO_MATTER = [HealthCheck.too_slow, HealthCheck.data_too_large]

texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    st.sampled_from([SECRET, "", "[SEP] hi [CLS]", "\x00", "\u202e", "😀" * 40, "a" * 3000, "漢" * 3000]),
)
numbers = st.one_of(
    st.integers(), st.sampled_from([0, -1, 101, 102, 2**31, 2**63 - 1, 2**64 - 1]), st.floats(allow_nan=False)
).filter(lambda number: abs(number) < 2**64 and number >= -(2**63))
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
json_values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=10,
)
inputs = st.one_of(
    texts,
    st.lists(texts, max_size=6),
    st.lists(st.integers(0, 40_000), max_size=6),
    st.lists(st.lists(st.integers(0, 30_000), max_size=6).map(lambda ids: [101, *ids, 102]), max_size=4),
    st.lists(st.one_of(texts, st.fixed_dictionaries({"text": texts})), max_size=4),
    json_values,
)
likely = {
    "model": st.sampled_from(["m", "minilm:query", "minilm:latest", "gpt", ""]),
    "encoding_format": st.sampled_from(["float", "base64", "bytes", "bytes_only", "npy", "", "hex"]),
    "dimensions": st.sampled_from([384, 128, 0]),
    "output_dimension": st.sampled_from([384, 128]),
    "priority": st.sampled_from(["interactive", "bulk", 0, 7]),
    "input_type": st.sampled_from(["query", "document", "image"]),
    "overflow": st.sampled_from(["error", "truncate", "truncate_left", "chunk"]),
    "truncate": st.sampled_from([True, False, "NONE", "START", "END"]),
    "truncate_prompt_tokens": st.sampled_from([-1, 0, 1, 3, 256, 257]),
    "truncation_side": st.sampled_from(["left", "right"]),
    "output_dtype": st.sampled_from(["float", "float16", "bfloat16", "int8", "uint8", "binary", "ubinary"]),
    "embedding_type": st.sampled_from(["float", "base64", "binary", "ubinary", ["float"], []]),
    "endianness": st.sampled_from(["native", "little", "big"]),
}
flags = ("truncation", "add_special_tokens", "normalize", "normalized", "use_activation", "report")
likely |= dict.fromkeys(flags, st.booleans())
ranges = st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2).map(sorted), min_size=1, max_size=3)
likely["late_chunking"] = st.one_of(
    st.booleans(),
    st.fixed_dictionaries({"max_tokens": st.integers(0, 300)}),
    st.fixed_dictionaries({"ranges": st.one_of(ranges, st.lists(ranges, max_size=3))}),
)


def field_of(name: str) -> st.SearchStrategy[tuple[str, Any]]:
    usual = likely.get(name, texts)
    return st.tuples(st.just(name), st.one_of(usual, usual, json_values))


options = st.lists(st.one_of([field_of(name) for name in FIELDS if name != "input"]), max_size=4).map(dict)
bodies = st.tuples(inputs, options).map(lambda drawn: {"input": drawn[0], **drawn[1]})
header_values = st.one_of(
    st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=40),
    st.sampled_from(["1", "0", "bulk", "application/octet-stream", "application/x-npy;q=0.1, */*;q=0"]),
    st.sampled_from(["9" * 9000, "gzip"]),
)
OUR_HEADERS = ("accept", "x-vecd-priority", "x-vecd-timeout-ms", "authorization", "content-type", "x-request-id",
               "content-encoding", "origin", "expect", "x-api-key")  # fmt: skip
header_names = st.one_of(st.sampled_from(OUR_HEADERS), st.from_regex(r"[A-Za-z0-9-]{1,20}", fullmatch=True))
# What frames a request, and would make another of it.
headers_of_requests = st.dictionaries(header_names, header_values, max_size=4).map(
    lambda headers: {
        name: value
        for name, value in headers.items()
        if name.lower() not in {"host", "content-length", "transfer-encoding", "connection", "upgrade"}
    }
)


operations = st.sampled_from([EMBEDDINGS, POOLING])


def outcome(operation: Operation, fields: Any, in_pieces: bool) -> Any:
    """What comes of a body of these fields, if it were small, or large."""
    try:
        body = read_in_pieces(operation, fields, **BOUNDS) if in_pieces else orjson.loads(orjson.dumps(fields))
        request = ask(operation, body).request
    except BadRequest:
        return "refused"
    return [item if isinstance(item, str) else [*item] for item in request.inputs], request[1:]


BOUNDS = {"max_items": 4, "max_chars": 10_000, "max_ids": 10_000, "window_bytes": 24}


@settings(max_examples=5000 if LONG else 150, deadline=None, suppress_health_check=_SLOW_IS_NO_MATTER)
@given(operations, bodies, json_values, st.sampled_from(FIELDS))
def test_a_large_body_is_taken_or_refused_as_a_small_one(operation, fields, value, name):
    for given_fields in (fields, {**fields, name: value}):
        assert outcome(operation, given_fields, in_pieces=True) == outcome(operation, given_fields, in_pieces=False)


# --- over HTTP --------------------------------------------------------------------------------------------------


def exchange(port: int, head: bytes, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
    """Send a request on a connection of its own. Raises TimeoutError when no whole answer comes."""
    with closing(socket.create_connection(("127.0.0.1", port), TIMEOUT_S)) as connection:
        connection.settimeout(TIMEOUT_S)
        connection.sendall(head + body)
        with closing(HTTPResponse(connection, method=head.split(b" ", 1)[0].decode("latin-1"))) as answer:
            answer.begin()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def head_of(method: str, target: bytes, headers: Mapping[str, str], num_body_bytes: int) -> bytes:
    lines = [f"{name}: {value}" for name, value in headers.items()]
    lines += ["Host: test", f"Content-Length: {num_body_bytes}", "Connection: close"]
    return method.encode() + b" " + target + b" HTTP/1.1\r\n" + "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


def assert_is_declared(status: int, headers: Mapping[str, str], body: bytes, may_time_out: bool) -> None:
    assert status in STATUSES
    assert status != 503 or may_time_out
    assert "x-request-id" in headers
    if status >= 400:
        answer = orjson.loads(body)
        assert set(answer) == {"error", "detail"}
        error = answer["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert (error["type"] == "invalid_request_error") == (status < 429 or status == 431)
        assert error["param"] != "input" or SECRET not in error["message"]
    if status in {429, 503}:
        assert int(headers["retry-after"]) >= 1


def assert_is_declared_by_tei(status: int, headers: Mapping[str, str], body: bytes, may_time_out: bool) -> None:
    assert status in STATUSES | {422, 424}
    assert status != 503 or may_time_out
    assert "x-request-id" in headers
    if status >= 400:
        error = orjson.loads(body)
        assert set(error) == {"error", "error_type"}
        assert SECRET not in error["error"]


def assert_has_a_row_each(fields: Any, headers: Mapping[str, str], body: bytes) -> None:
    value = fields["input"]
    num_rows = len(value) if isinstance(value, list) and not isinstance(value[0], int) else 1
    if isinstance(late := fields.get("late_chunking"), dict):
        chunks = orjson.loads(body)["data"]
        assert [chunk["index"] for chunk in chunks] == [*range(len(chunks))]
        assert {chunk["input"] for chunk in chunks} == {*range(num_rows)}
        lists = late.get("ranges", [])
        assert not lists or len(chunks) == (len(lists) if isinstance(value, str) else sum(map(len, lists)))
    elif headers["content-type"] == "application/json":
        assert len(orjson.loads(body)["data"]) == num_rows
    elif headers["content-type"] == "application/octet-stream":
        dim = int(headers["x-vecd-dimensions"])
        assert len(body) == num_rows * BITS[headers["x-vecd-dtype"]] * dim // 8
    else:
        assert body.startswith(b"\x93NUMPY")


@settings(max_examples=3000 if LONG else 60, deadline=None, suppress_health_check=_SLOW_IS_NO_MATTER)
@given(fields=bodies, headers=headers_of_requests, num_blanks=st.sampled_from([0, 0, 0, 70_000]))
@example(fields={"input": "a"}, headers={"x-vecd-timeout-ms": "1"}, num_blanks=0)
@example(fields={"input": [101, 2**31, 102]}, headers={}, num_blanks=70_000)
@example(
    fields={"input": ["a b", "c"], "late_chunking": {"ranges": [[[0, 1], [0, 3]], [[0, 1]]]}},
    headers={},
    num_blanks=70_000,
)
def test_any_embeddings_request_is_answered_as_declared(dummy, fields, headers, num_blanks):
    """Blanks make a large body of a small one, which is parsed in another way."""
    body = b" " * num_blanks + orjson.dumps(fields)
    status, response_headers, answer = exchange(
        dummy.port, head_of("POST", b"/v1/embeddings", headers, len(body)), body
    )
    may_time_out = "x-vecd-timeout-ms" in map(str.lower, headers)
    assert_is_declared(status, response_headers, answer, may_time_out)
    if status == 200:
        assert_has_a_row_each(fields, response_headers, answer)


@settings(max_examples=3000 if LONG else 50, deadline=None, suppress_health_check=_SLOW_IS_NO_MATTER)
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"]),
    target=st.one_of(
        st.sampled_from([b"/v1/embeddings", b"/v1/models", b"/health", b"/live", b"/v1/models/all-MiniLM-L6-v2", b"/"]),
        # Hypothesis tries words of the product's code, and "/pooling" is another dialect's. "/POOLING" is not.
        st.binary(max_size=20).map(lambda path: b"/" + bytes(byte for byte in path.upper() if 0x20 < byte < 0x7F)),
        st.binary(max_size=8).map(lambda path: b"/v1/models/" + b"".join(b"%%%02x" % byte for byte in path)),
    ),
    headers=headers_of_requests,
    body=st.one_of(st.binary(max_size=200), bodies.map(orjson.dumps)),
)
def test_any_request_is_answered_as_declared(dummy, method, target, headers, body):
    status, response_headers, answer = exchange(dummy.port, head_of(method, target, headers, len(body)), body)
    if method == "HEAD":
        assert (status in STATUSES, answer) == (True, b"")
    elif status != 204:
        # What is at "/" is text-embeddings-inference's.
        path = unquote_to_bytes(re.split(rb"[?#]", target)[0])
        assert_declared = assert_is_declared if path.strip(b"/") else assert_is_declared_by_tei
        assert_declared(status, response_headers, answer, "x-vecd-timeout-ms" in map(str.lower, headers))


@pytest.mark.parametrize("size", [10, 80_000])
@pytest.mark.parametrize(
    "body",
    [b"\xef\xbb\xbf{}", b"\xff", b'{"input":"\\ud800"}', b'{"input":1e999}', b'{"input":NaN}', b"[" * 5000, b"", b"   ",
     b'{"input":"a"}}', b'{"input":"a","input":5}', b'{"input":' + b"[" * 1000 + b"]" * 1000 + b"}"],
)  # fmt: skip
def test_a_hostile_body_is_a_bad_request(dummy, body, size):
    padded = body.ljust(size)
    status, headers, answer = exchange(dummy.port, head_of("POST", b"/v1/embeddings", {}, len(padded)), padded)
    assert_is_declared(status, headers, answer, may_time_out=False)
    assert status == 400


def test_every_error_is_in_the_table():
    """So that no status goes out that is not declared here, but for our own failure."""
    kinds = [ApiError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    # 424: text-embeddings-inference's alone; 412: for those who demand an identity.
    assert {kind.status for kind in kinds} <= STATUSES | {412, 424, 500}
