from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks import rerank
from benchmarks.checkpoints import (
    Shape,
    make_checkpoint,
)
from benchmarks.loads import WORKLOADS, make_load
from benchmarks.pairs import EQUAL, QUERY_TOKENS, RerankBody, TextSource
from benchmarks.servers import Server, ServerFailure, bundled_model
from benchmarks.steady import rate_of
from benchmarks.targets import EQUAL_LENGTHS, equal_name
from benchmarks.turns import median_interval, passes_of_turn, take_turns
from benchmarks.vectors import WrongVectors, require_same
from benchmarks.workload import Work, make_works, packed_batches, padded_batches, texts_of
from vecd.model.card import ModelCard, read_card

SEQUENCES = [tuple(range(1, length + 1)) for length in (5, 2, 9, 1, 4)]


@pytest.fixture(scope="module")
def card() -> ModelCard:
    return read_card(Path(bundled_model()))


@pytest.fixture(scope="module")
def works(card: ModelCard) -> dict[str, Work]:
    return {work.name: work for work in make_works(card)}


def test_packed_batches_hold_every_sequence_in_order() -> None:
    batches = packed_batches(SEQUENCES, 8)
    assert [batch.lengths.tolist() for batch in batches] == [[5, 2], [9], [1, 4]]
    tokens = np.concatenate([batch.token_ids for batch in batches]).tolist()
    assert tokens == [token_id for sequence in SEQUENCES for token_id in sequence]


def test_padded_batches_are_sorted_and_say_where_each_sequence_is() -> None:
    batches = padded_batches(SEQUENCES, 2)
    assert [batch.token_ids.shape for batch in batches] == [(2, 2), (2, 5), (1, 9)]
    for batch in batches:
        for index, token_ids, mask in zip(batch.order, batch.token_ids, batch.mask, strict=True):
            length = len(SEQUENCES[index])
            assert tuple(token_ids[:length]) == SEQUENCES[index]
            assert mask.tolist() == [1] * length + [0] * (len(mask) - length)
            assert not token_ids[length:].any()
    assert sorted(index for batch in batches for index in batch.order) == list(range(len(SEQUENCES)))


def test_works_have_the_lengths_they_are_named_for(works: dict[str, Work]) -> None:
    lengths = works["mixed"].lengths
    assert min(lengths) < 30
    assert max(lengths) <= 256
    assert len(set(lengths)) > 20
    for num_texts, num_tokens in EQUAL_LENGTHS:
        work = works[equal_name(num_texts, num_tokens)]
        assert work.lengths == [num_tokens] * num_texts
        assert len(set(work.sequences)) == num_texts
        assert work.is_latency == (num_texts == 1)
    assert works["long"].lengths == [512] * 4
    cls, sep = 101, 102  # also of those that were cut
    assert {(s[0], s[-1]) for work in works.values() for s in work.sequences} == {(cls, sep)}


@pytest.fixture(scope="module")
def tokenizer(card: ModelCard) -> Tokenizer:
    tokenizer = Tokenizer.from_file(card.tokenizer_file)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def test_texts_have_exactly_the_tokens_asked_for(card: ModelCard, tokenizer: Tokenizer, source: TextSource) -> None:
    texts = texts_of(card, 64, 59)
    assert [len(encoding.ids) for encoding in tokenizer.encode_batch(texts)] == [59] * 64
    body = source.body(EQUAL)
    found = tokenizer.encode_batch([body.query, *body.documents], add_special_tokens=False)
    assert [len(encoding.ids) for encoding in found] == [QUERY_TOKENS] + [100] * 32


