"""`vecd.gateway.http.reader`, driven by bytes alone."""

import itertools
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vecd.gateway.errors import (
    ApiError,
    BadRequest,
    HeadersTooLarge,
    HttpVersionNotSupported,
    NotImplementedByServer,
    PayloadTooLarge,
    UnsupportedEncoding,
)
from vecd.gateway.http import reader as http1
from vecd.gateway.http.reader import ReadState, RequestReader, encode_response
from vecd.gateway.request import Coding, HttpRequest, Limits, Response

LIMITS = Limits(max_body_bytes=1000)
HOST = b"Host: x\r\n"
TE = b"Transfer-Encoding: chunked"
CL = b"Content-Length: 5"
CHUNKS = b"5\r\nhello\r\n0\r\n\r\n"


def take_all(reader: RequestReader) -> list[HttpRequest | ApiError]:
    """Every complete request that the reader has, and its refusal to read on."""
    taken: list[HttpRequest | ApiError] = []
    try:
        while (request := reader.next_request()) is not None:
            if reader.state is not ReadState.BODY:
                taken.append(request)
    except ApiError as error:
        taken.append(error)
    return taken


def read(*pieces: bytes, limits: Limits = LIMITS) -> list[HttpRequest | ApiError]:
    reader = RequestReader(limits)
    taken = []
    for piece in pieces:
        reader.feed(piece)
        taken += take_all(reader)
    return taken


def read_one(data: bytes, limits: Limits = LIMITS) -> HttpRequest:
    (request,) = read(data, limits=limits)
    assert isinstance(request, HttpRequest), request
    return request


def refusal_of(*pieces: bytes, limits: Limits = LIMITS) -> ApiError:
    (error,) = read(*pieces, limits=limits)
    assert isinstance(error, ApiError), error
    return error


def comparable(taken: list[HttpRequest | ApiError]) -> list[object]:
    return [(type(item), item.message) if isinstance(item, ApiError) else item for item in taken]


def get(*headers: bytes, line: bytes = b"GET / HTTP/1.1", host: bytes = HOST) -> bytes:
    return line + b"\r\n" + host + b"".join(header + b"\r\n" for header in headers) + b"\r\n"


def post(*headers: bytes, body: bytes = b"", line: bytes = b"POST /v1/embeddings HTTP/1.1") -> bytes:
    return get(*headers, line=line) + body


def chunked(*chunks: bytes, trailers: bytes = b"") -> bytes:
    sent = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return post(b"Transfer-Encoding: chunked", body=sent + b"0\r\n" + trailers + b"\r\n")


# --- what a request becomes ---------------------------------------------------------------------------------------


def test_a_request_with_a_body():
    request = read_one(post(b"Content-Type: text/plain", b"Content-Length: 5", body=b"hello"))
    assert request == HttpRequest(
        method="POST",
        path="/v1/embeddings",
        query=b"",
        headers={"host": "x", "content-type": "text/plain", "content-length": "5"},
        http_minor=1,
        keep_alive=True,
        request_id="not compared",
        body=b"hello",
    )


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"/", "/", b""),
        (b"//v1//embeddings/", "//v1//embeddings/", b""),
        (b"/a?b=1&c=%20", "/a", b"b=1&c=%20"),
        (b"/a?", "/a", b""),
        (b"/a?b?c", "/a", b"b?c"),
        (b"/a#fragment?x", "/a", b""),
        (b"/models/org%2Fname", "/models/org/name", b""),
        (b"/%C3%A9+%25", "/é+%", b""),
        (b"http://host:80/a?b", "/a", b"b"),
        (b"http://host", "/", b""),
        (b"http://host?b/c", "/", b"b/c"),
        (b"HTTPS://[::1]:1/a", "/a", b""),
        (b"/http://host/a", "/http://host/a", b""),
        (b"*", "*", b""),
    ],
)
def test_targets(target, path, query):
    request = read_one(get(line=b"OPTIONS " + target + b" HTTP/1.1"))
    assert (request.path, request.query) == (path, query)


@pytest.mark.parametrize(
    "target",
    [
        *(b"/%", b"/%2", b"/%zz", b"/a%2", b"/%ff", b"/%C3", b"/%00", b"/%0a", b"/%7f", b"/\xc3\xa9", b"a", b"*a"),
        *(b"http:///a", b"http://:80/a", b"http://user@a/", b"http://a:b/", b"http://[::1/", b"http://%zz/"),
        *(b"http://a@b@c/", b"http://a,b/", b"http://a\\b/", b"rtsp://a/b", b"file:///a", b"://a/", b"http:/a"),
        *(b"?a", b"#a", b"http://a#b/", b"http://a#", b"http://"),
    ],
)
def test_targets_that_are_refused(target):
    assert isinstance(refusal_of(get(line=b"GET " + target + b" HTTP/1.1")), BadRequest)


def test_header_names_are_lower_case_and_values_stripped_latin1():
    request = read_one(get(b"X-Empty:", b"X-Blank: ", b"X-Padded: \t a b \t", b"X-Latin: \xe9", b"authorization:"))
    assert request.headers == {
        "host": "x",
        "x-empty": "",
        "x-blank": "",
        "x-padded": "a b",
        "x-latin": "é",
        "authorization": "",
    }


