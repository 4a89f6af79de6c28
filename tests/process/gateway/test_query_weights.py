"""Queries of a sparse model with static weights: the way of a request that needs no worker's rows."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.dispatching import DEADLINE_S, Bench, running_bench
from vecd.gateway.admission.admission import Admission
from vecd.gateway.admission.principals import Principal
from vecd.gateway.encoding.query_weights import read_query_weights
from vecd.gateway.encoding.sparse import SparseRows
from vecd.gateway.pipeline import Pipeline
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.gateway.types.request import Embedded, EmbedRequest, Role, SparseOptions, Tokenizing
from vecd.gateway.types.timeline import RequestTimeline
from vecd.launch.config.plan import make_plan
from vecd.launch.config.settings import load_settings
from vecd.shm.heads import SparseHead
from vecd.shm.output import Output

WEIGHTS = {"hello": 2.5, "world": 1.25, "the": 0.25, "[CLS]": 9.0, "[SEP]": 9.0}


class Served:
    """The bundled model's tokenizer, as that of a sparse model, in front of a worker that is never asked."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        (folder / "idf.json").write_text(json.dumps(WEIGHTS))
        planned = make_plan(load_settings(["--port", "0"])).gateway
        head = SparseHead((), query_weights="idf.json")
        card = replace(planned.card, capabilities=("sparse",), dim=planned.card.vocab_size, sparse=head)
        card = replace(card, folder=str(folder))
        self.tokenizer = Tokenizer(card, 64, "auto")
        self._pipeline = Pipeline(
            replace(planned, card=card, arena=bench.spec, request_timeout_s=DEADLINE_S),
            admission=Admission(max_requests=100, max_wait_s=60, policy=bench.policy, workers=bench.dispatcher),
            tokenizer=self.tokenizer,
            policy=bench.policy,
            dispatcher=bench.dispatcher,
            residence=bench.residence,
            shared_metrics=bench.shared_metrics,
            query_weights=read_query_weights(card, self.tokenizer.id_of),
        )

    async def ask(self, *inputs: Any, role: Role | None = Role.QUERY, **fields: Any) -> Embedded:
        request = EmbedRequest(list(inputs), output=Output.SPARSE, tokenizing=Tokenizing(role=role), **fields)
        timeline = RequestTimeline()
        timeline.arrived_at = asyncio.get_running_loop().time()
        async with asyncio.timeout(DEADLINE_S):
            return await self._pipeline.embed(request, 10, timeline, Principal("a"))

    def expected(self, *words: str) -> dict[int, float]:
        return {self.id_of(word): WEIGHTS[word] for word in words}

    def id_of(self, word: str) -> int:
        found = self.tokenizer.id_of(word)
        assert found is not None
        return found


def vectors_of(embedded: Embedded) -> list[dict[int, float]]:
    [rows] = embedded.collectors
    assert isinstance(rows, SparseRows)
    assert all((np.diff(indices) > 0).all() for indices, _ in rows.vectors)
    return [dict(zip(indices.tolist(), weights.tolist(), strict=True)) for indices, weights in rows.vectors]


@pytest.mark.parametrize("num_copies", [1, 3000], ids=["at once", "in runs"])
async def test_a_query_needs_no_worker(num_copies: int, tmp_path: Path) -> None:
    async with running_bench() as bench:
        model = Served(bench, tmp_path)
        embedded = await model.ask(*["Hello, hello the world", "nothing of that", "", "hello [SEP]"] * num_copies)
        expected = [model.expected("hello", "the", "world"), {}, {}, model.expected("hello", "[SEP]")]
        assert vectors_of(embedded) == expected * num_copies
        assert embedded.num_tokens > 0


async def test_options_hold_for_queries_too(tmp_path: Path) -> None:
    async with running_bench() as bench:
        model = Served(bench, tmp_path)
        first = await model.ask("hello the world", sparse=SparseOptions(top_k=1))
        assert vectors_of(first) == [model.expected("hello")]
        large = await model.ask("hello the world", sparse=SparseOptions(min_weight=1.0))
        assert vectors_of(large) == [model.expected("hello", "world")]


async def test_token_ids_are_queries_as_well(tmp_path: Path) -> None:
    async with running_bench() as bench:
        model = Served(bench, tmp_path)
        framed = [model.id_of(word) for word in ("[CLS]", "hello", "world", "[SEP]")]
        assert vectors_of(await model.ask(framed)) == [model.expected("hello", "world")]


@pytest.mark.parametrize("role", [None, Role.DOCUMENT])
async def test_documents_wait_for_a_worker(role: Role | None, tmp_path: Path) -> None:
    async with running_bench() as bench:
        model = Served(bench, tmp_path)
        asking = asyncio.ensure_future(model.ask("hello the world", role=role))
        while not bench.policy.queued_tokens:
            await asyncio.sleep(0)
            assert not asking.done()
        asking.cancel()
        await asyncio.wait([asking])


async def test_many_queries_leave_turns_of_the_event_loop_to_others(tmp_path: Path) -> None:
    """A run of short texts has hundreds of queries, each of which is weighed on the event loop."""
    async with running_bench() as bench:
        model = Served(bench, tmp_path)
        largest, last, num_weighed = 0, 0, 0
        put_weights = SparseRows.put_weights

        def count(rows: SparseRows, index: int, weights: Any) -> None:
            nonlocal num_weighed
            num_weighed += 1
            put_weights(rows, index, weights)

        async def watch() -> None:
            nonlocal largest, last
            while True:
                largest, last = max(largest, num_weighed - last), num_weighed
                await asyncio.sleep(0)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SparseRows, "put_weights", count)
            watching = asyncio.create_task(watch())
            await model.ask(*["hi"] * 2000)
            watching.cancel()
        assert num_weighed == 2000
        assert 0 < largest <= 64
