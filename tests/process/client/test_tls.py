"""https for the commands that talk to a server, and what they say when only one end speaks TLS."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.bulk_server import BulkServer
from tests.support.certificates import Certificate, make_certificate
from vecd.client.bench.command import main as bench
from vecd.client.embed.command import main as embed
from vecd.client.top.command import main as top

BENCH = ["--clients=1", "--texts-per-request=2", "--warmup=0", "--requests=3", "--encoding-format=bytes", "--url"]


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
def call(tmp_path: Path) -> Callable[..., int]:
    """A command with the URL and flags of a server."""
    source = tmp_path / "a.txt"
    source.write_text("one\ntwo\n")

    def call(command: str, url: str, *flags: str) -> int:
        if command == "embed":
            return embed([str(source), "-o", str(tmp_path / "v.npy"), "--restart", "--url", url, *flags])
        return bench([*BENCH, url, *flags]) if command == "bench" else top(["--json", "--url", url, *flags])

    return call


def test_https(https, certificate, call, tmp_path, capsys):
    for trusted in (["--ca", certificate.cert], ["--insecure"]):
        assert call("embed", https.url, *trusted) == 0
        assert call("bench", https.url, *trusted) == 0
        assert call("top", https.url, *trusted) == 1
        # That server has other figures, so it must have been read.
        assert "has not the figures of this version" in capsys.readouterr().err
    assert call("embed", https.url, "--ca", make_certificate(tmp_path).cert) == 1
    assert "its certificate is not trusted" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["embed", "bench", "top"])
@pytest.mark.parametrize(
    ("is_https", "scheme", "message"),
    [
        (True, "https", "its certificate is not trusted: self-signed certificate (ca=, --ca FILE, or --insecure)"),
        (True, "http", "it speaks TLS: use https://{address}"),
        (False, "https", "it does not speak TLS: use http://{address}"),
    ],
)
def test_what_does_not_fit_is_told_at_once(https, plain, call, command, is_https, scheme, message, capsys):
    address = (https if is_https else plain).address
    assert call(command, f"{scheme}://{address}") == 1
    told = capsys.readouterr()
    assert message.format(address=address) in told.err + told.out