def test_a_repeated_header_is_joined_in_order():
    request = read_one(get(b"Accept: a", b"ACCEPT: b", b"accept: c"))
    assert request.headers["accept"] == "a, b, c"


@pytest.mark.parametrize("own_id", [b"a", b"0-_.Z", b"x" * 128])
def test_a_client_may_name_its_request(own_id):
    assert read_one(get(b"X-Request-Id: " + own_id)).request_id == own_id.decode()


@pytest.mark.parametrize("own_id", [b"", b"x" * 129, b"a b", b"a/b", b"\xe9", b'"a"'])
def test_other_requests_are_named_here_each_differently(own_id):
    names = {read_one(get(b"X-Request-Id: " + own_id)).request_id for _ in range(3)}
    assert len(names) == 3
    assert own_id.decode("latin-1") not in names


@pytest.mark.parametrize(
    ("version", "connection", "keep_alive"),
    [
        (b"1.1", b"", True),
        (b"1.1", b"close", False),
        (b"1.1", b"x, Close", False),
        (b"1.1", b"close, keep-alive", False),
        (b"1.1", b"upgrade", True),
        (b"1.2", b"", True),
        (b"1.0", b"", False),
        (b"1.0", b"x ,\tkeep-alive", True),
        (b"1.0", b"keep-alive, close", False),
        (b"1.0", b"keep-alive\r\nConnection: Close", False),
    ],
)
def test_keep_alive(version, connection, keep_alive):
    request = read_one(get(b"Connection: " + connection, line=b"GET / HTTP/" + version))
    assert (request.http_minor, request.keep_alive) == (min(1, int(version[-1:])), keep_alive)


def test_a_chunked_body_is_put_together():
    assert read_one(chunked(b"he", b"l", b"lo\r\n\r\n")).body == b"hello\r\n\r\n"
    assert read_one(chunked()).body == b""
    assert read_one(post(b"Transfer-Encoding: Chunked", body=b"2;a=b\r\nhi\r\n0;c\r\n\r\n")).body == b"hi"


def test_nothing_of_a_request_leaks_into_the_next():
    first = chunked(b"a", trailers=b"Connection: close, upgrade\r\nUpgrade: x\r\nX-Trailer: y\r\n")
    (one, second) = read(first + post(b"Content-Length: 1", body=b"b"))
    assert isinstance(one, HttpRequest)
    assert one.headers == {"host": "x", "transfer-encoding": "chunked"}, "trailers are dropped"
    assert isinstance(second, HttpRequest)
    assert second.headers == {"host": "x", "content-length": "1"}
    assert second.body == b"b"
    assert second.keep_alive


def test_many_small_chunks_take_no_more_memory_than_their_bytes():
    body = b"".join(b"2\r\n%02x\r\n" % (i % 256) for i in range(20_000))
    reader = RequestReader(Limits(max_body_bytes=1_000_000))
    tracemalloc.start()
    try:
        reader.feed(post(b"Transfer-Encoding: chunked"))
        assert reader.next_request() is not None
        before = tracemalloc.get_traced_memory()[0]
        for at in range(0, len(body), 1000):
            reader.feed(body[at : at + 1000])
            assert reader.next_request() is None
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 3 * 40_000


@pytest.mark.parametrize("body", [b"\r\n\r\n", b"\n", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256))])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_may_hold_anything(body, is_chunked):
    data = chunked(body) if is_chunked else post(b"Content-Length: %d" % len(body), body=body)
    (first, second) = read(data + get())
    assert isinstance(first, HttpRequest)
    assert first.body == body
    assert isinstance(second, HttpRequest)


def test_neither_headers_nor_body_are_in_a_repr():
    request = read_one(post(b"Authorization: Bearer sk-secret", b"Content-Length: 6", body=b"secret"))
    assert "secret" not in repr(request)
    assert "secret" not in repr(Response(200, b"secret"))


# --- what a client may ask for in a head ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expects_continue"),
    [
        (post(b"Expect: 100-continue", b"Content-Length: 5"), True),
        (post(b"expect: 100-Continue", b"Transfer-Encoding: chunked"), True),
        (post(b"Expect: 100-continue", b"Content-Length: 5", line=b"POST / HTTP/1.0"), False),
        (post(b"Expect: something", b"Content-Length: 5"), False),
        (post(b"Content-Length: 5"), False),
    ],
)
def test_expect(data, expects_continue):
    reader = RequestReader(LIMITS)
    reader.feed(data)
    request = reader.next_request()
    assert request is not None
    assert reader.state is ReadState.BODY
    assert request.expects_continue is expects_continue


def test_expect_without_a_body_means_nothing():
    assert read_one(get(b"Expect: 100-continue")).expects_continue is False
    assert read_one(post(b"Expect: 100-continue", b"Content-Length: 0")).expects_continue is False


H2C = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA")


