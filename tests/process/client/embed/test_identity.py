"""Whose results a run takes: one server that changes, and nodes behind a proxy that picks any."""

from pathlib import Path

import numpy as np
import orjson
import pytest

from tests.support.bulk_server import AT_ONCE, BulkServer, vectors_of
from vecd.client.embed.command import main

TEXTS = [f"text {n}" for n in range(60)]
RIGHT, OTHER = (f"{digit * 32};dtype=float32" for digit in "ab")
NODE, OTHER_NODE = (RIGHT, "made-up"), (OTHER, "another")
HALF_SIZE = (f"{'a' * 32};dtype=bfloat16", "another")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS))
    return path


def embed(server: BulkServer, source: Path, *flags: str) -> int:
    where = flags or ("-o", str(source.with_name("v.npy")))
    return main([str(source), *where, "--url", server.url, "--batch-texts", "4", "--concurrency", "2"], AT_ONCE)


def check(path: Path) -> None:
    np.testing.assert_array_equal(np.load(path), vectors_of(TEXTS))


@pytest.mark.parametrize("wrong", [OTHER_NODE, HALF_SIZE, (None, "another")])
def test_a_proxy_with_a_node_of_another_identity(server, source, wrong):
    """Also one in another number format, and one so old that it knows no identities."""
    server.nodes = [wrong, NODE]
    assert embed(server, source) == 0
    check(source.with_name("v.npy"))
    demanded = [headers.get("if-vecd-identity") for headers in server.headers]
    assert demanded[0] is None
    assert set(demanded[1:]) == {RIGHT}


def test_a_server_that_says_no_identity_is_refused(server, source, capsys):
    server.nodes = [(None, "made-up")]
    assert embed(server, source) == 2
    told = "it does not say the identity of its model (x-vecd-identity), by which a run knows that all its rows are of"
    assert f"{server.url}: {told} one model" in capsys.readouterr().err
    assert [path.name for path in source.parent.iterdir()] == [source.name]


def test_the_identity_of_a_server_that_still_reads_its_weights_is_waited_for(server, source):
    server.nodes, server.told = [(None, "made-up")], {"identity": None}

    def know_later(texts: list[str]) -> None:
        if len(server.bodies) == 3:
            server.nodes = [NODE]

    server.fail = know_later
    assert embed(server, source) == 0
    check(source.with_name("v.npy"))
    demanded = [headers.get("if-vecd-identity") for headers in server.headers]
    assert demanded[:3] == [None] * 3
    assert set(demanded[3:]) == {RIGHT}


def test_a_server_that_changes_ends_the_run_which_goes_on_with_the_first_identity(server, source, capsys):
    def fail(texts: list[str]) -> None:
        if "text 30" in texts:
            server.nodes = [OTHER_NODE]

    server.nodes, server.fail = [NODE], fail
    assert embed(server, source) == 1
    told = capsys.readouterr().err
    assert f"{server.url} has another model: its identity is {OTHER}, and this run began with {RIGHT}; " in told
    assert "rows are done, the same command goes on behind them" in told
    journal = orjson.loads(source.with_name("v.npy.journal").read_bytes())
    assert journal["model"]["identity"] == RIGHT
    assert journal["commit"]["position"]["row"] >= 20, "what came before is right, and committed"

    server.fail = lambda texts: None
    assert embed(server, source) == 2
    assert "the unfinished run had another model: " in capsys.readouterr().err
    server.nodes = [OTHER_NODE, NODE]
    assert embed(server, source) == 0
    check(source.with_name("v.npy"))


def test_a_folder_has_one_identity(server, source, capsys):
    out = source.with_name("out")
    other = source.with_name("b.txt")
    other.write_text(source.read_text())
    server.nodes = [NODE]
    assert embed(server, source, "--output-dir", str(out)) == 0
    assert orjson.loads((out / ".vecd-identity.json").read_bytes()) == {"identity": RIGHT}
    server.nodes = [OTHER_NODE]
    for flags in ([], ["--restart"]):
        assert embed(server, other, "--output-dir", str(out), *flags) == 2
        told = capsys.readouterr().err
        assert f"its identity is {OTHER}, and this run began with {RIGHT}" in told
        assert "name another folder" in told
    assert sorted(path.name for path in out.iterdir()) == [".vecd-identity.json", "a.npy"]
    server.nodes = [OTHER_NODE, NODE]
    assert embed(server, other, "--output-dir", str(out)) == 0
    check(out / "b.npy")
