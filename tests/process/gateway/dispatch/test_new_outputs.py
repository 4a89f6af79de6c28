"""Scores, sparse vectors and vectors of tokens, from a request through a worker's socket and back.

The worker is the real loop with the dummy engine, whose rows depend on token ids, order and border: whatever is lost or
taken for another's shows.
"""

import asyncio
import json
import threading
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.cards import CLASSIFIER, HYBRID, LEXICAL, MULTI_VECTOR, RERANKER, SPARSE, TOKEN_CLASSIFIER
from tests.support.dispatching import DEADLINE_S, EPOCH, Bench, live_worker, running_bench, sequences_of
from tests.support.pipelines import Piped, planned_config
from vecd.gateway import pipeline
from vecd.gateway.dispatch import delivery
from vecd.gateway.encoding import streams
from vecd.gateway.encoding.result import Result
from vecd.gateway.encoding.sparse import read_query_weights
from vecd.gateway.encoding.streams import MaxSimRows
from vecd.gateway.errors import BadRequest, ServerError, TooManyRequests
from vecd.gateway.request import Embedded, Encoding, Form, Role, TokenizedInput, Tokenizing
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.model.card import ModelCard
from vecd.model.steps import SparseHead
from vecd.shm.arena import ArenaSpec
from vecd.shm.output import Output
from vecd.shm.shared_metrics import Counter
from vecd.shm.views import Rows
from vecd.shm.wire import Batch, Done
from vecd.workers.batch import Finish, PackedBatch
from vecd.workers.dummy import DummyEngine, dummy_rows

BAD = 13
"""The token of a sequence whose first float is not a number."""
MATRIX = Form(Encoding.BYTES)


class FaultyEngine(DummyEngine):
    def begin(self, batch: PackedBatch, rows: Rows) -> Finish:
        finish = super().begin(batch, rows)
        starts = np.cumsum(batch.lengths) - batch.lengths
        rows[batch.first_rows[batch.token_ids[starts] == BAD], 0] = np.nan
        return finish


class IdsWithBorder:
    """A tokenizer of what is tokenized already: an input is its border and its token ids; one whose border is below 0
    is split in two."""

    def tokenize_now(self, inputs: list[list[int]], tokenizing: object) -> list[TokenizedInput] | None:
        return [self._tokenized(border, ids) for border, *ids in inputs]

    def _tokenized(self, border: int, ids: list[int]) -> TokenizedInput:
        token_ids = array("i", ids).tobytes()
        chunks = (TokenizedInput(token_ids, len(ids), False, weight=1),) * 2 if border < 0 else ()
        return TokenizedInput(token_ids, len(ids), False, border=max(0, border), chunks=chunks)


class IdsInRuns(IdsWithBorder):
    """The same, but each input is tokenized by itself, as those of a large request are."""

    def __init__(self) -> None:
        self.num_taken = 0

    def tokenize_now(self, inputs: list[list[int]], tokenizing: object) -> None:
        return None

    async def tokenize(
        self, inputs: list[list[int]], tokenizing: object, tenant: str
    ) -> AsyncIterator[list[TokenizedInput]]:
        for border, *ids in inputs:
            self.num_taken += 1
            yield [self._tokenized(border, ids)]


class Served(Piped):
    """A model behind a pipeline, a dispatcher and one worker."""

    def __init__(self, bench: Bench, card: ModelCard, tokenizer: Any = None) -> None:
        """`tokenizer` None: one that takes all inputs at once."""
        super().__init__(bench, tokenizer or IdsWithBorder(), card=card, max_tokens=16)
        self.card = card

    def ask(self, output: Output, *inputs: list[int], **fields: Any) -> asyncio.Task[Embedded]:
        return self.embed(*inputs, output=output, **fields)

    def rows(self, output: Output, border: int, *ids: int) -> NDArray[np.float32]:
        """What the worker computes for one input: [1 or T, width]."""
        borders = np.array([border], dtype=np.int32)
        batch = PackedBatch(np.array([len(ids)], dtype=np.int32), np.array(ids, dtype=np.int32), borders=borders)
        return dummy_rows(output, batch, self.card)