@pytest.mark.parametrize(
    ("framing", "sent", "body"),
    [
        ((b"Content-Length: 5",), b"hello", b"hello"),
        ((b"Transfer-encoding: chunked",), b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", b"hello"),
        ((b"Content-Length: 0",), b"", b""),
        ((), b"", b""),
    ],
)
def test_an_offer_of_h2c_is_ignored_and_the_body_kept(framing, sent, body):
    (first, second) = read(post(*H2C, *framing, body=sent) + get(line=b"GET /next HTTP/1.1"))
    assert isinstance(first, HttpRequest)
    assert (first.body, first.method, first.path, first.keep_alive) == (body, "POST", "/v1/embeddings", True)
    assert isinstance(second, HttpRequest)
    assert second.path == "/next"


# --- events and states --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "coding"),
    [
        ((b"Content-Encoding: identity",), None),
        ((b"Content-Encoding: identity, deflate",), Coding.DEFLATE),
    ],
)
def test_a_coded_body_is_left_as_it_was_sent(headers, coding):
    for request in (
        read_one(post(*headers, b"Content-Length: 5", body=b"hello")),
        read_one(post(*headers, TE, body=b"5\r\nhello\r\n0\r\n\r\n")),
    ):
        assert (request.coding, request.body) == (coding, b"hello")


def test_the_head_is_told_once_and_only_if_the_body_is_outstanding():
    reader = RequestReader(LIMITS)
    for _ in range(2):
        reader.feed(post(b"Content-Length: 3", body=b"a"))
        request = reader.next_request()
        assert request is not None
        assert reader.state is ReadState.BODY
        assert request.path == "/v1/embeddings"
        assert request.body == b""
        assert reader.next_request() is None
        reader.feed(b"b")
        assert reader.next_request() is None
        reader.feed(b"c" + get() + post(b"Content-Length: 1", body=b"d"))
        complete = take_all(reader)
        assert [type(item) for item in complete] == [HttpRequest] * 3
        assert complete[0] is request
        assert request.body == b"abc"


def test_states():
    reader = RequestReader(LIMITS)

    def state_after(data: bytes) -> ReadState:
        reader.feed(data)
        take_all(reader)
        return reader.state

    assert reader.state is ReadState.IDLE
    assert state_after(b"\r\n") is ReadState.IDLE
    assert state_after(b"P") is ReadState.HEAD
    assert state_after(b"OST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r") is ReadState.HEAD
    assert state_after(b"\n") is ReadState.BODY
    assert state_after(b"a") is ReadState.BODY
    assert state_after(b"b") is ReadState.IDLE
    assert state_after(get() + b"G") is ReadState.HEAD
    assert state_after(b"ET") is ReadState.HEAD
    assert state_after(b"\0") is ReadState.CLOSED


def test_a_request_is_read_only_when_asked_for():
    reader = RequestReader(LIMITS)
    reader.feed(get() + get())
    assert reader.num_waiting_bytes == 2 * len(get())
    assert isinstance(reader.next_request(), HttpRequest)
    assert reader.num_waiting_bytes == len(get())
    assert reader.state is ReadState.HEAD
    reader.feed(b"more")
    assert reader.num_waiting_bytes == len(get()) + 4


def test_a_reader_that_has_refused_is_closed():
    reader = RequestReader(LIMITS)
    reader.feed(get() + post(b"Content-Length: 2", body=b"hi") + b"garbage\r\n\r\n" + get())
    assert [type(item) for item in take_all(reader)] == [HttpRequest, HttpRequest, BadRequest]
    assert reader.state is ReadState.CLOSED
    reader.feed(get())
    assert reader.next_request() is None
    assert reader.num_waiting_bytes == 0


def test_the_request_that_is_refused_is_known_once_its_head_is():
    reader = RequestReader(LIMITS)
    reader.feed(post(b"Content-Length: 1001", b"X-Request-Id: mine", line=b"POST /a HTTP/1.1"))
    with pytest.raises(PayloadTooLarge):
        reader.next_request()
    assert reader.request is not None
    assert (reader.request.path, reader.request.request_id) == ("/a", "mine")


@pytest.mark.parametrize("last", [get(b"Connection: close"), get(line=b"GET / HTTP/1.0")])
def test_what_follows_the_last_request_is_dropped(last):
    reader = RequestReader(LIMITS)
    reader.feed(last + b"garbage" + get())
    assert [type(item) for item in take_all(reader)] == [HttpRequest]
    assert reader.state is ReadState.CLOSED
    reader.feed(get())
    assert reader.next_request() is None


def test_empty_lines_before_a_request_are_no_part_of_it():
    taken = read(b"\r\n", b"\r", b"\n\r\n" + get() + b"\r\n\r\n\r\n" + get() + b"\r\n")
    assert [type(item) for item in taken] == [HttpRequest, HttpRequest]


# --- limits -------------------------------------------------------------------------------------------------------


def test_target_limit():
    limits = Limits(max_body_bytes=0, max_target_bytes=20)
    assert read_one(get(line=b"GET /" + b"a" * 19 + b" HTTP/1.1"), limits).path == "/" + "a" * 19
    error = refusal_of(get(line=b"GET /" + b"a" * 10 + b"?" + b"b" * 9 + b" HTTP/1.1"), limits=limits)
    assert isinstance(error, HeadersTooLarge)
    assert "target" in error.message
    assert "20" in error.message
    assert isinstance(refusal_of(b"GET /", *[b"a"] * 23, limits=limits), HeadersTooLarge)