class Machine:
    """A clock that only moves while somebody works, and notes who did."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def clock(self) -> float:
        return self.now

    def worker(self, name: str, *seconds: float):
        remaining = list(seconds)

        def run() -> None:
            self.log.append(name)
            self.now += remaining.pop(0) if len(remaining) > 1 else remaining[0]

        return run


def test_each_round_begins_with_another_contender() -> None:
    machine = Machine()
    contenders = {name: machine.worker(name, 1.0) for name in "abc"}
    take_turns(contenders, num_rounds=3, turn_s=0.0, clock=machine.clock)
    assert "".join(machine.log) == "aabbcc" + "bbccaa" + "ccaabb"  # one pass to warm up, one that counts


@pytest.mark.parametrize(
    ("num_values", "expected"),
    [
        (4, None),  # 1 - 2 / 2**4 = 0.875
        (5, (0, 4)),  # 1 - 2 / 2**5 = 0.94
        (7, (0, 6)),  # without the outermost 1 - 2 * 8 / 2**7 = 0.875
        (8, (1, 6)),  # 1 - 2 * 9 / 2**8 = 0.93
        (20, (5, 14)),  # 0.96; one more left out would be 0.88
    ],
)
def test_an_interval_is_as_narrow_as_its_confidence_allows(num_values: int, expected: tuple[int, int] | None) -> None:
    shuffled = [float(value) for value in (*range(1, num_values, 2), *range(0, num_values, 2))]
    assert median_interval(shuffled) == expected


def test_a_warm_up_is_not_counted_and_of_the_other_passes_the_median_is() -> None:
    machine = Machine()
    assert take_turns({"a": machine.worker("a", 50.0, 1.0, 9.0, 2.0)}, 1, 12.0, machine.clock) == {"a": [2.0]}
    passes = passes_of_turn(machine.worker("a", 3.0, 2.0, 1.0), turn_s=2.0, warmup_s=4.0, clock=machine.clock)
    assert passes == [1.0, 1.0]


BY_NAME = {workload.name: workload for workload in WORKLOADS}


def test_the_curve_is_shares_of_the_servers_own_rate() -> None:
    load = make_load(BY_NAME["curve-0.75"], "http://127.0.0.1:1", 5.0, capacity_per_s=400.0)
    assert (load.rate_per_s, load.clients) == (300.0, 0)
    bulk = make_load(BY_NAME["interactive-bulk"], "http://127.0.0.1:1", 1.0, None).bulk
    assert bulk is not None
    assert (bulk.clients, bulk.shape.texts_per_request) == (2, 512)
    with pytest.raises(ValueError, match="needs a rate"):
        make_load(BY_NAME["curve-0.75"], "http://127.0.0.1:1", 5.0, capacity_per_s=None)


OURS, THEIRS = Server("http://127.0.0.1:1", 1), Server("http://127.0.0.1:2", 2)
BODY = RerankBody("query", ["a", "b", "c", "d"])


@pytest.fixture(scope="module")
def source() -> TextSource:
    return TextSource(Path(bundled_model()), seed=0)


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


@pytest.mark.parametrize("pooling", ["mean", "lasttoken"])
def test_a_checkpoint_is_one_that_vecd_serves(pooling: str, tmp_path: Path) -> None:
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    make_checkpoint(Shape("BertConfig", small, pooling), tmp_path / "small")
    card = read_card(tmp_path / "small")
    assert (card.model_type, card.dim, card.max_tokens) == ("bert", 32, 512)
    assert card.pooling == (pooling,)
    assert card.is_normalized
    assert Path(card.tokenizer_file).is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


ROWS = np.array([[1.0, 0.0], [0.6, 0.8]], np.float32)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (ROWS[::-1], "cosine 0.6000"),
        (np.zeros_like(ROWS), "cosine nan"),
        (np.ones((2, 3), np.float32), "3 dimensions instead of 2"),
    ],
)
def test_others_are_refused(theirs: np.ndarray, message: str) -> None:
    require_same(ROWS, ROWS * 3 + np.float32(0.001))
    with np.errstate(invalid="ignore"), pytest.raises(WrongVectors, match=message):
        require_same(ROWS, theirs)
