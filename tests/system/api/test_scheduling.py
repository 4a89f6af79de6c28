"""Fairness, priorities, deadlines and refusals of a real server. Its engine takes time and no processor: what is
scheduled, and when, is the gateway's."""

import asyncio
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.serving import Server, eventually, running_server
from tests.support.shared_servers import DUMMY
from tests.support.texts import make_texts
from tests.system.api.test_keys import headers, write_keys

BULK = [f"text {n}: " + "many words that are asked for in one request of a great many texts " * 5 for n in range(400)]
"""Two seconds of work."""
NUM_GREEDY = 100
LONG = "words of which there are so many that the tenant who sends them wants all that there is of the server " * 4
_numbers = itertools.count()


def long_texts(num: int) -> list[str]:
    """No two of all that are made are the same, so that each is computed."""
    return [f"{next(_numbers)} {LONG}" for _ in range(num)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Whose queue is full for a tenant after five seconds' worth of work."""
    keys = {"greedy": "", "polite": "", "lowly": 'max_priority = "bulk"'}
    path = write_keys(tmp_path_factory.mktemp("keys") / "keys.toml", **keys)
    with running_server(*DUMMY, "--dummy-ms-per-text", "5", "--max-wait", "5", "--keys-file", path) as server:
        yield server


@pytest.fixture
def bulk(server: Server):
    """A request that keeps the worker busy for seconds; its answer."""
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(post, server, BULK)
        eventually(lambda: queue(server)["sequences"] > 100)
        yield answer
        assert answer.result().status_code == 200
        assert len(answer.result().json()["data"]) == len(BULK)


def post(server: Server, texts: list[str] | str, name: str = "polite", **more: str) -> httpx.Response:
    body = {"input": texts, "encoding_format": "base64"}
    asked = {**headers(name), **{header.replace("_", "-"): value for header, value in more.items()}}
    return httpx.post(f"{server.url}/v1/embeddings", json=body, headers=asked, timeout=120)


def queue(server: Server) -> dict[str, int]:
    return httpx.get(f"{server.url}/info", headers=headers("polite")).json()["queue"]


def test_a_short_request_is_answered_while_a_bulk_request_still_waits(server, bulk):
    assert post(server, "short").status_code == 200
    assert not bulk.done()


def test_a_request_is_given_up_at_its_own_deadline_and_nothing_of_it_is_left(server):
    late = post(server, BULK, x_vecd_timeout_ms="300")
    assert late.status_code == 503
    assert "No answer before the request's deadline" in late.json()["error"]["message"]
    assert queue(server) == {"requests": 0, "sequences": 0, "tokens": 0}
    assert post(server, "the next").status_code == 200


@pytest.mark.parametrize(
    ("name", "asked"), [("polite", "bulk"), ("lowly", "interactive")], ids=["of the request", "at most, of the key"]
)
def test_bulk_priority_waits_for_normal(server, name, asked):
    with ThreadPoolExecutor() as threads:
        low = threads.submit(post, server, BULK, name, x_vecd_priority=asked)
        eventually(lambda: queue(server)["sequences"] > 100)
        assert post(server, long_texts(600), "greedy").status_code == 200
        assert not low.done(), "in fair turns as many of both would have been computed"
        assert low.result().status_code == 200


def test_the_learned_speed_is_shown(server):
    post(server, BULK[:50])
    [worker] = httpx.get(f"{server.url}/info", headers=headers("polite")).json()["workers"]
    assert worker["tokens_per_s"] > 0
    assert 128 <= worker["short_batch_tokens"] <= worker["batch_tokens"] <= 2048


def test_a_greedy_tenant_does_not_disturb_a_polite_one(server):
    """As in tests/unit/gateway/scheduling/test_scheduler.py, where turns are counted: here that none is refused and
    that each answer is what it is in peace, while the greedy one is told that its queue is full."""
    texts = [text for text in make_texts(40) if text.strip()][:6]
    expected = [item["embedding"] for item in post(server, texts).json()["data"]]
    statuses: list[int] = []
    wrong: list[str] = []

    async def send(client: httpx.AsyncClient, n: int) -> None:
        """One large request after the other, but for one connection of ten, which sends one text."""
        is_bulk, at = n % 10 != 0, n % len(texts)
        while True:
            body = {"input": long_texts(16) if is_bulk else texts[at], "encoding_format": "base64"}
            answer = await client.post(f"{server.url}/v1/embeddings", json=body, headers=headers("greedy"))
            statuses.append(answer.status_code)
            if answer.status_code == 429:
                await asyncio.sleep(0.5)  # the test's own process must not be what is busy
            elif not is_bulk and answer.json()["data"][0]["embedding"] != expected[at]:
                wrong.append(f"greedy {n}")

    async def run() -> None:
        limits = httpx.Limits(max_connections=NUM_GREEDY)
        async with (
            asyncio.timeout(120),
            httpx.AsyncClient(timeout=120, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            flood = [group.create_task(send(client, n)) for n in range(NUM_GREEDY)]
            while not {200, 429} <= set(statuses):
                await asyncio.sleep(0.05)
            for text, vector in zip(texts, expected, strict=True):
                answer = await asyncio.to_thread(post, server, text)
                assert answer.status_code == 200, answer.text
                assert answer.json()["data"][0]["embedding"] == vector
            for task in flood:
                task.cancel()

    asyncio.run(run())
    assert wrong == []
    assert set(statuses) <= {200, 429}
    eventually(lambda: queue(server)["requests"] == 0)


# --- servers of their own ---------------------------------------------------------------------------------------


def test_a_request_larger_than_any_queue_is_served_in_pieces():
    with running_server("--engine", "dummy", "--max-inputs", "20000") as server:
        answer = post(server, [f"text {n}" for n in range(20_000)])
        assert answer.status_code == 200
        assert len(answer.json()["data"]) == 20_000
        assert post(server, ["text"] * 20_001).status_code == 400
