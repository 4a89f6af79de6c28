import json
import random
import statistics
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks import rerank
from benchmarks.checkpoints import save_cross_encoder
from benchmarks.goals import limit_under_bulk
from benchmarks.pairs import EQUAL, MIXED, QUERY_TOKENS, RerankBody, TextSource, staggered
from benchmarks.recipes import cross_encoder
from benchmarks.servers import Server, ServerFailure, bundled_model
from benchmarks.steady import rate_of
from vecd.client.connection import parse_target
from vecd.shm.card import read_card

OURS, THEIRS = Server("http://127.0.0.1:1", 1), Server("http://127.0.0.1:2", 2)
BODY = RerankBody("query", ["a", "b", "c", "d"])


@pytest.fixture(scope="module")
def source() -> TextSource:
    return TextSource(Path(bundled_model()), seed=0)


@pytest.fixture(scope="module")
def num_tokens():
    tokenizer = Tokenizer.from_file(f"{bundled_model()}/tokenizer.json")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def test_mixed_documents_have_100_tokens_on_average() -> None:
    rng = random.Random(0)
    lengths = [MIXED.draw(rng) for _ in range(50_000)]
    assert statistics.mean(lengths) == pytest.approx(100, abs=1)
    assert (min(lengths), max(lengths)) == (20, 400)


def test_texts_have_exactly_as_many_tokens_as_drawn(source: TextSource, num_tokens) -> None:
    body = source.body(EQUAL)
    assert num_tokens(body.query) == QUERY_TOKENS
    assert [num_tokens(document) for document in body.documents] == [100] * 32


def test_no_two_documents_are_the_same(source: TextSource) -> None:
    documents = [document for _ in range(30) for document in source.body(MIXED).documents]
    assert len(set(documents)) == len(documents) == 960


def test_the_same_seed_gives_the_same_requests() -> None:
    sources = [TextSource(Path(bundled_model()), seed=7) for _ in range(2)]
    first, second = (source.body(MIXED, 3) for source in sources)
    assert first == second


def test_a_request_is_rendered_for_the_route_that_all_have() -> None:
    head, _, body = BODY.render(parse_target("http://127.0.0.1:8000")).partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/rerank HTTP/1.1\r\n")
    assert json.loads(body) == {"query": "query", "documents": ["a", "b", "c", "d"], "raw_scores": True}


def test_first_requests_have_more_and_more_documents() -> None:
    first = staggered([BODY] * 4)
    assert [body.documents for body in first] == [["a"], ["a", "b"], ["a", "b", "c"], ["a", "b", "c", "d"]]
    assert [len(body.documents) for body in staggered([BODY] * 8)] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_a_rate_is_from_one_response_to_another() -> None:
    answers = [(10.0, 32), (11.0, 32), (14.0, 16), (18.0, 32), (19.0, 32)]
    assert rate_of(answers, 8.0) == ((32 + 16 + 32) / 8, 3)
    assert rate_of(answers, 8.5) == ((32 + 16 + 32 + 32) / 9, 4)
    assert rate_of(answers, 9.5) is None
    assert rate_of([], 1.0) is None


def test_a_peer_with_other_scores_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = {OURS: {0: 0.5, 1: -0.25, 2: 1.0, 3: 0.0}, THEIRS: {3: 0.0, 2: 1.00005, 1: -0.25, 0: 0.5}}
    monkeypatch.setattr(rerank, "_scores", lambda server, _: scores[server])
    assert rerank.require_same_scores(OURS, THEIRS, [BODY]) == pytest.approx(5e-5)
    scores[THEIRS][0] = 0.5002
    with pytest.raises(ServerFailure, match=r"differ from vecd's by up to 0\.0002"):
        rerank.require_same_scores(OURS, THEIRS, [BODY])


def test_the_cross_encoder_is_a_reranker_with_a_head_of_one_label(tmp_path: Path) -> None:
    card = read_card(save_cross_encoder(tmp_path / "model"))
    assert card.capabilities == ("rerank", "classify")
    assert (card.num_labels, card.max_tokens, card.model_type) == (1, 512, "bert")


def test_fastapi_has_its_processes_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi", reason="needs vecd[bench]")
    monkeypatch.setattr("benchmarks.recipes.program", lambda name: name)
    recipe = cross_encoder("/model", 1, 2)
    assert recipe.environment["BENCH_THREADS"] == recipe.environment["OMP_NUM_THREADS"] == "2"
    assert recipe.environment["BENCH_MODEL"] == "/model"
    assert recipe.num_started == 1
    assert recipe.command[recipe.command.index("--workers") + 1] == "1"


def test_the_limit_beside_bulk_is_of_measured_figures() -> None:
    assert limit_under_bulk(10.0, 50.0) == 130.0
