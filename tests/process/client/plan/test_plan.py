"""`vecd plan` with a server that it starts, with one that runs, and with one that is not there."""

import json

import pytest

from tests.support.serving import running_server
from vecd.client.plan.command import main

FLAGS = ["--documents", "1e6", "--tokens", "64", "--measure-s", "2"]


def plan(capsys: pytest.CaptureFixture[str], *flags: str) -> dict:
    assert main([*FLAGS, "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def check(found: dict) -> None:
    """The figures follow from the measured ones."""
    assert found["measured"]["documents_per_s"] > 0
    assert not found["measured"]["is_cut"]
    assert found["measured"]["document_tokens"] == pytest.approx(64, rel=0.1)
    assert found["dimensions"] == 384
    assert found["output_bytes"] == 10**6 * 384 * 4
    assert found["node_hours"] * 3600 * found["measured"]["documents_per_s"] == pytest.approx(10**6)
    assert 100 < found["document_bytes"] < 1000


def test_a_server_with_the_real_model_is_started(capsys):
    found = plan(capsys, "--", "--workers", "1", "--dtype", "float32")
    check(found)
    assert found["model"] == "all-MiniLM-L6-v2"


def test_a_running_server_is_measured(capsys):
    with running_server("--engine", "dummy", "--workers", "1", "--api-key", "a-key-of-20-letters-") as server:
        given = ("--url", server.url, "--api-key", "a-key-of-20-letters-")
        check(plan(capsys, *given, "--nodes", "3"))
        assert main([*FLAGS, "--url", server.url]) == 1
        assert "refuses to embed: 401" in capsys.readouterr().err
        assert main(["--documents", "1", "--tokens", "4096", "--measure-s", "1", *given]) == 0
        said = capsys.readouterr().out
        assert "The model reads 256 of the 4,096 tokens; the rest costs nothing." in said


def test_what_cannot_be_measured_is_one_line(capsys):
    assert main([*FLAGS, "--url", "http://127.0.0.1:9"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("vecd plan: http://127.0.0.1:9 cannot be measured: ")
    assert main([*FLAGS, "--model", "./nowhere"]) == 1
    assert "no such folder" in capsys.readouterr().err
