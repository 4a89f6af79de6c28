"""Bodies as bytes: how they are framed, and how they are compressed.

Owns the reading of chunks and lengths, and the content codings. Parses no head. Pure.
"""

import re
import sys
import zlib
from collections.abc import Iterator
from io import SEEK_CUR, BytesIO
from typing import NoReturn

from vecd.gateway.errors import BadRequest, HeadersTooLarge, PayloadTooLarge, UnsupportedEncoding, quoted
from vecd.gateway.request import Coding

# Chunks are read here rather than by llhttp, which cannot stop at the end of a request: to withhold the bytes beyond
# it, one would have to search for each place where it might end, and a hostile body has one such place in 4 bytes. The
# grammar is strict: a line ends with CRLF, a size is 1 to 16 hexadecimal digits, extensions and trailers follow RFC
# 9112, section 7.1. What is refused, and when, does not depend on how the bytes were divided.

FREE_FRAMING_BYTES = 1024 * 1024
"""Bytes of chunk framing allowed for a body, besides the same number again as it has of content: framing takes at least
5 bytes a chunk. Reading a chunk costs 0.4 µs, even of one byte."""

STEPS_PER_READ = 512
"""Most steps of one `ChunkedBody.read`: 0.4 ms. A chunk with extensions takes three, any other one or less."""
_STEP_BYTES = 64  # a line counts as one step more for each
_LINE_END = b"\r\n"
_MAX_LOOKED_AT_BYTES = 64
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_QUOTED = rb'"(?:[\t \x21\x23-\x5b\x5d-\x7e\x80-\xff]|\\[\t \x21-\x7e\x80-\xff])*"'
# Whitespace is allowed before and after a semicolon and an equals sign, and nowhere else.
_VALUE = rb"[\t ]*=[\t ]*(?:" + _TOKEN + rb"|" + _QUOTED + rb")"
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[\t ]*;[\t ]*" + _TOKEN + rb"(?:" + _VALUE + rb")?)*")
_CHUNK_LINE_BEGUN = re.compile(rb"[0-9A-Fa-f]{1,16}[\t ]*(?:;[\t\x20-\x7e\x80-\xff]*)?\r?")
_TRAILER = re.compile(rb"(" + _TOKEN + rb"):[\t\x20-\x7e\x80-\xff]*")
_TRAILER_BEGUN = re.compile(rb"(?:" + _TOKEN + rb"(?::[\t\x20-\x7e\x80-\xff]*)?)?\r?")
_FRAMING_TRAILERS = {b"content-length", b"transfer-encoding"}
# The size lines of chunks so small that the cost of each matters.
_SMALL_SIZES = {line: size for size in range(1, 1024) for line in (b"%x" % size, b"%X" % size)}


class Body:
    """What was received of a body."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Without its framing."""
        self.has_more = False
        """The last `read` had done enough for one turn of the event loop."""
        self.is_complete = False
        self._pieces = BytesIO()  # not a list: two-byte chunks as objects would take twenty times the body's size

    def read(self, data: bytes, at: int) -> int:
        """Take bytes of the body, which begin at `at` in `data`; returns the position after them. Until the body is
        complete, pass the bytes that are left again, with those that follow. Raises ApiError when it is refused."""
        raise NotImplementedError

    def take(self) -> bytes:
        """The body, once complete, which is dropped here."""
        body, self._pieces = self._pieces.getvalue(), BytesIO()
        return body

    def _take(self, data: bytes, at: int, num_most: int) -> int:
        """Take up to `num_most` bytes; returns the number taken."""
        piece = data[at : at + num_most]
        self._pieces.write(piece)
        self.num_bytes += len(piece)
        return len(piece)


