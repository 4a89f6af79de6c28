"""A model that is loaded on demand, at a gateway with played workers and a played supervisor."""

import asyncio
import os
from array import array
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import orjson
import pytest

from tests.support.asking import body_of
from tests.support.dispatching import DEADLINE_S, SPEC, Worker
from tests.support.pipelines import app_of, planned_config
from tests.unit.gateway.test_service import NoTexts, http_request
from vecd.gateway.errors import ApiError
from vecd.gateway.request import HttpRequest, Response, TokenizedInput
from vecd.gateway.service import Service
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.launch.sockets import make_zmq_endpoint
from vecd.shm.control import (
    Activate,
    KeepAlive,
    Message,
    ModelAsked,
    ModelDrained,
    ModelIs,
    ModelUsed,
    ModelWanted,
    Retired,
    WorkerDown,
    WorkerUp,
)

GENERATION = 1
WANTED, DRAINED = ModelWanted(GENERATION), ModelDrained(GENERATION)


class Numbers(NoTexts):
    """A tokenizer of texts that are numbers, each of two tokens."""

    least_tokens = 1

    def estimate_tokens(self, inputs: list[str], tokenizing: object) -> int:
        return 2 * len(inputs)

    def tokenize_now(self, inputs: list[str], tokenizing: object) -> list[TokenizedInput]:
        return [TokenizedInput(array("i", [int(text)] * 2).tobytes(), 2, False) for text in inputs]


class Bench:
    def __init__(self, **changes: Any) -> None:
        self.sent: list[Message] = []
        self.tokenizer = Numbers()
        card = replace(planned_config().card, dim=SPEC.dim, hidden_size=SPEC.dim, steps=())
        self._config = replace(
            planned_config(), model="m", card=card, arena=SPEC, max_batch_tokens=16, max_tokens=16, num_workers=1,
            chat_template=None, **{"keep_alive_s": 300.0, "load": "demand", **changes},
        )  # fmt: skip
        self.app = app_of(self._config, self.tokenizer, sent=self.sent)
        self.service = self.app.active
        self._listening, self._address_fd = make_zmq_endpoint()
        self.service.dispatcher.start(self._listening.detach())
        self._worker: Worker | None = None
        self._num_lives = 0

    def make(self, generation: int) -> Service:
        return Service(self._config, generation, cast(Tokenizer, self.tokenizer), self.app.process)

    def tell(self, message: Message, fds: Iterable[int] = ()) -> None:
        self.app.on_message(message, list(fds))

    def change(self, state: str, **fields: Any) -> None:
        self.tell(ModelIs(GENERATION, state, **fields))

    @property
    def worker(self) -> Worker:
        assert self._worker is not None
        return self._worker

    def start_worker(self) -> Worker:
        self._num_lives += 1
        self._worker = Worker(self._address_fd, 0, self._num_lives)
        self.tell(WorkerUp(GENERATION, self.worker.incarnation, {}), [self.worker.fd])
        return self.worker

    def end_worker(self, *, is_planned: bool = True) -> None:
        self.tell(WorkerDown(self.worker.incarnation, "was ended", is_planned=is_planned))
        self.worker.close()
        self._worker = None

    async def load(self) -> Worker:
        self.change("loading", wait_s=3.0)
        worker = self.start_worker()
        await until(lambda: self.service.dispatcher.links[0].is_usable or worker.receive_nowait() is not None)
        self.change("ready")
        return worker

    def ask(self, path: str, body: Any = None, **options: Any) -> "asyncio.Task[Response]":
        fields = {"body": orjson.dumps(body or {}), "is_admin": path.startswith("/admin"), **options}
        return asyncio.ensure_future(self._ask(http_request(path, method="GET" if body is None else "POST", **fields)))

    async def _ask(self, request: HttpRequest) -> Response:
        try:
            return await self.app.handle(request)
        except ApiError as error:
            return self.app.render_error(error, request)

    def embed(self, *numbers: int, **options: Any) -> "asyncio.Task[Response]":
        return self.ask("/v1/embeddings", {"input": [str(number) for number in numbers]}, **options)

    def of_kind(self, *kinds: type[Message]) -> list[Message]:
        return [message for message in self.sent if isinstance(message, kinds)]

    def close(self) -> None:
        self.service.stop()
        self.tokenizer.threads.close()
        if self._worker is not None:
            self._worker.close()
        os.close(self._address_fd)