def test_head_limit_is_exact():
    data = get(b"X: " + b"a" * 100)
    assert read_one(data, Limits(max_body_bytes=0, max_head_bytes=len(data)))
    limits = Limits(max_body_bytes=0, max_head_bytes=len(data) - 1)
    for pieces in ([data], [data[at : at + 1] for at in range(len(data))], [data[:-1], data[-1:]]):
        error = refusal_of(*pieces, limits=limits)
        assert isinstance(error, HeadersTooLarge)
        assert str(len(data) - 1) in error.message


def test_head_limit_is_per_request():
    limits = Limits(max_body_bytes=100, max_head_bytes=200)
    data = get(b"X: " + b"a" * 100) + post(b"Content-Length: 90", body=b"b" * 90)
    assert [type(item) for item in read(data * 5, limits=limits)] == [HttpRequest] * 10


@pytest.mark.parametrize(
    ("start", "unit"),
    [
        (b"GET /", b"a"),
        (b"GET ", b" "),
        (b"GET / HTTP/1.1\r\n", b"a"),
        (b"GET / HTTP/1.1\r\n", b"X: y\r\n"),
        (b"GET / HTTP/1.1\r\nX:", b"a"),
        (b"GET / HTTP/1.1\r\nX:", b" "),
    ],
)
def test_100_mb_of_head_are_not_collected(start, unit):
    reader = RequestReader(Limits(max_body_bytes=0, max_headers=1_000_000))
    reader.feed(start)
    num_fed_bytes = 0
    with pytest.raises(HeadersTooLarge):  # noqa: PT012
        while num_fed_bytes < 100_000_000:
            assert reader.next_request() is None
            reader.feed(unit * 1000)
            num_fed_bytes += 1000 * len(unit)
    assert num_fed_bytes < 40_000


def test_the_limit_of_framing_begins_anew_after_the_head():
    data = post(TE, b"X: " + b"a" * 100, body=b"1;" + b"x" * 100 + b"\r\na\r\n0\r\n\r\n")
    limits = Limits(max_body_bytes=10, max_head_bytes=200)
    for pieces in ([data], [data[at : at + 1] for at in range(len(data))]):
        assert [type(item) for item in read(*pieces, limits=limits)] == [HttpRequest]


def test_header_limit():
    headers = [b"X-%d: y" % i for i in range(99)]
    assert len(read_one(get(*headers)).headers) == 100
    error = refusal_of(get(*headers, b"One-More: z"))
    assert isinstance(error, HeadersTooLarge)
    assert "100" in error.message
    assert isinstance(refusal_of(get(*[b"Same: y"] * 100)), HeadersTooLarge)


def test_body_limit_by_content_length_before_any_of_it_comes():
    assert read_one(post(b"Content-Length: 1000", body=b"x" * 1000)).body == b"x" * 1000
    error = refusal_of(post(b"Content-Length: 1001"))
    assert isinstance(error, PayloadTooLarge)
    assert "1001" in error.message
    assert "1000" in error.message


def test_trailers_are_limited_in_all():
    error = refusal_of(post(TE, body=b"0\r\n"), *[b"A: b\r\n"] * 5462)
    assert isinstance(error, HeadersTooLarge)
    assert "trailers: longer than the 32768" in error.message
    assert read(post(TE, body=b"0\r\n"), *[b"A: b\r\n"] * 5460) == []


# --- what is refused ----------------------------------------------------------------------------------------------

