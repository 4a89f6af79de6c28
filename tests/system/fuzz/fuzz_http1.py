"""However a connection's bytes are cut, the same requests come of them, and nothing but an ApiError is raised.

Not always the same one: of two things that are wrong, the one that is seen first is told.
"""

import atheris  # type: ignore[import-untyped, import-not-found, unused-ignore]
from fuzzing import fuzz  # type: ignore[import-not-found, unused-ignore]

with atheris.instrument_imports(include=["gateway"]):
    from vecd.gateway.http.http1 import RequestReader, RequestReceived
    from vecd.gateway.types.errors import ApiError
    from vecd.gateway.types.messages import Limits

_LIMITS = Limits(max_body_bytes=60, max_target_bytes=60, max_head_bytes=300, max_headers=6)
_Taken = list[tuple[object, ...]]


def check(data: bytes) -> None:
    """The first byte says into how many pieces the rest is cut, the next ones where."""
    if not data:
        return
    num_cuts = data[0] % 8
    stream = data[1 + num_cuts :]
    cuts = sorted(place % (len(stream) + 1) for place in data[1 : 1 + num_cuts])
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=False)]
    whole = _requests_of([stream])
    in_pieces = _requests_of(pieces)
    assert whole == in_pieces, (whole, in_pieces)
    assert _requests_of([stream[at : at + 1] for at in range(len(stream))]) == whole


def _requests_of(pieces: list[bytes]) -> _Taken:
    """What the requests say, and whether the stream was refused then."""
    reader, taken = RequestReader(_LIMITS), _Taken()
    for piece in pieces:
        reader.feed(piece)
        try:
            while (event := reader.next_event()) is not None:
                if isinstance(event, RequestReceived):
                    request = event.request
                    assert len(request.body) <= _LIMITS.max_body_bytes
                    assert len(request.headers) <= _LIMITS.max_headers
                    headers = tuple(sorted(request.headers.items()))
                    taken.append((request.method, request.path, request.query, headers, request.body))
        except ApiError as error:
            if not _is_of_the_caller(error.status):
                raise AssertionError(f"refused with {error.status}") from error
            return [*taken, ("refused",)]
    return taken


def _is_of_the_caller(status: int) -> bool:
    return 400 <= status < 500 or status in (501, 505)


if __name__ == "__main__":
    fuzz(
        check,
        seeds=[
            b"\x00GET / HTTP/1.1\r\nHost: a\r\n\r\n",
            b"\x02\x05\x20POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello"
            b"GET /x?y HTTP/1.0\r\n\r\n",
            b"\x03\x15\x30\x60POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"3;x=y\r\nabc\r\n0\r\nT: 1\r\n\r\n",
            b"\x01\x40POST / HTTP/1.1\r\nHost: a\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nhi",
            b"\x01\x40POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nhi"
            b"GET /%41 HTTP/1.1\r\n",
        ],
        words=[
            *(
                b"\r\n\r\n",
                b"\r\n",
                b"Host: a\r\n",
                b"HTTP/1.1",
                b"HTTP/1.0",
                b"GET ",
                b"POST ",
                b"%00",
                b"\x00",
                b"\n",
            ),
            *(b"Content-Length: ", b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n", b"Content-Encoding: gzip\r\n"),
            *(b"Connection: close\r\n", b"Upgrade: h2c\r\n", b"Expect: 100-continue\r\n"),
            b"\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ],
        max_bytes=600,
    )
