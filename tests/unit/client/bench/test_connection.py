import asyncio
import ssl
from pathlib import Path

import pytest

from vecd.base.target import Target, parse_target
from vecd.client.connection import ClientConnection, ConnectionClosed, name_failure, render_request


def test_an_answer_that_nobody_asked_for_closes_the_connection() -> None:
    async def receive_unasked() -> bool:
        connection = ClientConnection()
        transport = FakeTransport()
        connection.connection_made(transport)
        connection.data_received(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
        return connection.is_open or not transport.is_aborted

    assert not asyncio.run(receive_unasked())


class FakeTransport(asyncio.Transport):
    is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


@pytest.mark.parametrize(
    ("url", "target", "host_header"),
    [
        ("http://127.0.0.1:8000", Target("127.0.0.1", 8000, None), "127.0.0.1:8000"),
        ("http://localhost/", Target("localhost", 80, None), "localhost:80"),
        ("http://[::1]:9000", Target("::1", 9000, None), "[::1]:9000"),
        ("unix:/run/a@b.sock", Target("", 0, "/run/a@b.sock"), "localhost"),
    ],
)
def test_urls(url: str, target: Target, host_header: str) -> None:
    assert parse_target(url) == target
    assert target.host_header == host_header


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "https://h/v1",
        "ftp://h",
        "http://h:x",
        "unix:",
        "unix://h/s",
    ],
)
def test_urls_that_name_no_server_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_target(url)


@pytest.mark.parametrize(
    "url", ["http://user:secret@h", "https://secret@h:1", "//u:secret@h", "u:secret@h", "unix://u:secret@h/s"]
)
def test_an_address_with_a_password_is_refused_and_not_quoted(url: str) -> None:
    with pytest.raises(ValueError, match="--api-key") as raised:
        parse_target(url)
    assert "secret" not in str(raised.value)


def test_https() -> None:
    target = parse_target("https://h")
    assert (str(target), target.port) == ("https://h:443", 443)
    assert target.tls is not None
    assert target.tls.check_hostname
    trusting = parse_target("https://h:8443", insecure=True).tls
    assert trusting is not None
    assert trusting.verify_mode == ssl.CERT_NONE


@pytest.mark.parametrize(
    ("url", "ca", "insecure", "message"),
    [
        ("http://h", None, True, "only with https://"),
        ("unix:/s", Path("ca.pem"), False, "only with https://"),
        ("https://h", Path("/no/such.pem"), False, "--ca: /no/such.pem: No such file"),
        ("https://h", Path(__file__), False, "--ca: "),
    ],
)
def test_certificates_that_cannot_be_used(url: str, ca: Path | None, insecure: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_target(url, ca, insecure=insecure)


@pytest.mark.parametrize(("path", "api_key"), [("v1", None), ("/a b", None), ("/a\r\nX: y", None), ("/", "k\n")])
def test_what_cannot_be_sent_is_refused(path: str, api_key: str | None) -> None:
    with pytest.raises(ValueError, match=r".+"):
        render_request(Target("h", 1, None), path, b"", api_key=api_key)


def test_a_request_carries_its_key_length_and_further_headers() -> None:
    headers = {"x-vecd-priority": "bulk", "x-vecd-timeout-ms": "50"}
    request = render_request(Target("h", 1, None), "/", b"", api_key=None, accept="application/x-npy", headers=headers)
    assert b"\r\nx-vecd-priority: bulk\r\nx-vecd-timeout-ms: 50\r\n\r\n" in request
    assert b"\r\nAccept: application/x-npy\r\n" in request
    request = render_request(Target("h", 1, None), "/v1/embeddings", b'{"a":1}', api_key="s3cret")
    head, _, body = request.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/embeddings HTTP/1.1\r\nHost: h:1\r\n")
    assert b"Authorization: Bearer s3cret" in head
    assert b"Content-Length: 7" in head
    assert body == b'{"a":1}'


@pytest.mark.parametrize("value", ["", "a\r\nb: c", "ü"])
def test_headers_that_cannot_be_sent_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match="x-vecd-priority"):
        render_request(Target("h", 1, None), "/", b"", api_key=None, headers={"x-vecd-priority": value})


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError(), "timeout"),
        (ConnectionRefusedError(111, "x"), "connection refused"),
        (ConnectionClosed(), "connection closed"),
        (FileNotFoundError(2, "x"), "connection error ENOENT"),
    ],
)
def test_failures_have_names(error: Exception, kind: str) -> None:
    assert name_failure(error) == kind
