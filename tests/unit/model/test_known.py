"""The names of one word: each means one model, in any case, and a word that is none suggests the nearest."""

from collections import Counter

import pytest

from vecd.launch.config.models import folder_of, name_of, split_task
from vecd.model.known import known_id, known_models, published_dims, unknown_word
from vecd.model.steps import CAPABILITIES


def test_each_name_is_one_word_of_one_model() -> None:
    models = list(known_models())
    names = Counter(name for model in models for name in model.names)
    assert set(names.values()) == {1}
    for model in models:
        assert model.kind in CAPABILITIES
        assert model.hub_id.count("/") == 1
        for name in model.names:
            assert name == name.lower()
            assert "/" not in name
            assert folder_of(name) is None
            assert known_id(name) == model.hub_id
    assert len({model.hub_id for model in models}) == len(models)


@pytest.mark.parametrize(
    ("source", "hub_id"),
    [
        ("qwen3-embedding", "Qwen/Qwen3-Embedding-0.6B"),
        ("Qwen3-Embedding-4B", "Qwen/Qwen3-Embedding-4B"),
        ("all-minilm", "sentence-transformers/all-MiniLM-L6-v2"),
        ("nomic-embed-text", "nomic-ai/nomic-embed-text-v1.5"),
        ("paraphrase-multilingual", "sentence-transformers/paraphrase-multilingual-mpnet-base-v2"),  # as at Ollama
        ("snowflake-arctic-embed", "Snowflake/snowflake-arctic-embed-l"),
        ("Qwen/Qwen3-Embedding-0.6B", ""),
        ("no-such-model", ""),
        ("", ""),
    ],
)
def test_what_a_word_means(source: str, hub_id: str) -> None:
    assert known_id(source) == hub_id


@pytest.mark.parametrize(
    ("source", "hint"),
    [("qwen3-embeding", "did you mean qwen3-embedding?"), ("zzzzzz", "vecd check --known lists them")],
)
def test_an_unknown_word(source: str, hint: str) -> None:
    assert unknown_word(source) == f"no model is known by this name; {hint}"
    assert unknown_word(f"owner/{source}") == unknown_word("bge-m3") == ""


def test_shorter_vectors_are_those_of_the_whole_name() -> None:
    assert published_dims("x/models--nomic-ai--nomic-embed-text-v1.5/snapshots ") == (64, 128, 256, 512, 768)
    assert published_dims("/models/nomic-embed-text-v1.5-tuned") is None
    by_id = {model.hub_id: model.matryoshka_dims for model in known_models()}
    assert by_id["Qwen/Qwen3-Embedding-4B"] == ()
    assert by_id["BAAI/bge-m3"] is None


def test_a_task_of_a_known_model() -> None:
    assert split_task("jina-embeddings-v3/retrieval.query") == ("jina-embeddings-v3", "retrieval.query")
    assert split_task("EuroBERT/EuroBERT-610m") == ("EuroBERT/EuroBERT-610m", "")
    assert name_of("jina-embeddings-v3/retrieval.query") == "jina-embeddings-v3/retrieval.query"
    assert split_task("jina-embeddings-v33/retrieval.query") == ("jina-embeddings-v33/retrieval.query", "")
