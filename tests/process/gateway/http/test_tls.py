"""`vecd.gateway.http.tls`, `vecd.launch.config.plan`: which files are taken, and what is said of others."""

import ssl
from pathlib import Path

import pytest

from tests.support.certificates import Certificate, encrypt_key, make_certificate
from vecd.gateway.http.tls import ServerTls, TlsError, find_problems
from vecd.launch.config.plan import server_problems
from vecd.shm.settings import Settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def good(folder: Path) -> Certificate:
    return make_certificate(folder, "good")


@pytest.fixture(scope="module")
def other(folder: Path) -> Certificate:
    return make_certificate(folder, "other", key="rsa")


def handshake(server: ServerTls, client_context: ssl.SSLContext) -> ssl.SSLObject:
    """The client's side after a handshake in memory."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname="localhost")
    model_info = server.context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (client, model_info):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return client


@pytest.mark.parametrize("kind", ["ec", "rsa"])
def test_a_good_pair_is_taken(kind, tmp_path):
    pair = make_certificate(tmp_path, key=kind)
    assert find_problems(pair.cert, pair.key) == []
    assert told_of(pair.cert, pair.key) == []
    client_context = pair.client_context()
    client_context.set_alpn_protocols(["h2", "http/1.1"])
    client = handshake(ServerTls(pair.cert, pair.key), client_context)
    assert client.version() == "TLSv1.3"
    assert client.selected_alpn_protocol() == "http/1.1"


def test_nothing_older_than_tls_1_2(good):
    tls = ServerTls(good.cert, good.key)
    assert tls.context.minimum_version is ssl.TLSVersion.TLSv1_2
    context = good.client_context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert handshake(tls, context).version() == "TLSv1.2"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_ciphers("DEFAULT@SECLEVEL=0")
    context.load_verify_locations(good.cert)
    with pytest.warns(DeprecationWarning, match="TLSv1"):  # noqa: PT031
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError):
        handshake(tls, context)


def test_without_both_settings_there_is_nothing_to_check(good):
    assert told_of(None, None) == []
    assert told_of(good.cert, None) == ["--tls-cert: given without --tls-key; TLS needs both"]
    assert told_of(None, good.key) == ["--tls-key: given without --tls-cert; TLS needs both"]


def told_of(cert: str | None, key: str | None) -> list[str]:
    return server_problems(Settings(tls_cert=Path(cert) if cert else None, tls_key=Path(key) if key else None))


def problems_of(cert: str, key: str) -> list[str]:
    """What the operator is told; and a gateway is told the same, unless only the dates are wrong."""
    found = [line.removeprefix("--tls-cert, --tls-key: ") for line in told_of(cert, key)]
    assert found == find_problems(cert, key)
    return find_problems(cert, key)


def test_every_file_that_cannot_be_read_is_named(good, folder):
    assert problems_of(str(folder / "none.crt"), str(folder)) == [
        f"{folder}/none.crt: cannot be read: No such file or directory",
        f"{folder}: cannot be read: is not a regular file",
    ]
    assert problems_of(good.cert, str(folder / "none.key")) == [
        f"{folder}/none.key: cannot be read: No such file or directory"
    ]


def test_files_that_hold_something_else(good, folder):
    (problem,) = problems_of(good.key, good.key)
    assert problem.startswith(f"{good.key}: no certificate in PEM")
    (problem,) = problems_of(good.cert, good.cert)
    assert problem.startswith(f"{good.cert}: no private key in PEM")
    empty = folder / "empty"
    empty.touch()
    (problem,) = problems_of(str(empty), good.key)
    assert problem.startswith(f"{empty}: no certificate in PEM")


def test_a_key_of_another_certificate(good, other, tmp_path):
    same_kind = make_certificate(tmp_path)
    for pair in (other, same_kind):
        (problem,) = problems_of(good.cert, pair.key)
        assert problem == f"{pair.key}: the key is not that of the certificate in {good.cert}"
        with pytest.raises(TlsError, match="is not that of the certificate"):
            ServerTls(good.cert, pair.key)


def test_nobody_is_asked_for_a_passphrase(good, tmp_path):
    encrypted = encrypt_key(good, tmp_path)
    (problem,) = problems_of(good.cert, encrypted)
    assert problem.startswith(f"{encrypted}: the key has a passphrase")


def test_a_certificate_that_has_expired_is_refused_at_the_start_only(tmp_path):
    pair = make_certificate(tmp_path, days=0)
    assert problems_of(pair.cert, pair.key) == [f"{pair.cert}: the certificate is expired"]
    ServerTls(pair.cert, pair.key)


def test_a_new_certificate_is_for_new_handshakes(good, other, tmp_path):
    cert, key = tmp_path / "cert", tmp_path / "key"
    cert.write_bytes(Path(good.cert).read_bytes())
    key.write_bytes(Path(good.key).read_bytes())
    tls = ServerTls(str(cert), str(key))
    handshake(tls, good.client_context())
    cert.write_bytes(Path(other.cert).read_bytes())
    with pytest.raises(TlsError, match="is not that of"):
        tls.reload()
    handshake(tls, good.client_context())
    key.write_bytes(Path(other.key).read_bytes())
    tls.reload()
    handshake(tls, other.client_context())
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tls, good.client_context())