REFUSED = {
    "CL then TE": (post(CL, TE, body=CHUNKS), BadRequest),
    "TE then CL": (post(TE, CL, body=CHUNKS), BadRequest),
    "CL twice, the same": (post(CL, CL, body=b"hello"), BadRequest),
    "CL twice, different": (post(CL, b"Content-Length: 6", body=b"hello"), BadRequest),
    "CL in a trailer": (chunked(b"a", trailers=b"Content-Length: 1\r\n"), BadRequest),
    "TE in a trailer": (chunked(b"a", trailers=b"Transfer-Encoding: chunked\r\n"), BadRequest),
    "TE twice": (post(TE, TE, body=CHUNKS), BadRequest),
    "TE on HTTP/1.0": (post(TE, body=CHUNKS, line=b"POST / HTTP/1.0"), BadRequest),
    "TE ,chunked": (post(b"Transfer-Encoding: ,chunked", body=CHUNKS), NotImplementedByServer),
    "TE gzip, chunked": (post(b"Transfer-Encoding: gzip, chunked", body=CHUNKS), NotImplementedByServer),
    "TE gzip": (post(b"Transfer-Encoding: gzip", body=b"hello"), NotImplementedByServer),
    "TE identity": (post(b"Transfer-Encoding: identity", body=b"hello"), NotImplementedByServer),
    "TE xchunked": (post(b"Transfer-Encoding: xchunked", body=CHUNKS), NotImplementedByServer),
    "TE empty": (post(b"Transfer-Encoding:", body=CHUNKS), BadRequest),
    "TE chunked,": (post(b"Transfer-Encoding: chunked,", body=CHUNKS), BadRequest),
    "TE chunked with an NBSP": (post(b"Transfer-Encoding: chunked\xa0", body=CHUNKS), NotImplementedByServer),
    "TE chunked with a tab, and CL": (post(b"Transfer-Encoding: chunked\t", CL, body=CHUNKS), BadRequest),
    "CL, and TE chunked with a tab": (post(CL, b"Transfer-Encoding: chunked\t", body=CHUNKS), BadRequest),
    "TE chunked, identity": (post(b"Transfer-Encoding: chunked, identity", body=CHUNKS), BadRequest),
    "TE obfuscated by a tab": (post(b"Transfer-Encoding\t: chunked", body=CHUNKS), BadRequest),
    "TE obfuscated by a vertical tab": (post(b"Transfer-Encoding: \x0bchunked", body=CHUNKS), BadRequest),
    "h2c with TE gzip": (post(*H2C, b"Transfer-Encoding: gzip", body=CHUNKS), NotImplementedByServer),
    "h2c with a body over the limit": (post(*H2C, TE, body=b"3e9\r\n" + b"x" * 1001 + b"\r\n0"), PayloadTooLarge),
    "h2c with CL and TE": (post(*H2C, CL, TE, body=CHUNKS), BadRequest),
    "bare LF": (b"GET / HTTP/1.1\nHost: x\n\n" + get(), BadRequest),
    "bare LF after a header": (b"GET / HTTP/1.1\r\nHost: x\nA: b\r\n\r\n", BadRequest),
    "bare LF for the blank line": (b"GET / HTTP/1.1\r\nHost: x\r\n\n" + get(), BadRequest),
    "bare CR": (get(b"A: b\rC: d"), BadRequest),
    "bare CR for the blank line": (b"GET / HTTP/1.1\r\nHost: x\r\n\rX\r\n\r\n", BadRequest),
    "obs-fold": (get(b"A: b", b" c"), BadRequest),
    "obs-fold of the first header": (b"GET / HTTP/1.1\r\n Host: x\r\n\r\n", BadRequest),
    "space before the colon": (get(b"A : b"), BadRequest),
    "no header name": (get(b": b"), BadRequest),
    "no colon": (get(b"Abc"), BadRequest),
    "NUL in a value": (get(b"A: b\0c"), BadRequest),
    "NUL in a name": (get(b"A\0: b"), BadRequest),
    "DEL in a value": (get(b"A: b\x7fc"), BadRequest),
    "no Host": (get(host=b""), BadRequest),
    "Host twice": (get(b"host: x"), BadRequest),
    "Host twice on HTTP/1.0": (get(b"Host: y", line=b"GET / HTTP/1.0"), BadRequest),
    "HTTP/0.9": (b"GET /\r\n\r\n", HttpVersionNotSupported),
    "HTTP/2.0": (get(line=b"GET / HTTP/2.0"), HttpVersionNotSupported),
    "RTSP/1.0": (get(line=b"GET / RTSP/1.0"), BadRequest),
    "ICE/1.1": (get(line=b"SOURCE / ICE/1.1"), BadRequest),
    "a method and a protocol that are unknown": (get(line=b"EMBED / SIP/2.0"), BadRequest),
    "preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", HttpVersionNotSupported),
    "HTTP/1.10": (get(line=b"GET / HTTP/1.10"), BadRequest),
    "HTTP/11": (get(line=b"GET / HTTP/11"), BadRequest),
    "http/1.1": (get(line=b"GET / http/1.1"), BadRequest),
    "a method in lower case": (get(line=b"get / HTTP/1.1"), NotImplementedByServer),
    "an unknown method": (get(line=b"EMBED / HTTP/1.1"), NotImplementedByServer),
    "a method that begins with a known one": (get(line=b"GETX / HTTP/1.1"), NotImplementedByServer),
    "a method of another protocol": (get(line=b"DESCRIBE / HTTP/1.1"), NotImplementedByServer),
    "a method without an end": (b"A" * 1000, NotImplementedByServer),
    "a method that is no token": (get(line=b"G@T / HTTP/1.1"), BadRequest),
    "a CR in the request line": (b"GET /\r HTTP/1.1\r\nHost: x\r\n\r\n", BadRequest),
    "CR CR LF after the request line": (b"GET / HTTP/1.1\r\r\nHost: x\r\n\r\n", BadRequest),
    "a space before the request line": (b" GET / HTTP/1.1\r\nHost: x\r\n\r\n", BadRequest),
    "a request line alone, of an unknown method": (b"EMBED\r\n\r\n", BadRequest),
    "a space in the path": (get(line=b"GET /a b HTTP/1.1"), BadRequest),
    "a tab in the request line": (get(line=b"GET\t/ HTTP/1.1"), BadRequest),
    "a NUL in the path": (get(line=b"GET /\0 HTTP/1.1"), BadRequest),
    "CONNECT": (get(line=b"CONNECT host:443 HTTP/1.1"), NotImplementedByServer),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", BadRequest),
    "an answer": (b"HTTP/1.1 200 OK\r\n\r\n", BadRequest),
    "brotli": (post(b"Content-Encoding: br", CL, body=b"hello"), UnsupportedEncoding),
    "brotli, chunked": (post(b"Content-Encoding: br", TE, body=CHUNKS), UnsupportedEncoding),
    "gzip twice": (post(b"Content-Encoding: gzip, gzip", CL, body=b"hello"), UnsupportedEncoding),
    "gzip in two headers": (
        post(b"Content-Encoding: gzip", b"Content-Encoding: gzip", CL, body=b"hello"),
        UnsupportedEncoding,
    ),
    "no CRLF after a chunk": (post(TE, body=b"5\r\nhelloX0\r\n\r\n"), BadRequest),
    "LF after a chunk": (post(TE, body=b"5\r\nhello\n0\r\n\r\n"), BadRequest),
    "LF after a chunk size": (post(TE, body=b"5\nhello\r\n0\r\n\r\n"), BadRequest),
    "CR after a chunk size": (post(TE, body=b"5\rXhello\r\n0\r\n\r\n"), BadRequest),
    "LF in a chunk extension": (post(TE, body=b"5;a\nb\r\nhello\r\n0\r\n\r\n"), BadRequest),
    "line end in a quoted chunk extension": (post(TE, body=b'5;a="\r\n\r\n"\r\nhello\r\n0\r\n\r\n'), BadRequest),
    **{
        f"Content-Length {value!r}": (post(b"Content-Length: " + value, body=b"hello"), BadRequest)
        for value in (b"", b"1,1", b"+1", b"-1", b"0x1", b"1_0", b"1 1", b"1.0", b"a", b"\xb2", b"9" * 30)
    },
    **{
        f"chunk size {size!r}": (post(TE, body=size + b"\r\nhello\r\n0\r\n\r\n"), BadRequest)
        for size in (b"", b"0x5", b"-5", b"+5", b" 5", b"5 ", b"5g", b"5,", b"f" * 17, b"\n5", b"5;a ", b"5 a", b"5; ")
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_malicious_and_broken_requests_are_refused(name):
    data, expected = REFUSED[name]
    for pieces in ([data], [data[at : at + 1] for at in range(len(data))]):
        error = refusal_of(*pieces)
        assert type(error) is expected
        assert 400 <= error.status < 600


def test_llhttp_is_never_followed_beyond_the_end_of_a_request():
    """Were the end of a head ever seen elsewhere than llhttp sees it, what it takes for a second request is refused."""
    message = http1.IncomingRequest(LIMITS)
    message.read(get(), 0)
    with pytest.raises(BadRequest, match="does not end where"):
        message.parse(get())


READ_AS_ONE_REQUEST = {
    "several spaces in the request line": get(line=b"GET  /   HTTP/1.1"),
    "padded Content-Length": post(b"Content-Length:  \t5 \t", body=b"hello"),
    "Content-Length with zeros before it": post(b"Content-Length: 005", body=b"hello"),
    "an identity Content-Encoding": post(b"Content-Encoding: Identity", CL, body=b"hello"),
    "chunk size with zeros before it": post(TE, body=b"0005\r\nhello\r\n000\r\n\r\n"),
    "a body on a GET": get(CL) + b"hello",
    "no Host on HTTP/1.0": get(line=b"GET / HTTP/1.0", host=b""),
    "whitespace around the transfer coding": post(b"Transfer-Encoding:\tchunked \t ", body=CHUNKS),
    "absolute-form with another host": get(line=b"GET http://other/ HTTP/1.1"),
    "an empty Host": get(host=b"Host:\r\n"),
    "HTTP/1.2": get(line=b"GET / HTTP/1.2"),
    "an Upgrade that is not asked for": post(b"Upgrade: h2c", CL, body=b"hello"),
}
"""Odd, but with one meaning only, whoever reads it."""


@pytest.mark.parametrize("name", READ_AS_ONE_REQUEST)
def test_odd_requests_are_read_as_exactly_one(name):
    request = read_one(READ_AS_ONE_REQUEST[name])
    assert request.body in (b"", b"hello")
    assert (request.body == b"hello") == (b"hello" in READ_AS_ONE_REQUEST[name])


@pytest.mark.parametrize("host", [b"", b"x", b"x:", b"x:80", b"127.0.0.1:80", b"[::1]:80", b"a-b_c.~%20", b"[v1.a:b]"])
def test_a_host_that_is_one(host):
    assert read_one(get(host=b"Host: " + host + b"\r\n")).headers["host"] == host.decode()


@pytest.mark.parametrize("line", [b"GET / HTTP/1.1", b"GET / HTTP/1.0"])
@pytest.mark.parametrize(
    "host",
    [b"a b", b"a/b", b"a,b", b"u@a", b"a:b", b"a:1:2", b"[::1", b"::1", b"[::1]a", b"%zz", b"a\xe9", b"a" * 900 + b"/"],
)
def test_a_host_that_is_none(line, host):
    error = refusal_of(get(host=b"Host: " + host + b"\r\n", line=line))
    assert isinstance(error, BadRequest)
    assert error.message.startswith("header Host: ")
    assert len(error.message) < 100


def test_messages_name_the_field_and_the_value():
    assert "'br'" in refusal_of(post(b"Content-Encoding: br", CL)).message
    assert "'gzip, chunked'" in refusal_of(post(b"Transfer-Encoding: gzip, chunked")).message
    assert "2.0" in refusal_of(get(line=b"GET / HTTP/2.0")).message
    assert "Host" in refusal_of(get(host=b"")).message


@pytest.mark.parametrize(
    "body",
    [b"secret\r\n\r\n", b"5\r\nsecret\r\n0\r\n\r\n", b"6;secret\nsecret", b"6\r\nsecret\r\n0\r\nsecret secret\r\n\r\n"],
)
def test_messages_do_not_quote_the_body(body):
    error = refusal_of(post(TE, body=body))
    assert "secret" not in error.message


# --- any division of the bytes, any bytes --------------------------------------------------------------------------

CORPUS = [
    get(),
    get(b"Accept: a", b"Accept: b", line=b"GET /a%20b?c=d HTTP/1.1"),
    get(line=b"GET / HTTP/1.0", host=b"") + b"dropped",
    get(b"Connection: close") + get(),
    post(CL, body=b"hello") + get() + post(b"Content-Length: 4", body=b"\r\n\r\n"),
    chunked(b"hello", b"\r\n\r\n", b"x" * 40, trailers=b"A: b\r\n") + get(),
    post(*H2C, CL, body=b"hello") + get(),
    post(*H2C, TE, body=CHUNKS) + post(*H2C) + get(),
    b"\r\n\r\n" + get() + b"\r\n" + get(),
    post(b"Content-Length: 1001", body=b"hello"),
    chunked(b"x" * 600, b"y" * 600),
    get() + get(b"A : b") + get(),
    *(data for data, _ in REFUSED.values()),
    *READ_AS_ONE_REQUEST.values(),
]


@given(data=st.sampled_from(CORPUS), cuts=st.sets(st.integers(1, 300)))
@settings(max_examples=4 * settings().max_examples)
def test_how_the_bytes_are_divided_makes_no_difference(data, cuts):
    bounds = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    pieces = [data[start:stop] for start, stop in itertools.pairwise(bounds)]
    assert comparable(read(*pieces)) == comparable(read(data))


@given(pieces=st.lists(st.binary(max_size=200), max_size=20))
@example(pieces=[b"\r\n\r\n"])
@settings(max_examples=3 * settings().max_examples)
def test_random_bytes_never_raise_anything_but_an_api_error(pieces):
    assert all(isinstance(item, HttpRequest | ApiError) for item in read(*pieces))


@pytest.mark.slow
@given(
    data=st.sampled_from(CORPUS),
    edits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 3), st.binary(max_size=4)), min_size=1, max_size=4),
    cut=st.integers(0, 400),
)
@settings(max_examples=10 * settings().max_examples)
def test_damaged_requests_never_raise_anything_but_an_api_error(data, edits, cut):
    for at, num_removed, inserted in edits:
        data = data[:at] + inserted + data[at + num_removed :]
    taken = read(data[:cut], data[cut:])
    assert all(isinstance(item, HttpRequest) for item in taken[:-1])
    assert all(isinstance(item, HttpRequest | ApiError) for item in taken)


