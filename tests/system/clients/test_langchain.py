"""LangChain, in Python and in JavaScript, against the real server and the real model.

In Python it sends token ids of OpenAI's vocabulary by default. It encodes them with tiktoken, which checks that the
table given to it is OpenAI's own, by its SHA-256: so what the server ships is checked, too.
"""

import base64
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.clients.corpus import PLACES, numbers
from tests.support.clients.driving import Client, ClientError, running_client
from tests.support.clients.keys import KEY, num_answers
from vecd.gateway.tokenization import cl100k

_TABLE = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
"""SHA-1 of the table's address: so tiktoken names the file."""


@pytest.fixture(scope="module")
def tiktoken_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What tiktoken would fetch, of what the server has of it: in each line an id's bytes, as base64, and the id."""
    lengths, starts, tokens = cl100k.load()
    folder = tmp_path_factory.mktemp("tiktoken")
    with open(folder / _TABLE, "wb") as file:
        for index in np.flatnonzero(lengths[: cl100k.FIRST_UNKNOWN_ID]):
            token = tokens[starts[index] : starts[index] + lengths[index]].tobytes()
            file.write(base64.b64encode(token) + b" %d\n" % index)
    return folder


@pytest.fixture(scope="module")
def python(tiktoken_folder: Path) -> Iterator[Client]:
    with running_client("openai-3", "langchain_client", {"TIKTOKEN_CACHE_DIR": str(tiktoken_folder)}) as client:
        yield client


@pytest.fixture(scope="module", params=["node", "node-24"])
def javascript(request: pytest.FixtureRequest) -> Iterator[Client]:
    """The newest for node 20, and the newest."""
    with running_client(request.param, "langchain_client") as client:
        yield client


@pytest.fixture(scope="module")
def newest_javascript() -> Iterator[Client]:
    with running_client("node-24", "langchain_client") as client:
        yield client


TEXTS = list(PLACES)
AS_TEXT = {"check_embedding_ctx_length": False}


@pytest.mark.parametrize("options", [{}, AS_TEXT], ids=["token ids", "texts"])
@pytest.mark.parametrize("function", ["embed_documents", "embed_documents_later"])
def test_documents(python, float32_server, is_right, options, function):
    assert is_right(python.call(function, url=f"{float32_server.url}/v1", texts=TEXTS, options=options), TEXTS)


@pytest.mark.parametrize("options", [{}, AS_TEXT], ids=["token ids", "texts"])
@pytest.mark.parametrize("text", ["what is this?", ""])
def test_a_query(python, float32_server, is_right, options, text):
    assert is_right(python.call("embed_query", url=f"{float32_server.url}/v1", text=text, options=options), [text])


def test_a_thousand_and_one_documents(python, float32_server, is_right):
    texts = numbers(1001)
    vectors = python.call("embed_documents", url=f"{float32_server.url}/v1", texts=texts, options=AS_TEXT)
    assert is_right(vectors, texts)


def test_a_text_that_langchain_cuts_in_two(python, float32_server, is_right):
    """Above 8,191 ids it sends parts, and takes their mean. Of each, the server reads the first 254 words: the same."""
    vectors = python.call("embed_documents", url=f"{float32_server.url}/v1", texts=["word " * 9000], options={})
    assert is_right(vectors, ["word " * 600])


def test_floats(python, float32_server, is_right):
    options = {**AS_TEXT, "model_kwargs": {"encoding_format": "float"}, "dimensions": 384}
    vectors = python.call("embed_documents", url=f"{float32_server.url}/v1", texts=TEXTS, options=options)
    assert is_right(vectors, TEXTS)


def test_javascript_sends_a_query_as_a_plain_string(javascript, float32_server, is_right):
    vectors = javascript.call("embedQuery", url=f"{float32_server.url}/v1", text="what is this?")
    assert is_right(vectors, ["what is this?"])


def test_javascript_cuts_513_documents_into_two_requests(javascript, float32_server, is_right):
    texts = numbers(513)
    before = num_answers(float32_server, "2xx")
    vectors = javascript.call("embedDocuments", url=f"{float32_server.url}/v1", texts=texts)
    assert num_answers(float32_server, "2xx") - before == 2 + 1  # the second question itself
    assert is_right(vectors, texts)


@pytest.mark.parametrize(
    "refused", [{"key": "wrong"}, {"model": "other", "key": KEY}, {"key": KEY, "text": "word " * 999}]
)
def test_javascript_asks_once_when_it_is_refused(javascript, strict_server, refused):
    """It would try six times more, and for minutes, for a status that it does not take for the caller's mistake."""
    before = num_answers(strict_server, "4xx", KEY)
    with pytest.raises(ClientError) as caught:
        javascript.call("embedQuery", **{"url": f"{strict_server.url}/v1", "text": "a"} | refused)
    assert "status code (no body)" not in caught.value.message
    assert num_answers(strict_server, "4xx", KEY) - before == 1


@pytest.mark.parametrize(
    ("api", "options"), [("ollama", {"truncate": True}), ("cohere", {}), ("cohere", {"embeddingTypes": ["float"]})]
)
def test_javascript_through_other_apis(newest_javascript, float32_server, is_right, api, options):
    arguments = {"api": api, "url": float32_server.url, "options": options}
    assert is_right(newest_javascript.call("embedDocuments", texts=TEXTS, **arguments), TEXTS)
    assert is_right(newest_javascript.call("embedQuery", text="what is this?", **arguments), ["what is this?"])


def test_javascript_through_ollama_s_api_refuses_long_texts_by_default(newest_javascript, float32_server):
    """It sends `truncate: false`, unless it is told otherwise."""
    with pytest.raises(ClientError, match="the input length exceeds the context length"):
        newest_javascript.call("embedQuery", api="ollama", url=float32_server.url, text="word " * 600)
