"""Rerank and score routes, to the byte, on a server whose model ranks, with the dummy engine, and on one whose model
makes embeddings."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import goldens
from tests.support.serving import Server, running_server
from vecd.gateway.api.dialects.rerank import DIALECT


def test_golden(weightless):
    goldens.check("rerank", weightless.url, set())


def test_the_document_says_what_is_answered(weightless):
    goldens.check_document(weightless.url, DIALECT)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    llm_checkpoints = pytest.importorskip("tests.support.llm_checkpoints")
    plain: Path = llm_checkpoints.save_causal(tmp_path_factory.mktemp("causal"))
    folder = llm_checkpoints.save_reranker(tmp_path_factory.mktemp("reranker"), plain)
    flags = ("--engine", "weightless", "--workers", "1", "--max-inputs", "64", "--served-model-name", "reranker")
    with running_server(str(folder), *flags) as server:
        yield server


def test_golden_of_a_model_that_ranks(reranker):
    goldens.check("reranker", reranker.url, {"id", "created", "x-vecd-identity"})
