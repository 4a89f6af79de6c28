"""The vector cache of real servers: what it saves, who shares it, and what empties it."""

import re
import subprocess
from collections.abc import Sequence
from hashlib import sha256

import httpx
import numpy as np
import pytest

from tests.support.serving import Server, clean_environment, eventually, exact_server, vecd

CACHE = ("--vector-cache", "4000000")
TEXTS = [f"text {number} of some, to be embedded" for number in range(40)]
OTHERS = [f"another {number} of these" for number in range(40)]
LOOKUPS = "vecd_vector_cache_lookups_total"


def metric(server: Server, name: str, key: str = "") -> int:
    text = httpx.get(f"{server.url}/metrics", headers=with_key(key)).raise_for_status().text
    found = re.search(rf"^{re.escape(name)} ([\d.e+]+)$", text, re.MULTILINE)
    assert found is not None, name
    return int(float(found[1]))


def computed(server: Server, key: str = "") -> int:
    return metric(server, "vecd_sequences_total", key)


def with_key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def embed(client: httpx.Client, texts: Sequence[str], key: str = "", **fields: object) -> list[object]:
    answer = client.post("/v1/embeddings", json={"input": texts, **fields}, headers=with_key(key))
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["usage"]["total_tokens"] > 0
    return [item["embedding"] for item in body["data"]]


def test_the_second_request_computes_nothing_and_a_reload_empties_the_cache():
    with exact_server("--workers", "1", *CACHE) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        first = embed(client, TEXTS)
        as_base64 = embed(client, TEXTS[:3], encoding_format="base64")
        assert computed(server) == len(TEXTS)
        assert embed(client, TEXTS[::-1]) == first[::-1]
        assert embed(client, TEXTS[:3], encoding_format="base64") == as_base64
        short = embed(client, TEXTS[:1], dimensions=384)
        assert short == first[:1]
        assert computed(server) == len(TEXTS)
        assert metric(server, LOOKUPS + '{result="miss"}') == len(TEXTS)
        assert metric(server, LOOKUPS + '{result="hit"}') == len(TEXTS) + 3 + 3 + 1
        stats = httpx.get(f"{server.url}/stats").json()["vector_cache"]
        num_bytes = metric(server, "vecd_vector_cache_bytes")
        assert stats == {"max_bytes": 4000000, "bytes": num_bytes, "hits": len(TEXTS) + 7, "misses": len(TEXTS)}
        assert num_bytes >= len(TEXTS) * 4 * 384
        assert "reloaded: " in server.reload_outcome()
        assert metric(server, "vecd_vector_cache_bytes") == 0
        again = embed(client, TEXTS)
        assert computed(server) == 2 * len(TEXTS)
        assert np.abs(np.array(again) - np.array(first)).max() < 1e-5


@pytest.mark.parametrize("who", ["tenant", "all"])
def test_another_key_computes_its_own_unless_all_share(who, tmp_path):
    keys = {name: f"the-secret-of-{name}-0123456789" for name in ("alice", "bob", "root")}
    entries = [
        f'[[keys]]\nname = "{name}"\nsha256 = "{sha256(key.encode()).hexdigest()}"\n' for name, key in keys.items()
    ]
    path = tmp_path / "keys.toml"
    path.write_text("\n".join(entries))
    flags = ("--keys-file", str(path), "--share-computed", who)
    with (
        exact_server("--workers", "1", *CACHE, *flags) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        of_alice = embed(client, TEXTS[:4], keys["alice"])
        of_bob = embed(client, TEXTS[:4], keys["bob"])
        assert embed(client, TEXTS[:4], keys["bob"]) == of_bob
        assert np.abs(np.array(of_alice) - np.array(of_bob)).max() < 1e-5
        assert (of_alice == of_bob) or who == "tenant"
        assert computed(server, keys["root"]) == (8 if who == "tenant" else 4)


def test_a_killed_gateway_leaves_right_rows_to_the_other_and_its_successor():
    with exact_server("--workers", "1", "--gateways", "2", *CACHE) as server:
        with server.client_of(0) as first, server.client_of(1) as second:
            expected = embed(first, TEXTS)
            assert embed(second, TEXTS) == expected, "one gateway finds what the other has stored"
            assert computed(server) == len(TEXTS)
            more = embed(second, OTHERS)
            gateway = server.gateways()[0]
            gateway.kill()
            assert np.abs(np.array(embed(second, TEXTS)) - np.array(expected)).max() < 1e-5
        eventually(lambda: 0 in (present := server.gateways()) and present[0].pid != gateway.pid, 30)
        with server.client_of(0) as successor:
            eventually(lambda: successor.get("/health").status_code == 200)
            before = computed(server)
            assert embed(successor, OTHERS) == more
            assert computed(server) == before, "the other gateway's rows are still there"
            assert np.abs(np.array(embed(successor, TEXTS)) - np.array(expected)).max() < 1e-5


def test_what_does_not_fit_is_refused_before_the_start(tmp_path):
    for given, said in (
        ("100", r"--vector-cache: 100 bytes given, this model needs at least 12608 "),
        ("1000000000000000", r"--vector-cache: 1000000000000000 bytes given, \d+ bytes of memory are free"),
        ("-1", r"--vector-cache: must be a whole number of at least 0"),
    ):
        ended = subprocess.run(
            vecd("--port", "0", "--vector-cache", given), capture_output=True, text=True, timeout=60, check=False,
            env=clean_environment(tmp_path, {}),
        )  # fmt: skip
        assert ended.returncode == 2
        assert re.search(said, ended.stderr), ended.stderr
