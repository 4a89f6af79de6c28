"""`vecd.gateway.http.proxy_protocol`: which bytes are a header, and whose connection it says it is."""

import socket
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vecd.gateway.http.proxy_protocol import MAX_V2_BYTES, ProxyHeader, ProxyHeaderError, read_header

SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
REQUEST = b"GET / HTTP/1.1\r\n\r\n"


def v2(command: int, family: int, block: bytes, num_bytes: int | None = None) -> bytes:
    return SIGNATURE + struct.pack("!BBH", command, family, len(block) if num_bytes is None else num_bytes) + block


def tcp(host: str, port: int = 50124) -> bytes:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    address = socket.inet_pton(family, host)
    return address + address + struct.pack("!HH", port, 8000)


LONG = ":".join(["ffff"] * 8)
LONGEST_V1 = b"PROXY UNKNOWN " + b"f" * 91 + b"\r\n"
TLV = b"\x05\x00\x03abc"
GOOD = [
    (b"PROXY TCP4 192.0.2.7 10.0.0.2 50124 8000\r\n", ("192.0.2.7", 50124), False),
    (b"PROXY TCP4 255.255.255.255 255.255.255.255 65535 65535\r\n", ("255.255.255.255", 65535), False),
    (b"PROXY TCP6 2001:db8::1 ::1 0 8000\r\n", ("2001:db8::1", 0), False),
    (f"PROXY TCP6 {LONG} {LONG} 65535 65535\r\n".encode(), (LONG, 65535), False),
    (b"PROXY UNKNOWN\r\n", None, False),
    (b"PROXY UNKNOWN ffff::1 whatever 1 2\r\n", None, False),
    (LONGEST_V1, None, False),
    (v2(0x21, 0x11, tcp("192.0.2.7")), ("192.0.2.7", 50124), False),
    (v2(0x21, 0x11, tcp("192.0.2.7") + TLV), ("192.0.2.7", 50124), False),
    (v2(0x21, 0x21, tcp("2001:db8::1", 9)), ("2001:db8::1", 9), False),
    (v2(0x21, 0x31, bytes(216)), "", False),
    (v2(0x21, 0x31, b"/run/a.sock".ljust(216, b"\0") + TLV), "", False),
    (v2(0x21, 0x00, b""), None, False),
    (v2(0x21, 0x00, TLV), None, False),
    (v2(0x20, 0x00, b""), None, True),
    (v2(0x20, 0x11, tcp("192.0.2.7")), None, True),
    (v2(0x20, 0x77, b"any"), None, True),
    (v2(0x21, 0x11, tcp("192.0.2.7").ljust(MAX_V2_BYTES, b"\0")), ("192.0.2.7", 50124), False),
]  # fmt: skip


@pytest.mark.parametrize(("data", "peername", "is_local"), GOOD)
@pytest.mark.parametrize("rest", [b"", REQUEST])
def test_a_header_is_read_when_its_last_byte_has_come(data, peername, is_local, rest):
    for end in range(len(data)):
        assert read_header(data[:end]) is None
    assert read_header(data + rest) == ProxyHeader(len(data), is_local, peername)