@asynccontextmanager
async def served(card: ModelCard, *, rows_per_slot: int = 8, tokenizer: Any = None) -> AsyncIterator[Served]:
    spec = ArenaSpec(num_slots=2, rows_per_slot=rows_per_slot, dim=card.row_dim)
    async with running_bench(spec=spec, card=card) as bench:
        with live_worker(bench, FaultyEngine(card), card):
            yield Served(bench, card, tokenizer)
            assert bench.stuck == []


def made_of(embedded: Embedded) -> Any:
    [made] = embedded.made
    return made


async def test_scores_are_those_of_each_pair_and_its_border():
    inputs = [[0, 1, 2, 3], [1, 1, 2, 3], [2, 1, 2, 3], [0, 7], [1, 1, 2, 3]]
    async with served(CLASSIFIER) as model:
        embedded = await model.ask(Output.SCORES, *inputs)
        made = made_of(embedded)
        assert np.array_equal(made.rows, np.vstack([model.rows(Output.SCORES, *each) for each in inputs]))
        assert len({row.tobytes() for row in made.rows}) == 4, "a border is a part of the input"
        assert embedded.token_ids == []


async def test_identical_pairs_are_computed_once_and_no_others():
    async with served(RERANKER) as model:
        requests = [model.ask(Output.SCORES, [1, 1, 2, 3], [2, 1, 2, 3]) for _ in range(3)]
        rows = [made_of(await request).rows for request in requests]
        expected = np.vstack([model.rows(Output.SCORES, border, 1, 2, 3) for border in (1, 2)])
        assert all(np.array_equal(each, expected) for each in rows)
        assert model.bench.shared_metrics.total(Counter.COALESCED) == 4


@pytest.mark.parametrize("floats_per_turn", [1, 5000, delivery.FLOATS_PER_TURN])
@pytest.mark.parametrize("rows_per_slot", [3, 8])
async def test_sparse_vectors_span_rows_and_come_whole(rows_per_slot: int, floats_per_turn: int, monkeypatch):
    """Three rows each, of 1,024 floats: one or two in a batch."""
    monkeypatch.setattr(delivery, "FLOATS_PER_TURN", floats_per_turn)
    inputs = [[0, n, n + 1] for n in range(20, 29)]
    async with served(SPARSE, rows_per_slot=rows_per_slot) as model:
        first, second = model.ask(Output.SPARSE, *inputs[:5]), model.ask(Output.SPARSE, *inputs[5:])
        vectors = []
        for embedded in (await first, await second):
            made = made_of(embedded)
            vectors += made
        for (indices, weights), (border, *ids) in zip(vectors, inputs, strict=True):
            [expected] = model.rows(Output.SPARSE, border, *ids)
            assert np.array_equal(indices, np.flatnonzero(expected))
            assert np.array_equal(weights, expected[indices])
        assert model.bench.policy.queued_rows == 0


async def test_a_sparse_vector_that_is_not_finite_fails_its_own_request_only():
    async with served(SPARSE) as model:
        sick, well = model.ask(Output.SPARSE, [0, 1], [0, BAD]), model.ask(Output.SPARSE, [0, 2], [0, 3])
        with pytest.raises(ServerError, match=r"not finite for 'input\[1\]'"):
            await sick
        assert len(made_of(await well)) == 2


