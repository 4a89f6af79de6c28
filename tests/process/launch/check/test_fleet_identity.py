"""`vecd check --fleet` with nodes that do not know the identity of their model, yet or ever."""

import asyncio
import base64
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
            value = {"data": [{"embedding": base64.b64encode(bytes(4 * 8)).decode()} for _ in TEXTS]}
        elif path == "/info":
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
