"""https for the commands that talk to a server, and what they say when only one end speaks TLS."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.bulk_server import BulkServer
from tests.support.certificates import Certificate, make_certificate
from vecd.client.bench.command import main as bench
from vecd.client.bulk.command import main as embed
from vecd.client.top.command import main as top

BENCH = (
    "--clients",
    "1",
    "--texts-per-request",
    "2",
    "--warmup",
    "0",
    "--requests",
    "3",
    "--encoding-format",
    "bytes",
    "--url",
)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def https(certificate: Certificate) -> Iterator[BulkServer]:
    with BulkServer(certificate=certificate) as server:
        yield server


@pytest.fixture(scope="module")
def plain() -> Iterator[BulkServer]:
    with BulkServer() as server:
        yield server


@pytest.fixture
def embed_flags(tmp_path: Path) -> list[str]:
    source = tmp_path / "a.txt"
    source.write_text("one\ntwo\n")
    return [str(source), "-o", str(tmp_path / "v.npy"), "--url"]


def test_https(https: BulkServer, certificate: Certificate, embed_flags: list[str], tmp_path: Path) -> None:
    assert embed([*embed_flags, https.url, "--ca", certificate.cert]) == 0
    assert (tmp_path / "v.npy").exists()
    assert embed([*embed_flags, https.url, "--insecure", "--restart"]) == 0
    assert bench([*BENCH, https.url, "--ca", certificate.cert]) == 0
    assert bench([*BENCH, https.url, "--insecure"]) == 0


def test_top_over_https(https: BulkServer, certificate: Certificate, capsys: pytest.CaptureFixture[str]) -> None:
    """That server has other figures, so it must have been read."""
    for trusted in (["--ca", certificate.cert], ["--insecure"]):
        assert top(["--json", "--url", https.url, *trusted]) == 1
        assert "has not the figures of a vecd server" in capsys.readouterr().err


def test_another_certificate_is_not_trusted(
    https: BulkServer, embed_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert embed([*embed_flags, https.url, "--ca", make_certificate(tmp_path).cert]) == 1
    assert "its certificate is not trusted" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["embed", "bench", "top"])
@pytest.mark.parametrize(
    ("is_https", "scheme", "message"),
    [
        (True, "https", "its certificate is not trusted: self-signed certificate (--ca FILE, or --insecure)"),
        (True, "http", "it speaks TLS: use https://{address}"),
        (False, "https", "it does not speak TLS: use http://{address}"),
    ],
)
def test_what_does_not_fit_is_told_at_once(
    https: BulkServer,
    plain: BulkServer,
    embed_flags: list[str],
    command: str,
    is_https: bool,
    scheme: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    address = (https if is_https else plain).address
    url = f"{scheme}://{address}"
    match command:
        case "embed":
            assert embed([*embed_flags, url]) == 1
        case "bench":
            assert bench([*BENCH, url, "--timeout", "5"]) == 1
        case "top":
            assert top(["--json", "--url", url]) == 1
    told = capsys.readouterr()
    assert message.format(address=address) in told.err + told.out