BAD = [
    # the bytes with which it is clear, and the reason
    (b"G", "something else"),
    (b"\x16", "something else"),
    (b"\n", "something else"),
    (b"proxy TCP4", "something else"),
    (b"PROXY\t", "something else"),
    (b"\r\n\r\n\0\r\nQUIT\r", "something else"),
    (b"PROXY UNKNOWN\n", "CR LF"),
    (b"PROXY UNKNOWN a\rb\r\n", "CR LF"),
    (b"PROXY UNKNOWNX\r\n", "malformed"),
    (b"PROXY \r\n", "malformed"),
    (b"PROXY TCP4\r\n", "malformed"),
    (b"PROXY UDP4 192.0.2.7 10.0.0.2 50124 8000\r\n", "malformed"),
    (b"PROXY TCP4  192.0.2.7 10.0.0.2 50124 8000\r\n", "malformed"),
    (b"PROXY TCP4 192.0.2.7 10.0.0.2 50124 8000 \r\n", "malformed"),
    (b"PROXY TCP4 192.0.2.7 10.0.0.2 50124\r\n", "malformed"),
    (b"PROXY TCP4 192.0.2.7 10.0.0.2 65536 8000\r\n", "malformed"),
    (b"PROXY TCP4 192.0.2.7 10.0.0.2 050 8000\r\n", "malformed"),
    (b"PROXY TCP4 192.0.2.7 10.0.0.2 -1 8000\r\n", "malformed"),
    (b"PROXY TCP4 192.0.2.7 10.0.0.2 \xb2 8000\r\n", "malformed"),
    (b"PROXY TCP4 192.0.2.256 10.0.0.2 50124 8000\r\n", "address"),
    (b"PROXY TCP4 ::1 ::1 50124 8000\r\n", "address"),
    (b"PROXY TCP4 192.0.2.7 nowhere 50124 8000\r\n", "malformed"),
    (b"PROXY TCP6 192.0.2.7 10.0.0.2 50124 8000\r\n", "address"),
    (b"PROXY UNKNOWN " + b"f" * 93, "longer than 107"),
    (b"PROXY UNKNOWN " + b"f" * 92 + b"\r\n", "longer than 107"),
    (v2(0x11, 0x11, tcp("192.0.2.7")), "version or command"),
    (v2(0x22, 0x11, tcp("192.0.2.7")), "version or command"),
    (v2(0x21, 0x12, tcp("192.0.2.7")), "not of TCP"),
    (v2(0x21, 0x01, b""), "not of TCP"),
    (v2(0x21, 0x41, bytes(300)), "not of TCP"),
    (v2(0x21, 0x11, bytes(11)), "cut off"),
    (v2(0x21, 0x21, bytes(35)), "cut off"),
    (v2(0x21, 0x31, bytes(215)), "cut off"),
    (v2(0x21, 0x11, b"", MAX_V2_BYTES + 1), "at most 4096"),
    (v2(0x20, 0x00, b"", 0xFFFF), "at most 4096"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "reason"), BAD)
def test_what_is_no_header_is_refused_once_that_is_clear(data, reason):
    with pytest.raises(ProxyHeaderError, match=reason):
        read_header(data)
    with pytest.raises(ProxyHeaderError, match=reason):
        read_header(data + REQUEST)


def read_by_bytes(data: bytes) -> ProxyHeader | str | None:
    for end in range(1, len(data) + 1):
        try:
            header = read_header(data[:end])
        except ProxyHeaderError as error:
            return str(error)
        if header is not None:
            return header
    return None


def read_whole(data: bytes) -> ProxyHeader | str | None:
    try:
        return read_header(data)
    except ProxyHeaderError as error:
        return str(error)


def mutated(data: bytes, changes: list[tuple[int, int]], cut: int) -> bytes:
    changed = bytearray(data)
    for at, byte in changes:
        changed[at % len(changed)] = byte
    return bytes(changed[: len(changed) - cut % len(changed)])


headers = st.sampled_from([data for data, *_ in GOOD])
mutations = st.builds(
    mutated, headers, st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), max_size=3), st.integers(0, 300)
)


@given(st.one_of(mutations, st.binary(max_size=150), st.binary(max_size=300).map(lambda rest: SIGNATURE + rest)))
@example(b"")
def test_it_reads_the_same_in_one_piece_and_byte_by_byte(data):
    whole, by_bytes = read_whole(data), read_by_bytes(data)
    assert whole == by_bytes
    if isinstance(whole, ProxyHeader):
        assert 0 < whole.num_bytes <= len(data)
        assert not (whole.is_local and whole.peername is not None)


@given(st.binary(min_size=1, max_size=40), st.sampled_from([b"", b"PROXY ", SIGNATURE]))
def test_what_never_ends_is_refused(rest, start):
    assert read_whole(start + rest * 5000) is not None