# --- responses ----------------------------------------------------------------------------------------------------


def encode(response: Response, **options: object) -> bytes:
    arguments = {"request_id": "id-1", "keep_alive": True, **options}
    return b"".join(encode_response(response, **arguments))  # type: ignore[arg-type]


def test_an_answer():
    response = Response(200, b'{"a":1}', headers={"x-extra": "1"})
    assert encode(response) == (
        b"HTTP/1.1 200 OK\r\nx-request-id: id-1\r\ncontent-type: application/json\r\ncontent-length: 7\r\n"
        b'x-extra: 1\r\n\r\n{"a":1}'
    )


@pytest.mark.parametrize(
    ("keep_alive", "http_minor", "connection"),
    [(True, 1, None), (True, 0, b"keep-alive"), (False, 1, b"close"), (False, 0, b"close")],
)
def test_the_connection_header(keep_alive, http_minor, connection):
    head = encode(Response(200), keep_alive=keep_alive, http_minor=http_minor)
    assert (b"connection: " in head) == (connection is not None)
    assert connection is None or b"\r\nconnection: " + connection + b"\r\n" in head


def test_a_body_may_come_in_pieces():
    response = Response(200, [b"ab", memoryview(b"cd"), b"", b"e"])
    assert encode(response).endswith(b"\r\ncontent-length: 5\r\n\r\nabcde")
    assert encode(response, head_only=True).endswith(b"\r\ncontent-length: 5\r\n\r\n")
    for status in (204, 304):
        assert encode(Response(status, [b"never sent"])).endswith(b"x-request-id: id-1\r\n\r\n")
        assert encode(Response(status, b"never sent")).endswith(b"x-request-id: id-1\r\n\r\n")
    assert encode(Response(200, [])).endswith(b"\r\ncontent-length: 0\r\n\r\n")


