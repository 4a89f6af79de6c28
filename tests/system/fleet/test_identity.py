"""A node of another identity joins a fleet: those who demand one never get the other's vectors."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.support.fleet import DUMMY, HAProxy, Node
from vecd import Client, IdentityMismatch

pytestmark = pytest.mark.skipif(not os.environ.get("VECD_FLEET"), reason="make test-fleet has it")

LINES = [f"line {n} {'of words that go on ' * 8}" for n in range(3000)]
"""Longer than the other node reads, so that its vectors are others."""


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HAProxy]:
    folder = tmp_path_factory.mktemp("fleet")
    flags = [*DUMMY, "--overflow", "truncate"]
    nodes = [Node(folder / "right", *flags), Node(folder / "other", *flags, "--max-tokens", "16")]
    proxy = HAProxy(folder / "proxy", nodes)
    try:
        for program in (*nodes, proxy):
            program.start()
            program.await_ready()
        yield proxy
    finally:
        for program in (proxy, *nodes):
            program.close()


def identity_of(node: Node) -> str:
    with Client(node.url) as client:
        client.embed(LINES[:1])
        assert client.identity is not None
        return client.identity


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "vecd", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_demand_is_met_or_refused_and_never_mixed(proxy: HAProxy):
    right, other = map(identity_of, proxy.nodes)
    assert right != other
    body = {"input": LINES[:2], "model": "any"}
    seen = set()
    for _ in range(20):
        answer = httpx.post(f"{proxy.url}/v1/embeddings", json=body, headers={"if-vecd-identity": right})
        seen.add((answer.status_code, answer.headers["x-vecd-identity"]))
        if answer.status_code == 412:
            error = answer.json()["error"]
            assert error["code"] == "identity_mismatch"
            assert right in error["message"]
            assert other in error["message"]
    assert seen == {(200, right), (412, other)}


def test_the_client_raises_and_mixes_nothing(proxy: HAProxy):
    right = identity_of(proxy.nodes[0])
    with Client(proxy.nodes[0].url) as direct:
        expected = direct.embed(LINES)
    outcomes = set()
    for _ in range(12):
        with Client(proxy.url, identity=right, connections=1) as client:
            try:
                assert np.array_equal(client.embed(LINES[:1]), expected[:1])
                outcomes.add("right")
            except IdentityMismatch:
                outcomes.add("refused")
    assert outcomes == {"right", "refused"}


def test_a_bulk_run_has_the_vectors_of_its_first_node_alone(proxy: HAProxy, tmp_path: Path):
    (tmp_path / "lines.txt").write_text("\n".join(LINES) + "\n")
    found = run("embed", str(tmp_path / "lines.txt"), "-o", str(tmp_path / "lines.npy"), "--url", proxy.url)
    assert found.returncode == 0, found.stderr
    expected = []
    for node in proxy.nodes:
        with Client(node.url) as client:
            expected.append(client.embed(LINES))
    assert not np.array_equal(expected[0], expected[1])
    vectors = np.load(tmp_path / "lines.npy")
    assert any(np.array_equal(vectors, each) for each in expected)


def test_the_nodes_are_told_apart(proxy: HAProxy):
    found = run("check", "--fleet", *(node.url for node in proxy.nodes))
    assert found.returncode == 1, found.stdout + found.stderr
    assert all(node.url in found.stdout for node in proxy.nodes)
    assert all(identity_of(node) in found.stdout for node in proxy.nodes)