@pytest.mark.parametrize("floats_per_turn", [1, 20, delivery.FLOATS_PER_TURN])
async def test_all_outputs_of_a_model_with_three_kinds_go_in_one_batch(floats_per_turn: int, monkeypatch):
    """Its rows are wider than its vectors, of which the first floats alone are delivered."""
    monkeypatch.setattr(delivery, "FLOATS_PER_TURN", floats_per_turn)
    inputs = [[0, 0, 11, 12, 11, 2], [2, 0, 15, 2]]
    outputs = (Output.HYBRID, Output.VECTORS, Output.TOKEN_VECTORS, Output.LEXICAL)
    async with served(HYBRID, rows_per_slot=32) as model:
        tasks = [model.ask(output, *inputs, forms=(MATRIX,)) for output in outputs]
        hybrid, vectors, tokens, lexical = [await task for task in tasks]
        dense = np.vstack([model.rows(Output.VECTORS, *each) for each in inputs])
        by_token = [model.rows(Output.HYBRID, *each) for each in inputs]
        made = made_of(hybrid)
        assert np.array_equal(made.dense, dense)
        assert np.array_equal(made_of(vectors).rows, dense)
        for rows in (made.tokens, made_of(tokens)):
            assert all(np.array_equal(found, expected[1:, :-1]) for found, expected in zip(rows, by_token, strict=True))
        for sparse in (made.sparse, made_of(lexical)):
            for (indices, weights), (_, *ids), expected in zip(sparse, inputs, by_token, strict=True):
                largest = {each: max(expected[np.array(ids) == each, -1]) for each in set(ids) - {0, 2}}
                assert dict(zip(indices.tolist(), weights, strict=True)) == {k: v for k, v in largest.items() if v > 0}
        assert [ids.tolist() for ids in hybrid.token_ids] == [ids for _, *ids in inputs]
        assert vectors.token_ids == []


@pytest.mark.parametrize(
    ("card", "output", "dropped"),
    [(TOKEN_CLASSIFIER, Output.TOKEN_SCORES, ()), (MULTI_VECTOR, Output.TOKEN_VECTORS, (5, 9))],
)
async def test_rows_of_tokens_come_as_matrices(card: ModelCard, output: Output, dropped: tuple[int, ...], monkeypatch):
    monkeypatch.setattr(delivery, "FLOATS_PER_TURN", 2 * card.row_dim)
    inputs = [[3, 1, 5, 7, 5, 9], [0, 4], [1, 2, 3]]
    async with served(card) as model:
        embedded = await model.ask(output, *inputs)
        made = made_of(embedded)
        for matrix, (border, *ids) in zip(made, inputs, strict=True):
            assert np.array_equal(matrix, model.rows(output, border, *ids)[~np.isin(ids, dropped)])
        assert [ids.tolist() for ids in embedded.token_ids] == [ids for _, *ids in inputs]


@pytest.mark.parametrize(("card", "output"), [(CLASSIFIER, Output.SCORES), (SPARSE, Output.SPARSE)])
async def test_scores_and_sparse_vectors_have_no_mean(card: ModelCard, output: Output):
    async with served(card) as model:
        with pytest.raises(BadRequest, match=r"'input\[1\]' has 2 tokens: .* at most 16, which are not split"):
            await model.ask(output, [0, 1], [-1, 1, 2])
        embedded = await model.ask(output, [0, 1], [0, 2])
        assert embedded.num_tokens == 2


@pytest.mark.parametrize(
    ("card", "output", "num_floats"), [(LEXICAL, Output.LEXICAL, 5), (HYBRID, Output.HYBRID, 5 * 7)]
)
async def test_the_floats_of_a_response_are_as_many_as_the_output_has(
    card: ModelCard, output: Output, num_floats: int, monkeypatch
):
    monkeypatch.setattr(streams, "MAX_TOKEN_FLOATS", num_floats)
    monkeypatch.setattr(pipeline, "MAX_RUNNING_TOKEN_FLOATS", 2 * (2 * num_floats - 1))
    async with served(card, rows_per_slot=16) as model:
        await model.ask(output, [0, 1, 2, 3], [0, 4, 5])
        with pytest.raises(BadRequest, match=r"have 6 tokens or more: .* at most 5 in a request"):
            await model.ask(output, [0, 1, 2, 3], [0, 4, 5, 6])
        both = model.ask(output, [0, 1, 2, 3, 4, 5]), model.ask(output, [0, 1, 2, 3, 4, 5])
        results = await asyncio.gather(*both, return_exceptions=True)
        assert [type(result) for result in results] == [Result, TooManyRequests]
        await model.ask(output, [0, 1, 2, 3, 4, 5])


