"""The vector cache of a real server with two gateways: what it saves, and what empties it."""

import re
from collections.abc import Iterator, Sequence

import httpx
import numpy as np
import pytest

from tests.support.serving import Server, eventually, exact_server

MAX_BYTES = 4_000_000
TEXTS = [f"text {number} of some, to be embedded" for number in range(40)]
OTHERS = [f"another {number} of these" for number in range(40)]
LOOKUPS = "vecd_vector_cache_lookups_total"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with exact_server("--workers", "1", "--gateways", "2", "--vector-cache", str(MAX_BYTES)) as running:
        yield running


def metric(client: httpx.Client, name: str) -> int:
    """As the client's gateway tells it."""
    text = client.get("/metrics").raise_for_status().text
    found = re.search(rf"^{re.escape(name)} ([\d.e+]+)$", text, re.MULTILINE)
    assert found is not None, name
    return int(float(found[1]))


def computed(client: httpx.Client) -> int:
    return metric(client, "vecd_sequences_total")


def embed(client: httpx.Client, texts: Sequence[str], **fields: object) -> list[object]:
    answer = client.post("/v1/embeddings", json={"input": texts, **fields})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["usage"]["total_tokens"] > 0
    return [item["embedding"] for item in body["data"]]


def test_the_second_request_computes_nothing_and_a_reload_empties_the_cache(server):
    with server.client_of(0) as client:
        first = embed(client, TEXTS)
        as_base64 = embed(client, TEXTS[:3], encoding_format="base64")
        assert computed(client) == len(TEXTS)
        assert embed(client, TEXTS[::-1]) == first[::-1]
        assert embed(client, TEXTS[:3], encoding_format="base64") == as_base64
        short = embed(client, TEXTS[:1], dimensions=384)
        assert short == first[:1]
        assert computed(client) == len(TEXTS)
        assert metric(client, LOOKUPS + '{result="miss"}') == len(TEXTS)
        assert metric(client, LOOKUPS + '{result="hit"}') == len(TEXTS) + 3 + 3 + 1
        stats = client.get("/stats").json()["vector_cache"]
        num_bytes = metric(client, "vecd_vector_cache_bytes")
        assert stats == {"max_bytes": MAX_BYTES, "bytes": num_bytes, "hits": len(TEXTS) + 7, "misses": len(TEXTS)}
        assert num_bytes >= len(TEXTS) * 4 * 384
        assert "reloaded: " in server.reload_outcome()
        assert metric(client, "vecd_vector_cache_bytes") == 0
        again = embed(client, TEXTS)
        assert computed(client) == 2 * len(TEXTS)
        assert np.abs(np.array(again) - np.array(first)).max() < 1e-5


def test_a_killed_gateway_leaves_right_rows_to_the_other_and_its_successor(server):
    with server.client_of(0) as first, server.client_of(1) as second:
        expected = embed(first, TEXTS)
        before = computed(second)
        assert embed(second, TEXTS) == expected, "one gateway finds what the other has stored"
        assert computed(second) == before
        more = embed(second, OTHERS)
        gateway = server.gateways()[0]
        gateway.kill()
        assert np.abs(np.array(embed(second, TEXTS)) - np.array(expected)).max() < 1e-5
    eventually(lambda: 0 in (present := server.gateways()) and present[0].pid != gateway.pid, 30)
    with server.client_of(0) as successor:
        eventually(lambda: successor.get("/health").status_code == 200)
        before = computed(successor)
        assert embed(successor, OTHERS) == more
        assert computed(successor) == before, "the other gateway's rows are still there"
        assert np.abs(np.array(embed(successor, TEXTS)) - np.array(expected)).max() < 1e-5
