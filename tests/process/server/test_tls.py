"""`vecd serve` with --tls-cert and --tls-key: stock clients over HTTPS, and what is wrong with the files."""

import subprocess
from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI

from tests.support.certificates import Certificate, make_certificate
from tests.support.serving import Server, clean_environment, running_server, vecd
from vecd.client.embed.command import main as embed

DUMMY = ("--engine", "dummy", "--workers", "1")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module")
def server(certificate: Certificate) -> Iterator[Server]:
    flags = ("--tls-cert", certificate.cert, "--tls-key", certificate.key, "--gateways", "2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", certificate.cert)  # whom this process' clients trust
        with running_server(*DUMMY, *flags) as running:
            yield running
            assert "Traceback" not in running.stderr


def test_stock_clients(server):
    assert server.url.startswith("https://")
    client = OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=30, max_retries=0)
    answer = client.embeddings.create(model="any", input=["Hello, world", "second text"])
    assert len(answer.data) == 2
    with httpx.Client(base_url=server.url, timeout=30) as http:
        for _ in range(3):
            assert http.get("/health").status_code == 200


def test_a_large_body_and_a_large_answer(server):
    with httpx.Client(base_url=server.url, timeout=60) as http:
        texts = [f"text {number} " + "and so on " * 100 for number in range(1000)]
        answer = http.post("/v1/embeddings", json={"input": texts})
        assert answer.status_code == 200
        assert [item["index"] for item in answer.json()["data"]] == list(range(1000))


def test_http_in_the_clear_is_told_to_use_https(server):
    for _ in range(3):
        refused = httpx.get(server.url.replace("https://", "http://") + "/live", timeout=30)
        assert refused.status_code == 400
        assert refused.headers["content-type"].startswith("text/plain")
        assert "https" in refused.text


def test_vecd_embed(server, certificate, tmp_path, capsys):
    """The answer of a TLS port to plain HTTP, a 400, is not taken for an error of the texts."""
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    flags = [str(tmp_path / "a.txt"), "-o", str(tmp_path / "v.npy"), "--url"]
    plain = server.url.replace("https://", "http://")
    assert embed([*flags, plain]) == 1
    assert f"{plain}: it speaks TLS: use {server.url}; no row is done" in capsys.readouterr().err
    assert embed([*flags, server.url, "--ca", certificate.cert]) == 0


@pytest.mark.parametrize("problem", ["one flag alone", "another key"])
def test_a_pair_that_cannot_be_used_ends_the_start(problem, certificate, tmp_path):
    flags = ["--tls-cert", certificate.cert]
    if problem == "another key":
        flags += ["--tls-key", make_certificate(tmp_path).key]
    (tmp_path / "tmp").mkdir()
    ended = subprocess.run(
        vecd("--port", "0", *DUMMY, *flags),
        env=clean_environment(tmp_path, {}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert "--tls-cert" in ended.stderr
    assert ("without --tls-key" if problem == "one flag alone" else "not that of the certificate") in ended.stderr
