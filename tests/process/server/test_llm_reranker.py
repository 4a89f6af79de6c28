"""Rerankers that are causal language models, from the folder to the score, against sentence-transformers on the same
files; and the refusal of one that ranks a plain pair in the wrong order.
"""

import subprocess
import sys
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from sentence_transformers import CrossEncoder
from transformers import AutoTokenizer

from tests.support.checkpoints import worker_config
from tests.support.every_kind import remember_reference
from tests.support.llm_checkpoints import rank, save_causal, save_converted, save_reranker
from tests.support.score_checkpoints import logits_of
from tests.support.serving import cache_folder, running_server
from vecd.gateway.request import Pair, Tokenizing
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.launch.config.templates import with_pair_template
from vecd.launch.config.tokens import ANSWER, OTHER, QUERY, ordered_pair
from vecd.model.card import ModelCard, ModelError, read_card
from vecd.model.folder import ModelFolder
from vecd.shm.output import Output
from vecd.workers.batch import Engine, PackedBatch
from vecd.workers.parity import vectors_of, vectors_one_by_one
from vecd.workers.torch.transformer import build_engine

RIGHT, WRONG = (QUERY, ANSWER), (QUERY, OTHER)
PAIRS = [
    RIGHT,
    WRONG,
    (QUERY, ""),
    ("", "   a document \n with <|im_end|> in it "),
    (" Wo liegt die Straße? ", "你好 🙂" * 5),
    (QUERY, "a long document, " * 100),  # cut, with the template's end behind it
]


@pytest.fixture(scope="module", params=["qwen3", pytest.param("qwen2", marks=pytest.mark.full), "gemma"])
def reranker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    no = None if request.param == "gemma" else "no"
    plain = save_causal(tmp_path_factory.mktemp("causal"), request.param)
    return save_reranker(tmp_path_factory.mktemp("reranker"), plain, no=no)


@pytest.fixture(scope="module")
def ranking(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Folders of a model that ranks the plain pair right, and of one that does not."""
    plain = save_causal(tmp_path_factory.mktemp("causal"))
    folders = [save_reranker(tmp_path_factory.mktemp("ranking"), plain) for _ in range(2)]
    made = {True: rank(folders[0], RIGHT, WRONG), False: rank(folders[1], WRONG, RIGHT)}
    for folder in made.values():
        remember_reference(folder)
    return made


async def test_scores_of_texts_are_sentence_transformers_own(reranker: Path) -> None:
    model: Any = CrossEncoder(str(reranker), device="cpu", local_files_only=True)
    card = with_pair_template(read_card(reranker), ModelFolder(reranker))
    path = "packed" if card.model_type == "gemma" else "fused"
    engine = build_engine(replace(worker_config(reranker), card=card), path, "float32")
    assert engine._prefixes is not None  # type: ignore[attr-defined]
    for instruction in (None, "Find code that does"):
        await assert_same_scores(model, card, engine, instruction)


async def assert_same_scores(model: Any, card: ModelCard, engine: Engine, instruction: str | None) -> None:
    runs = Tokenizer(card, card.max_tokens, "model").tokenize(
        [Pair(*pair) for pair in PAIRS], Tokenizing(instruction=instruction)
    )
    inputs = [item async for run in runs for item in run]
    expected_ids = [model[0].preprocess([pair], prompt=instruction)["input_ids"][0].tolist() for pair in PAIRS]
    ids = [array("i", item.token_ids) for item in inputs]
    assert [each.tolist() for each in ids] == expected_ids
    batch = PackedBatch(
        np.array(list(map(len, ids)), dtype=np.int32),
        np.concatenate([np.array(each, dtype=np.int32) for each in ids]),
        np.full(len(ids), Output.SCORES, dtype=np.uint8),
    )
    expected = model.predict(PAIRS, prompt=instruction)
    for compute in (vectors_of, vectors_one_by_one, vectors_of):  # with a prefix of the batch, and with those before it
        scores = 1 / (1 + np.exp(-compute(engine, batch, 1)[:, 0].astype(np.float64)))
        np.testing.assert_allclose(scores, expected, atol=1e-5)


def test_a_conversion_with_a_template_for_conversations_is_put_the_published_way(tmp_path: Path) -> None:
    """Qwen3-Reranker for sequence classification: its card says how a pair becomes a text."""
    folder = save_converted(tmp_path / "Qwen3-Reranker-0.6B-seq-cls")
    card = with_pair_template(read_card(folder), ModelFolder(folder))
    published = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a '
        "web search query, retrieve relevant passages that answer the query\n<Query>: {}\n<Document>: {}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    library: Any = AutoTokenizer.from_pretrained(folder)
    lists: list[list[int]] = [library(published.format(*pair))["input_ids"] for pair in (RIGHT, WRONG)]
    inputs = Tokenizer(card, card.max_tokens, "model").tokenize_now([Pair(*RIGHT), Pair(*WRONG)]) or []
    assert [array("i", item.token_ids).tolist() for item in inputs] == lists
    lengths = np.array(list(map(len, lists)), dtype=np.int32)
    batch = PackedBatch(lengths, np.concatenate(lists, dtype=np.int32), np.full(2, Output.SCORES, dtype=np.uint8))
    engine = build_engine(replace(worker_config(folder), card=card), "fused", "float32")
    np.testing.assert_allclose(vectors_of(engine, batch, 1), logits_of(folder, batch), atol=1e-5)


def test_the_pair_is_tokenized_as_requests_are(ranking: dict[bool, Path]) -> None:
    card = with_pair_template(read_card(ranking[True]), ModelFolder(ranking[True]))
    inputs = Tokenizer(card, 512, "model").tokenize_now([Pair(*RIGHT), Pair(*WRONG)])
    assert inputs is not None
    assert ordered_pair(card, 512) == tuple(tuple(array("i", item.token_ids)) for item in inputs)
    assert ordered_pair(replace(card, score=None), 512) is None
    with pytest.raises(ModelError, match=f"^{card.folder}: the texts cannot be tokenized: "):
        ordered_pair(card, 8)


def test_a_model_that_ranks_wrong_is_refused(ranking: dict[bool, Path]) -> None:
    command = [sys.executable, "-m", "vecd", "serve", str(ranking[False]), "--port", "0", "--workers", "1"]
    done = subprocess.run(
        [*command, "--cache-dir", cache_folder()], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 3
    last = done.stderr.splitlines()[-1]
    assert f"{ranking[False]}: the answer to a plain question gets the score" in last
    assert "--accept-unordered serves it all the same; the template must be the one" in last


def test_what_is_served_says_whether_it_ranks_right(ranking: dict[bool, Path]) -> None:
    models = [f"{name}={ranking[ranks]}" for name, ranks in (("right", True), ("wrong", False))]
    with running_server(*models, "--workers", "1", "--accept-unordered") as server:
        for name, ranks in ("right", True), ("wrong", False):
            [worker] = httpx.get(f"{server.url}/m/{name}/info").json()["workers"]
            assert worker["ranks_in_order"] is ranks
        assert server.stderr.count("--accept-unordered: the answer to a plain question gets the score") == 1
