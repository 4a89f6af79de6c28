"""`vecd check --fleet` with nodes that do not know the identity of their model, or answer otherwise than vecd does."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.http_stub import Answer, StubServer
from vecd.base.target import parse_target
from vecd.launch.check.fleet import TEXTS, Node, ask_all, compare


class SilentNode(StubServer):
    def __init__(self, num_unknown: int) -> None:
        """Knows the identity of its model after that many requests for it."""
        super().__init__()
        self.num_unknown = num_unknown

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        value: dict[str, Any]
        if method == "POST":
            return 200, bytes(4 * 8 * len(TEXTS)), {"x-vecd-dimensions": "8"}
        if path == "/info":
            value = {"version": "1", "max_input_length": 256, "max_client_batch_size": 32, "model_dtype": "float32"}
        else:
            self.num_unknown -= 1
            identity = None if self.num_unknown >= 0 else "a;dtype=float32"
            value = {"data": [{"id": "m", "root": "m", "capabilities": ["dense"], "identity": identity}]}
        return 200, json.dumps(value).encode(), {}


@pytest.mark.parametrize(("num_unknown", "is_known"), [(3, True), (100, False)])
def test_nodes_that_do_not_know_their_identity_cannot_be_compared(num_unknown: int, is_known: bool) -> None:
    with SilentNode(num_unknown) as server:
        urls = [server.url, server.url.replace("127.0.0.1", "localhost")]
        nodes = [Node(parse_target(url), url) for url in urls]
        asyncio.run(ask_all(nodes, None, 10.0, pause_s=0.0))
    said = "" if is_known else "cannot be compared: the identity of m is not known there"
    assert [node.error for node in nodes] == [said] * 2
    assert compare(nodes) == []


DESCRIBED = {"id": "m", "root": "m", "capabilities": ["dense"], "identity": "0"}


class OddNode(StubServer):
    def __init__(self, listed: Any, status: int, embedded: bytes) -> None:
        super().__init__()
        self.listed, self.status, self.embedded = listed, status, embedded

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        if method == "POST":
            return self.status, self.embedded, {"x-vecd-dimensions": "8"}
        info = {"version": "1", "max_input_length": 256, "max_client_batch_size": 32, "model_dtype": "float32"}
        return 200, json.dumps(info if path == "/info" else self.listed).encode(), {}


@pytest.mark.parametrize(
    ("listed", "status", "embedded", "said"),
    [
        ([], 200, b"", "vecd server of this version (TypeError"),
        ({}, 200, b"", "vecd server of this version (KeyError"),
        ({"data": [DESCRIBED | {"capabilities": []}]}, 200, b"", "vecd server of this version (IndexError"),
        ({"data": [DESCRIBED | {"root": 1}]}, 200, b"", "vecd server of this version (StopIteration"),
        ({"data": [DESCRIBED]}, 200, b"x", "vecd server of this version (http"),
        ({"data": [DESCRIBED | {"id": "o"}]}, 200, bytes(640), "vecd server of this version (KeyError"),
        ({"data": [DESCRIBED | {"identity": 1}]}, 200, bytes(640), "vecd server of this version (AttributeError"),
        ({"data": [DESCRIBED]}, 401, b"", "answers 401: give a key with --api-key or VECD_API_KEY"),
        ({"data": [DESCRIBED]}, 429, b"full", "answers 429: full"),
    ],
)
def test_a_node_that_answers_otherwise(listed: Any, status: int, embedded: bytes, said: str) -> None:
    with OddNode(listed, status, embedded) as server:
        node = Node(parse_target(server.url), server.url)
        asyncio.run(ask_all([node], None, 10.0, pause_s=0.01))
    assert said in node.error
