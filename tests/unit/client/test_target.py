"""One rule for the address of a server, in every command and client."""

import ssl
from pathlib import Path

import pytest

from vecd.base.target import Target, parse_target


@pytest.mark.parametrize(
    ("url", "target", "host_header"),
    [
        ("http://127.0.0.1:8000", Target("127.0.0.1", 8000, None), "127.0.0.1:8000"),
        ("http://localhost/", Target("localhost", 80, None), "localhost:80"),
        ("http://[::1]:9000/v1", Target("::1", 9000, None), "[::1]:9000"),
        ("http://h:1/v1/", Target("h", 1, None), "h:1"),
        ("http://h:1/m/a@b/", Target("h", 1, None, prefix="/m/a@b"), "h:1"),
        ("http://h:1/openai/v1", Target("h", 1, None, prefix="/openai"), "h:1"),
        ("unix:/run/a@b.sock", Target("", 0, "/run/a@b.sock"), "localhost"),
    ],
)
def test_urls(url: str, target: Target, host_header: str) -> None:
    assert parse_target(url) == target
    assert target.host_header == host_header
    assert parse_target(str(target)) == target


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://h", "http://h:x", "http://h/?a=b", "unix:", "unix://h/s"])
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
    target = parse_target("https://h/p")
    assert (str(target), target.port) == ("https://h:443/p", 443)
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