async def until(is_so: Callable[[], Any]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not is_so():
            await asyncio.sleep(0.001)


async def turns(num: int = 20) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


@asynccontextmanager
async def serving(state: str = "unloaded", **changes: Any) -> AsyncIterator[Bench]:
    bench = Bench(**changes)
    try:
        if state == "ready":
            await bench.load()
        else:
            bench.change(state, wait_s=3.0)
        bench.sent.clear()
        async with asyncio.timeout(3 * DEADLINE_S):
            yield bench
    finally:
        bench.close()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with serving() as bench:
        yield bench


def _note(finished: list[int], number: int, _: "asyncio.Task[Response]") -> None:
    finished.append(number)


def numbers_in(response: Response) -> list[float]:
    assert response.status == 200, body_of(response)
    return [item["embedding"][0] for item in orjson.loads(body_of(response))["data"]]


def error_of(response: Response) -> tuple[int, str, str]:
    """Its status, its code, and when to come again."""
    code = orjson.loads(body_of(response))["error"]["code"]
    return response.status, code, response.headers.get("retry-after", "")


# --- a load ---------------------------------------------------------------------------------------------------------


async def test_a_request_waits_for_the_load(bench: Bench):
    assert (await bench.ask("/health")).status == 200
    asking = [bench.embed(7, 8), bench.embed(9)]
    await turns()
    assert bench.sent == [WANTED]
    assert (await bench.ask("/health")).status == 200
    bench.change("loading", wait_s=3.0)
    worker = bench.start_worker()
    await turns()
    assert not any(each.done() for each in asking)
    batch = await worker.receive()  # as soon as it is connected
    worker.answer(batch)
    bench.change("ready")
    assert [numbers_in(await each) for each in asking] == [[7, 8], [9]]
    assert bench.of_kind(ModelWanted) == [WANTED]
    assert orjson.loads(body_of(await bench.ask("/health"))) == {
        "status": "ok",
        "model_files": "as loaded",
        "state": "ready",
    }


async def test_a_thousand_requests_make_one_load_and_are_answered_in_their_order(bench: Bench):
    finished: list[int] = []
    asking = [bench.embed(number) for number in range(1000)]
    for number, each in enumerate(asking):
        each.add_done_callback(partial(_note, finished, number))
    await turns()
    bench.change("loading", wait_s=3.0)
    await turns()
    assert bench.of_kind(ModelWanted) == [WANTED]
    assert bench.service.admission.num_requests == 1000
    refused = [await bench.embed(5) for _ in range(3)]
    assert [error_of(each) for each in refused] == [(503, "model_loading", "3")] * 3
    worker = await bench.load()
    while not all(each.done() for each in asking):
        if (batch := worker.receive_nowait()) is not None:
            worker.answer(batch)
        await asyncio.sleep(0)
    assert [numbers_in(each.result()) for each in asking] == [[number] for number in range(1000)]
    assert finished == sorted(finished)
    assert len(bench.of_kind(ModelWanted)) == 1
    assert not bench.service.admission.num_requests


async def test_the_estimate_of_the_wait_counts_again_once_the_model_is_ready():
    async with serving(max_wait=1e-9) as bench:
        asking = [bench.embed(number) for number in range(20)]
        await turns()
        assert not any(each.done() for each in asking), "none is refused for a wait that nothing is known of"
        await bench.load()
        refused = await bench.embed(1)
        assert refused.status == 429
        for each in asking:
            each.cancel()
        await asyncio.wait(asking)


async def test_a_failed_load(bench: Bench):
    asking = [bench.embed(7), bench.embed(8)]
    describing = bench.ask("/v1/models")
    await turns()
    bench.change("loading")
    bench.change("failed", reason="no file config.json", wait_s=20.0)
    for each in asking:
        assert error_of(await each) == (503, "model_failed", "20")
    assert (await describing).status == 200
    refused = await bench.embed(9)
    assert error_of(refused)[:2] == (503, "model_failed")
    assert b"no file config.json" in body_of(refused)
    health = await bench.ask("/health")
    assert health.status == 503
    assert b"no file config.json" in body_of(health)
    assert bench.of_kind(ModelWanted) == [WANTED]
    bench.change("failed", reason="no file config.json", wait_s=0.01)
    await asyncio.sleep(0.02)
    again = bench.embed(10)
    await turns()
    assert bench.of_kind(ModelWanted) == [WANTED, WANTED]
    worker = await bench.load()
    worker.answer(await worker.receive())
    assert numbers_in(await again) == [10]


async def test_deadlines(bench: Bench):
    in_vain = bench.embed(1, headers={"x-vecd-timeout-ms": "1000"})
    assert error_of(await in_vain) == (503, "model_loading", "3"), "the load takes three seconds"
    assert bench.sent == [WANTED]
    bench.change("loading", wait_s=0.01)
    late = bench.embed(1, headers={"x-vecd-timeout-ms": "100"})
    assert error_of(await late) == (503, "model_loading", "1")
    assert not bench.service.admission.num_requests


async def test_a_client_that_goes_while_it_waits_leaves_nothing(bench: Bench):
    asking = [bench.embed(7), bench.embed(8), bench.ask("/admin/models/m/load", {})]
    await turns()
    assert bench.service.policy.queued_sequences == 2
    for each in asking:
        each.cancel()
    await asyncio.wait(asking)
    assert (bench.service.admission.num_requests, bench.service.policy.queued_sequences) == (0, 0)
    assert (bench.service.num_handled, bench.service.residence._watchers) == (0, {})
    bench.change("unloaded")
    assert bench.of_kind(ModelWanted) == [WANTED]


async def test_the_drain_of_the_server_answers_those_who_wait(bench: Bench):
    asking = [bench.embed(7), bench.ask("/admin/models/m/load", {}), bench.ask("/api/embed", {"input": ""})]
    await turns()
    bench.app.process.is_draining = True
    assert not any(each.done() for each in asking)
    bench.app.give_up()
    for each in asking:
        response = await each
        assert response.status == 503
        assert b"shutting down" in body_of(response)


async def test_those_who_wait_for_a_generation_that_is_replaced_come_again(bench: Bench):
    asking = bench.embed(7)
    await turns()
    after = bench.app.all[2] = bench.make(2)
    cast(Any, after.dispatcher).activate = lambda: None  # it has no socket
    bench.tell(Activate(2))
    assert error_of(await asking) == (503, "reloading", "1")
    await until(lambda: Retired(GENERATION) in bench.sent)


async def test_a_model_is_available_before_its_first_worker_has_answered():
    async with serving("loading") as bench:
        worker = bench.start_worker()
        bench.change("ready")
        assert (await bench.ask("/health")).status == 200
        asking = bench.embed(7)
        worker.answer(await worker.receive())
        assert numbers_in(await asking) == [7]
        bench.end_worker(is_planned=False)
        assert (await bench.ask("/health")).status == 503


# --- the end of a stay ----------------------------------------------------------------------------------------------


async def test_a_model_that_drains_gets_no_batch_and_is_reported_when_it_has_none():
    async with serving("ready") as bench:
        worker = bench.worker
        before = bench.embed(7)
        batch = await worker.receive()
        bench.change("draining", reason="operator")
        after = bench.embed(8)
        await asyncio.sleep(0.05)
        assert worker.receive_nowait() is None
        assert bench.of_kind(ModelDrained, ModelWanted) == [WANTED]
        worker.answer(batch)
        assert numbers_in(await before) == [7]
        assert bench.of_kind(ModelDrained, ModelWanted) == [WANTED, DRAINED]
        bench.end_worker()
        bench.change("unloaded", reason="operator")
        assert bench.of_kind(ModelDrained, ModelWanted) == [WANTED, DRAINED, WANTED]
        assert not after.done()
        worker = await bench.load()
        worker.answer(await worker.receive())
        assert numbers_in(await after) == [8]
        assert bench.service.dispatcher.known.num_worker_deaths == 0


async def test_an_idle_model_is_drained_at_once_and_is_not_wanted():
    async with serving("ready") as bench:
        bench.change("draining", reason="idle")
        assert bench.sent == [DRAINED]
        bench.change("draining", reason="idle", nbytes=5)
        bench.end_worker()
        bench.change("unloaded", reason="idle")
        assert bench.sent == [DRAINED]


async def test_a_worker_that_has_not_answered_its_probe_is_waited_for():
    async with serving("loading") as bench:
        bench.start_worker()
        bench.change("draining")
        await asyncio.sleep(0.05)
        assert bench.of_kind(ModelDrained) == []
        bench.end_worker(is_planned=False)
        assert bench.of_kind(ModelDrained) == [DRAINED]


async def test_a_batch_that_is_lost_while_the_model_drains_waits_for_the_next_load(caplog):
    async with serving("ready") as bench:
        worker = bench.worker
        asking = bench.embed(7)
        await worker.receive()
        bench.change("draining")
        bench.end_worker()
        assert bench.of_kind(ModelDrained) == [DRAINED]
        bench.change("unloaded")
        assert bench.of_kind(ModelWanted) == [WANTED]
        worker = await bench.load()
        worker.answer(await worker.receive())
        assert numbers_in(await asking) == [7]
        assert not caplog.records, "an end that is planned is no news"


async def test_a_model_whose_workers_did_not_stay_alive_is_loaded_again_after_an_unload():
    async with serving("ready") as bench:
        bench.service.dispatcher.set_broken("crashes")
        assert error_of(await bench.embed(1))[1] == "model_broken"
        bench.change("draining")
        bench.end_worker()
        bench.change("unloaded")
        asking = bench.embed(2)
        await turns()
        assert bench.of_kind(ModelWanted) == [WANTED]
        asking.cancel()


# --- its use --------------------------------------------------------------------------------------------------------


async def test_use_is_reported_where_it_matters():
    async with serving("ready") as bench:
        worker = bench.worker
        asking = bench.embed(7)
        batch = await worker.receive()
        await until(lambda: bench.of_kind(ModelUsed))
        assert bench.of_kind(ModelUsed) == [ModelUsed(GENERATION, 0.0, 1)]
        worker.answer(batch)
        await asking
        await until(lambda: len(bench.of_kind(ModelUsed)) == 2)
        assert bench.of_kind(ModelUsed)[1] == ModelUsed(GENERATION, 1e-6, 0)


# --- commands -------------------------------------------------------------------------------------------------------


async def test_an_operator_s_commands(bench: Bench):
    loading = bench.ask("/admin/models/m/load", {})
    at_once = await bench.ask("/admin/models/m/load", {}, query=b"wait=false")
    assert (at_once.status, orjson.loads(body_of(at_once))["state"]) == (202, "unloaded")
    assert bench.sent == [ModelAsked(GENERATION, "load")] * 2
    assert not loading.done()
    await bench.load()
    described = orjson.loads(body_of(await loading))
    assert ((await loading).status, described["id"], described["state"]) == (200, "m", "ready")
    unloading = bench.ask("/admin/models/m/unload", {})
    await turns()
    bench.change("draining", reason="operator")
    bench.end_worker()
    bench.change("unloaded", reason="operator", num_unloads={"operator": 1}, nbytes=77, num_loads=2, load_s=1.5)
    described = orjson.loads(body_of(await unloading))
    assert described["unloads"] == {"operator": 1}
    assert (described["bytes"], described["loads"], described["load_s"]) == (77, 2, 1.5)
    failing = bench.ask("/admin/models/m/load", {})
    await turns()
    bench.change("loading")
    bench.change("failed", reason="no file", wait_s=5.0)
    response = await failing
    assert response.status == 503
    assert b"no file" in body_of(response)


async def test_aliases_and_names_with_slashes_are_commanded():
    async with serving("ready", aliases=("org/m", "other")) as bench:
        for name in ("org/m", "other"):
            assert (await bench.ask(f"/admin/models/{name}/load", {})).status == 200
        assert bench.sent == [ModelAsked(GENERATION, "load")] * 2
        [listed] = orjson.loads(body_of(await bench.ask("/admin/models")))["models"]
        assert (listed["id"], listed["aliases"], listed["state"]) == ("m", ["org/m", "other"], "ready")


# --- Ollama's clients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), [("/api/embed", {"input": ""}), ("/api/embeddings", {"model": "m"})])
async def test_a_request_without_a_text_has_the_model_loaded(bench: Bench, path, body):
    asking = bench.ask(path, body)
    await turns()
    assert bench.sent == [WANTED]
    assert not asking.done()
    await bench.load()
    response = orjson.loads(body_of(await asking))
    if path == "/api/embed":
        assert response["embeddings"] == []
        assert response["load_duration"] > 0
    assert bench.of_kind(KeepAlive) == []


async def test_a_client_s_time_counts_where_that_is_allowed():
    async with serving("ready", client_keep_alive=True) as bench:
        worker = bench.worker
        for _ in range(2):
            asking = bench.ask("/api/embed", {"input": "7", "keep_alive": "1h"})
            worker.answer(await worker.receive())
            assert orjson.loads(body_of(await asking))["embeddings"][0]
        assert bench.of_kind(KeepAlive) == [KeepAlive(GENERATION, 3600.0)]
        wrong = await bench.ask("/api/embed", {"input": "7", "keep_alive": "soon"})
        assert wrong.status == 400
        assert b"keep_alive" in body_of(wrong)
        assert (await bench.ask("/api/embed", {"input": [], "keep_alive": 0})).status == 200
        assert bench.of_kind(KeepAlive)[1:] == [KeepAlive(GENERATION, 0.0)]
        assert bench.of_kind(ModelWanted) == []


async def test_a_client_s_time_is_ignored_where_it_is_not_allowed():
    async with serving("ready") as bench:
        worker = bench.worker
        asking = bench.ask("/api/embed", {"input": "7", "keep_alive": "soon"})
        worker.answer(await worker.receive())
        assert (await asking).status == 200
        for value in ("soon", 0, "5m", None, -1):
            assert (await bench.ask("/api/embed", {"input": "", "keep_alive": value})).status == 200
        assert bench.of_kind(KeepAlive, ModelWanted) == []


async def test_an_unload_by_a_client_loads_nothing():
    async with serving(client_keep_alive=True) as bench:
        assert (await bench.ask("/api/embed", {"input": "", "keep_alive": 0})).status == 200
        assert bench.sent == []


async def test_what_runs(bench: Bench):
    assert orjson.loads(body_of(await bench.ask("/api/ps"))) == {"models": []}
    assert [each["name"] for each in orjson.loads(body_of(await bench.ask("/api/tags")))["models"]] == ["m:latest"]
    assert orjson.loads(body_of(await bench.ask("/v1/models")))["data"][0]["state"] == "unloaded"
    await bench.load()
    [running] = orjson.loads(body_of(await bench.ask("/api/ps")))["models"]
    assert running["size_vram"] == 0
    assert running["expires_at"][:2] == "20"
    assert orjson.loads(body_of(await bench.ask("/v1/models")))["data"][0]["state"] == "ready"
    bench.service.residence.keep_alive(None)
    [running] = orjson.loads(body_of(await bench.ask("/api/ps")))["models"]
    assert running["expires_at"] == "2262-04-11T23:47:16+00:00"
