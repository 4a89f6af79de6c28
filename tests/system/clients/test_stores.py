"""Chroma and Milvus's functions against the real server and the real model."""

from collections.abc import Iterator

import pytest

from tests.support.clients.corpus import TEXTS, numbers
from tests.support.clients.driving import Client, ClientError, running_client
from tests.support.serving import Server, exact_server


@pytest.fixture(scope="module")
def stores() -> Iterator[Client]:
    with running_client("stores", "stores_client") as client:
        yield client


@pytest.fixture(scope="module")
def roomy_server(stores) -> Iterator[Server]:
    """`stores` first: nothing is started for a client that is not there."""
    with exact_server("--max-inputs", "6000") as server:
        yield server


@pytest.mark.parametrize("function", ["chroma", "chroma_embedding_server", "milvus"])
def test_embedding_functions(stores, float32_server, is_right, function):
    assert is_right(stores.call(function, url=float32_server.url, texts=TEXTS), TEXTS)


def test_chroma_adds_five_thousand_in_one_request(stores, roomy_server, is_right):
    texts = numbers(5000)
    answer = stores.call("chroma_collection", url=roomy_server.url, texts=texts, query="number 5")
    assert is_right(answer["vectors"], texts)
    assert answer["found"] == "number 5"


def test_chroma_says_by_which_limit_five_thousand_are_refused(stores, float32_server):
    with pytest.raises(ClientError) as caught:
        stores.call("chroma_collection", url=float32_server.url, texts=numbers(5000), query="number 5")
    assert "BadRequestError" in caught.value.classes
    assert "at least 2049 inputs, at most 2048" in caught.value.message