def test_small_pieces_are_sent_as_one_and_large_ones_are_not_copied():
    whole = b"x" * 1_000_000
    assert encode_response(Response(200, whole), request_id="a", keep_alive=True)[1] is whole
    assert len(encode_response(Response(200, [b"x"] * 1000), request_id="a", keep_alive=True)) == 1
    body: list[bytes | memoryview] = [b"x" * 30_000, memoryview(b"y" * 30_000)]
    head, *pieces = encode_response(Response(200, body), request_id="a", keep_alive=True)
    assert [id(piece) for piece in pieces] == [id(piece) for piece in body]
    assert b"content-length: 60000\r\n" in head


@pytest.mark.parametrize("evil", ["a\r\nb", "a\nb", "a\rb", "a\0b", "a\r\n\r\nb", "\r\n", "\n", "a\r\n", "\U0001f600"])
@pytest.mark.parametrize("place", ["header value", "header name", "content type", "request id"])
def test_no_value_can_split_an_answer(place, evil):
    response, request_id = Response(200), "id"
    match place:
        case "header value":
            response.headers["x"] = evil
        case "header name":
            response.headers[evil] = "x"
        case "content type":
            response.content_type = evil
        case "request id":
            request_id = evil
    with pytest.raises(ValueError):  # noqa: PT011
        encode(response, request_id=request_id)