async def test_one_input_may_have_more_floats_than_several(monkeypatch):
    """8,192 tokens of BGE-M3 have 1,025 floats each, more than 8 Mi: its longest text is served all the same."""
    monkeypatch.setattr(streams, "MAX_TOKEN_FLOATS", 5 * 7)
    monkeypatch.setattr(pipeline, "MAX_RUNNING_TOKEN_FLOATS", 2 * 5 * 7)
    async with served(HYBRID, rows_per_slot=16) as model:
        longest = [0, *range(1, 13)]
        embedded = await model.ask(Output.HYBRID, longest)
        assert embedded.num_tokens == 12
        both = model.ask(Output.HYBRID, longest), model.ask(Output.HYBRID, [0, 1])
        results = await asyncio.gather(*both, return_exceptions=True)
        assert [type(result) for result in results] == [Result, TooManyRequests]
        with pytest.raises(BadRequest, match=r"have 12 tokens or more: .* at most 5 in a request"):
            await model.ask(Output.HYBRID, [0, 1], [0, *range(1, 12)])


# --- MaxSim -----------------------------------------------------------------------------------------------------

QUERIES = [[0, 5, 7, 1], [0, 2, 3]]
MANY = [[0, *range(n % 7 + 1, n % 7 + n % 5 + 6)] for n in range(40)]
"""Documents of 5 to 9 tokens: 40 have many times the floats that a request may keep in these tests."""


def ranking(num_queries: int) -> dict[str, Any]:
    return {"is_max_sim": True, "tokenizing": Tokenizing(role=Role.DOCUMENT, num_queries=num_queries)}


def expected_scores(model: Served, queries: list[list[int]], documents: list[list[int]]) -> list[float]:
    """Of whole matrices. A document's tokens 5 and 9 have no vector, as the card says."""
    scores = []
    for query, (border, *ids) in zip(queries, documents, strict=True):
        document = model.rows(Output.TOKEN_VECTORS, border, *ids)[~np.isin(ids, (5, 9))]
        products = model.rows(Output.TOKEN_VECTORS, *query) @ document.T
        scores.append(float(products.max(axis=1).sum()))
    return scores


def allow(monkeypatch, *, num_tokens: int) -> None:
    """Of one request, and of two of a caller at a time."""
    for module in (pipeline, streams):
        monkeypatch.setattr(module, "MAX_TOKEN_FLOATS", num_tokens * MULTI_VECTOR.token_dim)
    monkeypatch.setattr(pipeline, "MAX_RUNNING_TOKEN_FLOATS", 4 * num_tokens * MULTI_VECTOR.token_dim)


