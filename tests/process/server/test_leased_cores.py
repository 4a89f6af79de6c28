"""Leases of cores in a real server: a lone client's batches, and its vectors."""

import os
import signal
from pydoc_data.topics import topics

import httpx
import numpy as np
import pytest

from tests.support.serving import RunningServer, Server, eventually, running_server

_NUM_REQUESTS, _NUM_WORDS = 60, 60
_WORDS = " ".join(topics.values()).split()


def _ask(client: httpx.Client, text: str) -> np.ndarray:
    response = client.post("/v1/embeddings", json={"input": text}).raise_for_status()
    return np.array(response.json()["data"][0]["embedding"])


def _metric(server: Server, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return max(float(line.split()[-1]) for line in lines if line.startswith(name))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_a_lone_client_gets_idle_cores_and_the_same_vectors(float32_server: RunningServer) -> None:
    texts = [" ".join(_WORDS[n * _NUM_WORDS :][:_NUM_WORDS]) for n in range(_NUM_REQUESTS)]
    expected = np.array(float32_server.embed(texts))
    with (
        running_server("--dtype", "float32", "--workers", "2") as leasing,
        httpx.Client(base_url=leasing.url, timeout=60) as one,
    ):
        for text, vector in zip(texts, expected, strict=True):
            np.testing.assert_allclose(_ask(one, text), vector, atol=1e-6)
        # Other tests use the cores, too. What they use is not lent.
        assert _metric(leasing, "vecd_batches_leased_total") > 0 or _metric(leasing, "vecd_cores_used_by_others") > 0.5
        workers = leasing.info()["workers"]
        os.kill(next(worker["pid"] for worker in workers if len(worker["thread_choices"]) > 1), signal.SIGKILL)
        for text, vector in zip(texts, expected, strict=True):
            np.testing.assert_allclose(_ask(one, text), vector, atol=1e-6)
        eventually(lambda: all(worker["state"] == "idle" for worker in leasing.info()["workers"]))
        assert _metric(leasing, "vecd_cores_leased") == 0