def test_changed_limits_hold_from_the_next_request_on():
    reader = RequestReader(Limits(max_body_bytes=100))
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    reader.feed(head[:10])
    assert reader.next_request() is None
    reader.limits = Limits(max_body_bytes=10)
    reader.feed(head[10:] % 100 + bytes(100) + head % 11)
    request = reader.next_request()
    assert request is not None
    assert len(request.body) == 100
    with pytest.raises(ApiError, match="at most 10 are allowed"):
        reader.next_request()


# --- a head that repeats the one before ---------------------------------------------------------------------------

REPEATABLE = [
    post(b"Content-Length: 5", body=b"hello"),
    post(b"content-length:5", b"Accept: a", body=b"hello"),
    post(b"X: Content-Length: 7", b"Content-Length: 5", body=b"hello"),
    post(b"Accept: a", b"Content-Length: 5", b"Accept: b", body=b"hello"),
    post(b"Content-Length: 5", b"X-Request-Id: own", body=b"hello"),
    post(b"Content-Length: 5", b"Expect: 100-continue", body=b"hello"),
    post(b"Content-Length: 5", b"Content-Encoding: gzip", body=b"hello"),
]
BEHIND = [
    *(head.replace(b"h: 5", b"h: %b" % digits).replace(b"h:5", b"h:%b" % digits).replace(b"hello", body)
      for head in REPEATABLE
      for digits, body in ((b"5", b"world"), (b"0", b""), (b"11", b"hello\r\nGET "), (b"007", b"1234567"),
                           (b"1001", b"x"), (b"99999999999999999999", b""), (b"", b"hello"), (b"-5", b"hello"),
                           (b"5 ", b"hello"), (b"5, 5", b"hello"), (b"5\r\nContent-Length: 5", b"hello"),
                           (b"5\r\n x", b"hello"), (b"4", b"hell" + get()))),
    *CORPUS,
]  # fmt: skip


@pytest.mark.parametrize("first", REPEATABLE)
def test_a_request_is_read_as_on_a_connection_of_its_own(first):
    for second in (first, *BEHIND):
        alone = comparable(read(second))
        expected = comparable(read(first)) + alone
        assert comparable(read(first, second)) == expected
        assert comparable(read(first + second)) == expected
        assert comparable(read(first, *(second[at : at + 7] for at in range(0, len(second), 7)))) == expected
        reader = RequestReader(LIMITS)
        reader.feed(first)
        take_all(reader)
        if (whole := reader.read_whole(second)) is not None:
            assert comparable([whole]) == alone
            assert (reader.state, reader.num_waiting_bytes) == (ReadState.IDLE, 0)
            reader.feed(second)
            assert comparable(take_all(reader)) == alone


def test_a_repeated_head_has_a_length_and_an_id_of_its_own():
    taken = read(REPEATABLE[0], post(b"Content-Length: 2", body=b"hi"), REPEATABLE[0])
    first, second, third = (each for each in taken if isinstance(each, HttpRequest))
    assert (second.body, second.headers["content-length"]) == (b"hi", "2")
    assert (first.body, first.headers["content-length"]) == (b"hello", "5")
    assert len({each.request_id for each in (first, second, third)}) == 3


def test_a_repeated_head_is_held_to_changed_limits():
    reader = RequestReader(LIMITS)
    reader.feed(REPEATABLE[1])
    take_all(reader)
    reader.limits = replace(LIMITS, max_headers=2)
    reader.feed(REPEATABLE[1])
    (error,) = take_all(reader)
    assert isinstance(error, HeadersTooLarge)


@pytest.mark.parametrize(("index", "is_whole"), list(enumerate([True] * 4 + [False] * 3)))
def test_only_one_whole_request_between_others_is_read_at_once(index, is_whole):
    first = REPEATABLE[index]
    reader = RequestReader(LIMITS)
    assert reader.read_whole(first) is None
    reader.feed(first)
    take_all(reader)
    assert (reader.read_whole(first) is not None) is is_whole
    assert reader.read_whole(first[:-1]) is None
    assert reader.read_whole(first + first) is None
    reader.limits = replace(LIMITS)
    assert reader.read_whole(first) is None
    reader.feed(first[:-1])
    assert reader.read_whole(first) is None