class KnownBody(Body):
    """A body whose Content-Length is known, or 0: then `read` and `take` change nothing."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length
        self.is_complete = length == 0

    def read(self, data: bytes, at: int) -> int:
        if not self.is_complete:
            at += self._take(data, at, self._length - self.num_bytes)
            self.is_complete = self.num_bytes == self._length
        return at


class ChunkedBody(Body):
    """A body of chunks. Trailers are checked and dropped: taken as headers, they would evade the checks of headers."""

    def __init__(self, max_bytes: int, max_framing_bytes: int) -> None:
        """`max_bytes` of body; `max_framing_bytes` between two bytes of it, and of trailers."""
        super().__init__()
        self._max_bytes = max_bytes
        self._max_framing_bytes = max_framing_bytes
        self._is_in_chunk = False  # its size is known, and not all of it was received, or not the CRLF after it
        self._num_left_bytes = 0  # of that chunk
        self._is_in_trailers = False
        self._num_framing_bytes = 0  # in all
        self._num_since_bytes = 0  # of them, since the last byte of body
        self._num_left_steps = 0

    def read(self, data: bytes, at: int) -> int:
        self._num_left_steps, self.has_more = STEPS_PER_READ, False
        while not self.is_complete:
            if self._num_left_steps <= 0:
                self.has_more = at < len(data)
                break
            self._num_left_steps -= 1
            start = at
            if self._is_in_chunk:
                at = self._read_chunk(data, at)
            elif self._is_in_trailers:
                at = self._read_trailer(data, at)
            else:
                at = self._read_small_chunks(data, at)
                at = self._read_size(data, at)
            if at == start:
                break
        return at

    def _read_small_chunks(self, data: bytes, at: int) -> int:
        """Take small chunks that are complete and have no extensions, by one step each; the other methods need
        several."""
        write, size_of, line_end = self._pieces.write, _SMALL_SIZES.get, _LINE_END
        num_bytes, num_framing_bytes = self.num_bytes, self._num_framing_bytes
        max_bytes, max_surplus_bytes = self._max_bytes, FREE_FRAMING_BYTES
        for num_left_steps in range(self._num_left_steps, 0, -1):
            self._num_left_steps = num_left_steps
            stop = data.find(line_end, at, at + 5)
            size = size_of(data[at:stop]) if stop >= 0 else None
            if size is None:
                break
            start = stop + 2
            end = start + size
            num_framing = num_framing_bytes + start - at
            if (
                data[end : end + 2] != line_end
                or num_bytes + size > max_bytes
                or num_framing > max_surplus_bytes + num_bytes
            ):
                break
            write(data[start:end])
            num_bytes += size
            num_framing_bytes = num_framing + 2
            at = end + 2
        if num_bytes > self.num_bytes:
            self._num_since_bytes = 2
        self.num_bytes, self._num_framing_bytes = num_bytes, num_framing_bytes
        return at

    def _read_size(self, data: bytes, at: int) -> int:
        line = self._line(data, at, _CHUNK_LINE_BEGUN, "chunk size")
        if line is None:
            return at
        match = _CHUNK_LINE.fullmatch(line)
        if match is None:
            _refuse("chunk size")
        size = int(match[1], 16)
        if size == 0:
            self._is_in_trailers = True
            self._num_since_bytes = 0
            return at + len(line) + 2
        if self.num_bytes + size > self._max_bytes:
            raise PayloadTooLarge(f"body: longer than the {self._max_bytes} bytes allowed")
        self._count_framing(len(line) + 2)
        if self._num_framing_bytes > FREE_FRAMING_BYTES + self.num_bytes:
            raise BadRequest(
                f"body: {self._num_framing_bytes} bytes of chunk framing for {self.num_bytes} bytes of body, at most "
                f"{FREE_FRAMING_BYTES} more are allowed than bytes of body; send larger chunks"
            )
        self._is_in_chunk, self._num_left_bytes = True, size
        self._num_left_steps -= 1
        return at + len(line) + 2

    def _read_chunk(self, data: bytes, at: int) -> int:
        if self._num_left_bytes:
            num_taken = self._take(data, at, self._num_left_bytes)
            self._num_left_bytes -= num_taken
            self._num_since_bytes = 0
            at += num_taken
        if self._num_left_bytes == 0:
            found = data[at : at + 2]
            if found == _LINE_END:
                self._is_in_chunk = False
                self._count_framing(2)
                return at + 2
            if found not in (b"", b"\r"):
                _refuse("end of a chunk")
        return at

    def _read_trailer(self, data: bytes, at: int) -> int:
        line = self._line(data, at, _TRAILER_BEGUN, "trailer")
        if line is None:
            return at
        if not line:
            self.is_complete = True
        else:
            match = _TRAILER.fullmatch(line)
            if match is None or match[1].lower() in _FRAMING_TRAILERS:
                _refuse("trailer")
        self._count_framing(len(line) + 2)
        return at + len(line) + 2

    def _line(self, data: bytes, at: int, begun: re.Pattern[bytes], what: str) -> bytes | None:
        """The line at `at` without its end, or None while its end is missing. A line that cannot become valid is
        refused by its first bytes; otherwise all of it would be checked again for each byte received."""
        max_bytes = self._max_framing_bytes - self._num_since_bytes
        stop = data.find(_LINE_END, at, at + max_bytes)
        if stop >= 0:
            self._num_left_steps -= (stop - at) // _STEP_BYTES
            return data[at:stop]
        if at < len(data) and not begun.fullmatch(data, at, min(len(data), at + min(max_bytes, _MAX_LOOKED_AT_BYTES))):
            _refuse(what)
        if len(data) - at >= max_bytes:
            raise HeadersTooLarge(
                f"chunk extensions and trailers: longer than the {self._max_framing_bytes} bytes allowed"
            )
        return None

    def _count_framing(self, num_bytes: int) -> None:
        self._num_framing_bytes += num_bytes
        self._num_since_bytes += num_bytes


def _refuse(what: str) -> NoReturn:
    raise BadRequest(f"not a well-formed HTTP request: Invalid {what}")


# A body of 64 KB may become one of 64 MB (zlib's best ratio is 1:1032, zstd's 1:32,000), so no body is decompressed at
# once: a step reads up to 16 KiB and makes up to 64 KiB. Measured, one core: 64 MiB of zeros take 0.19 s from gzip,
# 0.05 s from zstd; an empty member costs 3 µs in gzip, 11 µs in zstd.
#
# Several gzip members, or zstd frames, in a row are one body (RFC 1952, section 2.2; RFC 8878, section 3). Anything
# else behind the end is refused, and so is a truncated body: half of a JSON text may be a valid one.

if sys.version_info >= (3, 14):
    from compression import zstd as zstd
else:
    from backports import zstd as zstd

_MAX_STEP_INPUT_BYTES = 16 * 1024
"""Of one step. The bytes behind the end of a member are copied for the next one, so they must not be megabytes."""
_MAX_STEP_BYTES = 64 * 1024
_MAX_STEPS = 64
"""Steps of one `Decompression.advance`, however few bytes they make."""
_MAX_MEMBERS = 4096
_ZSTD_WINDOW_LOG = 23
"""8 MiB, the most that a sender may use (RFC 9659): a frame states the memory that its reader needs."""
_BY_NAME = {"gzip": Coding.GZIP, "x-gzip": Coding.GZIP, "deflate": Coding.DEFLATE, "zstd": Coding.ZSTD}
CODINGS = ", ".join(coding.value for coding in Coding)
"""As the header Accept-Encoding of a response names them."""


def coding_named(value: str) -> Coding | None:
    """The coding that a Content-Encoding header names; None for none. Raises UnsupportedEncoding. One coding at most: a
    limit on the decompressed body does not limit what lies between two codings."""
    names = [name for part in value.lower().split(",") if (name := part.strip()) not in ("", "identity")]
    if not names:
        return None
    if len(names) == 1 and names[0] in _BY_NAME:
        return _BY_NAME[names[0]]
    problem = f"{quoted(names[0])} is not supported, only {CODINGS}, or none"
    if len(names) > 1:
        problem = f"{len(names)} codings, at most one of {CODINGS} is supported"
    raise UnsupportedEncoding(f"header Content-Encoding: {problem}", headers={"accept-encoding": CODINGS})


class _Zlib:
    """One member of gzip, zlib's format, or raw deflate, with the interface of zstd's decompressor."""

    def __init__(self, wbits: int) -> None:
        """`wbits`: the format, as zlib encodes it."""
        self._inner = zlib.decompressobj(wbits)
        self._is_full = False  # the last step made as much as it may: there may be more

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    @property
    def needs_input(self) -> bool:
        return not (self._is_full or self._inner.unconsumed_tail)

    def decompress(self, data: bytes, max_length: int) -> bytes:
        tail = self._inner.unconsumed_tail
        inflated = self._inner.decompress(tail + data if tail else data, max_length)
        self._is_full = len(inflated) == max_length
        return inflated


_ERRORS = (zlib.error, zstd.ZstdError)
_ZSTD_OPTIONS = {int(zstd.DecompressionParameter.window_log_max): _ZSTD_WINDOW_LOG}


class Decompression:
    def __init__(self, body: bytes, coding: Coding, max_bytes: int) -> None:
        """`max_bytes`: the limit on the decompressed body."""
        self._pieces = _inflate(body, coding, max_bytes)
        self._inflated = BytesIO()
        self.num_bytes = 0
        self.is_complete = False

    def advance(self, max_bytes: int) -> None:
        """Decompress `max_bytes` more and at most another 64 KiB, or for 64 steps, or to the end. Raises BadRequest for
        a body that is not valid in its coding, PayloadTooLarge for one that becomes too long."""
        enough = self.num_bytes + max_bytes
        for _ in range(_MAX_STEPS):
            if self.num_bytes >= enough:
                return
            piece = next(self._pieces, None)
            if piece is None:
                self.is_complete = True
                return
            self.num_bytes += len(piece)
            self._inflated.write(piece)

    def take(self) -> bytes:
        body, self._inflated = self._inflated.getvalue(), BytesIO()
        return body


def _inflate(body: bytes, coding: Coding, max_bytes: int) -> Iterator[bytes]:
    """What each step makes, which may be nothing. Raises as `Decompression.advance`."""
    compressed, num_bytes = BytesIO(body), 0
    for _ in range(_MAX_MEMBERS):
        member = _make_member(body, coding)
        while not member.eof:
            given = compressed.read(_MAX_STEP_INPUT_BYTES) if member.needs_input else b""
            if member.needs_input and not given:
                raise BadRequest(f"body: it ends before its {coding.value} data does")
            try:
                inflated = member.decompress(given, _MAX_STEP_BYTES)
            except _ERRORS as error:
                # The libraries' reasons are fixed sentences that quote nothing.
                raise BadRequest(f"body: not valid {coding.value} data, as Content-Encoding says: {error}") from None
            num_bytes += len(inflated)
            if num_bytes > max_bytes:
                raise PayloadTooLarge(
                    f"body: longer than the {max_bytes} bytes allowed, once its {len(body)} bytes are decompressed"
                )
            yield inflated
        compressed.seek(-len(member.unused_data), SEEK_CUR)
        if compressed.tell() == len(body):
            return
        if coding is Coding.DEFLATE:
            raise BadRequest("body: there are bytes behind the end of its deflate data")
    raise BadRequest(f"body: more than {_MAX_MEMBERS} {coding.value} members, one behind the other")


def _make_member(body: bytes, coding: Coding) -> _Zlib | zstd.ZstdDecompressor:
    match coding:
        case Coding.GZIP:
            return _Zlib(16 + zlib.MAX_WBITS)
        case Coding.DEFLATE:
            return _Zlib(zlib.MAX_WBITS if _has_zlib_header(body) else -zlib.MAX_WBITS)
        case Coding.ZSTD:
            return zstd.ZstdDecompressor(options=_ZSTD_OPTIONS)


def _has_zlib_header(body: bytes) -> bool:
    """Whether the body begins as zlib's format, which "deflate" means (RFC 9110, section 8.4.1.2). Some clients send
    the raw deflate data that it wraps, and no compressor makes those begin like this."""
    return len(body) < 2 or (body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0)