@pytest.mark.parametrize("floats_per_turn", [1, 20, delivery.FLOATS_PER_TURN])
async def test_documents_of_any_number_are_scored_in_the_memory_of_their_query(floats_per_turn: int, monkeypatch):
    """No more of them wait for a worker than may be kept, until the query's rows have come."""
    monkeypatch.setattr(delivery, "FLOATS_PER_TURN", floats_per_turn)
    allow(monkeypatch, num_tokens=20)
    kept, reserved = [], []
    put = MaxSimRows.put

    def noting(made: MaxSimRows, index: int, rows: NDArray[np.float32], num_left: int) -> None:
        put(made, index, rows, num_left)
        kept.append(made.num_floats)
        reserved.append(model.pipeline.token_room.num)

    monkeypatch.setattr(MaxSimRows, "put", noting)
    async with served(MULTI_VECTOR, rows_per_slot=32, tokenizer=IdsInRuns()) as model:
        embedded = await model.ask(Output.TOKEN_VECTORS, QUERIES[0], *MANY, **ranking(1))
        scores = made_of(embedded).scores().tolist()
        assert scores == pytest.approx(expected_scores(model, [QUERIES[0]] * len(MANY), MANY), abs=1e-6)
        assert max(kept) < (20 + 9) * MULTI_VECTOR.token_dim, "the limit, and the document that reaches it"
        assert kept[-1] == kept[len(kept) // 2] == reserved[-1], "nothing is added behind the query"
        both = [model.ask(Output.TOKEN_VECTORS, query, *MANY, **ranking(1)) for query in QUERIES]
        for query, embedded in zip(QUERIES, await asyncio.gather(*both), strict=True):
            scores = made_of(embedded).scores().tolist()
            assert scores == pytest.approx(expected_scores(model, [query] * len(MANY), MANY), abs=1e-6)


async def test_documents_wait_for_their_query_before_more_are_tokenized(monkeypatch):
    allow(monkeypatch, num_tokens=20)
    tokenizer = IdsInRuns()
    bench_options = {"spec": ArenaSpec(num_slots=2, rows_per_slot=32, dim=4)}
    async with running_bench(**bench_options) as bench:
        asked = Served(bench, MULTI_VECTOR, tokenizer).ask(
            Output.TOKEN_VECTORS, QUERIES[0], *[[0, *range(1, 8)]] * 30, **ranking(1)
        )
        async with asyncio.timeout(DEADLINE_S):
            while bench.policy.queued_sequences < 4:
                await asyncio.sleep(0.001)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert (bench.policy.queued_sequences, tokenizer.num_taken) == (4, 5), "3 tokens, and 7 of each of 3 documents"
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert bench.policy.queued_sequences == 0


async def test_as_many_queries_as_documents_are_scored_in_pairs(monkeypatch):
    allow(monkeypatch, num_tokens=40)
    queries = [QUERIES[n % 2] for n in range(12)]
    async with served(MULTI_VECTOR, rows_per_slot=32, tokenizer=IdsInRuns()) as model:
        embedded = await model.ask(Output.TOKEN_VECTORS, *queries, *MANY[:12], **ranking(12))
        scores = made_of(embedded).scores().tolist()
        assert scores == pytest.approx(expected_scores(model, queries, MANY[:12]), abs=1e-6)
        with pytest.raises(BadRequest, match=r"The queries have 43 tokens or more: .* at most 40 in a request"):
            await model.ask(Output.TOKEN_VECTORS, *queries, *queries[:5], *MANY[:17], **ranking(17))


@pytest.mark.parametrize("floats_per_turn", [1, delivery.FLOATS_PER_TURN])
async def test_documents_for_a_long_query_are_compared_in_a_thread_when_there_is_no_room(
    floats_per_turn: int, monkeypatch
):
    monkeypatch.setattr(delivery, "FLOATS_PER_TURN", floats_per_turn)
    allow(monkeypatch, num_tokens=30)
    monkeypatch.setattr(streams, "MAX_SHORT_QUERY", 2)
    threads, kept = [], []
    compare_held = MaxSimRows.compare_held

    def noting(made: MaxSimRows) -> None:
        threads.append(threading.current_thread())
        kept.append(made.num_floats // MULTI_VECTOR.token_dim)
        compare_held(made)

    monkeypatch.setattr(MaxSimRows, "compare_held", noting)
    long, short = QUERIES
    async with served(MULTI_VECTOR, rows_per_slot=32, tokenizer=IdsInRuns()) as model:
        for queries in ([long], [short, long] * 4):
            documents = MANY[: len(queries)] if len(queries) > 1 else MANY
            embedded = await model.ask(Output.TOKEN_VECTORS, *queries, *documents, **ranking(len(queries)))
            of_each = queries if len(queries) > 1 else queries * len(documents)
            assert 1 <= len(threads) <= 12, "not for each document"
            assert threading.current_thread() not in threads
            assert max(kept) < 30 + 9
            scores = made_of(embedded).scores().tolist()
            assert scores == pytest.approx(expected_scores(model, of_each, documents), abs=1e-6)
            threads.clear()


async def test_a_document_whose_worker_dies_is_counted_once(monkeypatch):
    """The query's batch is lost, with a document; the other documents have come before it."""
    async with running_bench(spec=ArenaSpec(num_slots=2, rows_per_slot=8, dim=4), card=MULTI_VECTOR) as bench:
        model = Served(bench, MULTI_VECTOR)
        dying, living = bench.add_worker(0), bench.add_worker(1)
        await bench.all_connected()
        documents = [[0, n, n + 10, n] for n in range(20, 26)]
        asked = model.ask(Output.TOKEN_VECTORS, QUERIES[1], *documents, **ranking(1))
        batches = {dying: await dying.receive(), living: await living.receive()}
        [lost] = [worker for worker, batch in batches.items() if [2, 3] in sequences_of(batch)]
        [other] = [worker for worker in batches if worker is not lost]

        def answer(batch: Batch) -> None:
            lengths, ids = (np.frombuffer(part, dtype="<i4") for part in (batch.lengths_bytes, batch.token_ids_bytes))
            rows = dummy_rows(Output.TOKEN_VECTORS, PackedBatch(lengths, ids), MULTI_VECTOR)
            other.slots[batch.slot][: len(rows), : rows.shape[1]] = rows
            other.send(Done(EPOCH, batch.number, batch.slot, len(rows), 1))

        answer(batches[other])
        await bench.settled(batches[other])
        bench.dispatcher.worker_down(lost.incarnation, "was killed")
        while not asked.done():
            answer(await other.receive())
            await asyncio.sleep(0.05)
        scores = made_of(await asked).scores().tolist()
        assert scores == pytest.approx(expected_scores(model, [QUERIES[1]] * 6, documents), abs=1e-6)


# --- queries of a sparse model with static weights, which need no worker's rows -----------------------------------

WEIGHTS = {"hello": 2.5, "world": 1.25, "the": 0.25, "[CLS]": 9.0, "[SEP]": 9.0}


class Weighed(Piped):
    """The bundled model's tokenizer, as that of a sparse model, in front of a worker that is never asked."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        (folder / "idf.json").write_text(json.dumps(WEIGHTS))
        card = planned_config().card
        head = SparseHead((), query_weights="idf.json")
        card = replace(card, capabilities=("sparse",), dim=card.vocab_size, sparse=head, folder=str(folder))
        self.tokenizer = Tokenizer(card, 64, "auto")
        weights = read_query_weights(card, self.tokenizer.id_of)
        super().__init__(bench, self.tokenizer, card=card, options={"query_weights": weights})

    async def ask(self, *inputs: Any, role: Role | None = Role.QUERY, **fields: Any) -> Embedded:
        async with asyncio.timeout(DEADLINE_S):
            return await self.embed(*inputs, output=Output.SPARSE, tokenizing=Tokenizing(role=role), **fields)

    def expected(self, *words: str) -> dict[int, float]:
        return {self.id_of(word): WEIGHTS[word] for word in words}

    def id_of(self, word: str) -> int:
        found = self.tokenizer.id_of(word)
        assert found is not None
        return found


@pytest.fixture
def weighed(bench: Bench, tmp_path: Path) -> Weighed:
    return Weighed(bench, tmp_path)


def vectors_of(embedded: Embedded) -> list[dict[int, float]]:
    vectors = made_of(embedded)
    assert all((np.diff(indices) > 0).all() for indices, _ in vectors)
    return [dict(zip(indices.tolist(), weights.tolist(), strict=True)) for indices, weights in vectors]


@pytest.mark.parametrize("num_copies", [1, 3000], ids=["at once", "in runs"])
async def test_a_query_needs_no_worker(num_copies, weighed):
    embedded = await weighed.ask(*["Hello, hello the world", "nothing of that", "", "hello [SEP]"] * num_copies)
    expected = [weighed.expected("hello", "the", "world"), {}, {}, weighed.expected("hello", "[SEP]")]
    assert vectors_of(embedded) == expected * num_copies
    assert embedded.num_tokens > 0


@pytest.mark.parametrize("role", [None, Role.DOCUMENT])
async def test_documents_wait_for_a_worker(role, weighed):
    asking = asyncio.ensure_future(weighed.ask("hello the world", role=role))
    while not weighed.bench.policy.queued_tokens:
        await asyncio.sleep(0)
        assert not asking.done()
    asking.cancel()
    await asyncio.wait([asking])
