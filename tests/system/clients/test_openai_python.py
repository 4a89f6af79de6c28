"""openai-python, three major versions of it, against the real server and the real model."""

import base64
from collections.abc import Iterator
from functools import partial

import httpx
import numpy as np
import pytest

from tests.support.clients.corpus import KEY, NUM_TOKENS, SLOW_KEY, TEXTS, numbers
from tests.support.clients.driving import Client, ClientError, running_client

MODEL = "all-MiniLM-L6-v2"


@pytest.fixture(scope="module", params=["openai-3", "openai-2", "openai-1"])
def openai(request: pytest.FixtureRequest) -> Iterator[Client]:
    with running_client(request.param, "openai_client") as client:
        assert client.call("version").startswith(request.param.removeprefix("openai-"))
        yield client


@pytest.fixture
def create(openai, float32_server):
    """Embeddings of the real model."""

    def call(**body):
        return openai.call("create", url=f"{float32_server.url}/v1", body={"model": MODEL, **body})

    return call


@pytest.fixture
def refusal(openai, strict_server):
    """What the library raises; of a server that is strict."""

    def call(key: str = KEY, **body) -> ClientError:
        error: ClientError = openai.refusal(
            "create", url=f"{strict_server.url}/v1", key=key, body={"model": MODEL, **body}
        )
        return error

    return call


def test_a_list(create, is_right):
    answer = create(input=TEXTS)
    assert is_right(answer["vectors"], TEXTS)
    assert answer["indices"] == list(range(len(TEXTS)))
    assert (answer["kinds"], answer["model"]) == (["list", "embedding"], MODEL)
    assert answer["usage"] == {"prompt_tokens": answer["usage"]["total_tokens"], "total_tokens": sum(NUM_TOKENS)}
    assert answer["request_id"]


def test_two_thousand_and_forty_eight_texts_keep_their_order(create, is_right):
    texts = numbers(2048)
    assert is_right(create(input=texts)["vectors"], texts)


def test_floats_are_the_default_to_the_bit(create):
    [default] = create(input="hello world")["vectors"]
    [floats] = create(input="hello world", encoding_format="float")["vectors"]
    [text] = create(input="hello world", encoding_format="base64")["vectors"]
    assert np.array(floats, np.float32).tobytes() == np.array(default, np.float32).tobytes()
    assert np.array(floats, np.float32).tobytes() == base64.b64decode(text, validate=True)


def test_nulls_are_absent_and_unknown_fields_are_ignored(create, is_right):
    body = {"user": None, "dimensions": None, "encoding_format": None, "extra_body": {"metadata": {}, "x": [1]}}
    assert is_right(create(input=TEXTS, **body)["vectors"], TEXTS)
    assert is_right(create(input=TEXTS, user="u", dimensions=384)["vectors"], TEXTS)


def test_token_ids_of_openais_vocabulary_are_decoded(create, is_right):
    # cl100k_base: "hello world"
    assert is_right(create(input=[15339, 1917])["vectors"], ["hello world"])
    assert is_right(create(input=[[15339, 1917], [15339]])["vectors"], ["hello world", "hello"])


@pytest.mark.parametrize("value", [[], [None], {}, 5, [1.5], [True], ["a", 5], [[]], ["a"] * 2049])
def test_bad_input_is_a_bad_request_that_names_it(refusal, value):
    error = refusal(input=value)
    assert "BadRequestError" in error.classes
    assert (error.fields["param"], error.fields["type"]) == ("input", "invalid_request_error")


@pytest.mark.parametrize("value", [-1, 192, 385, "4"])
def test_other_dimensions_are_a_bad_request(refusal, value):
    error = refusal(input="a", dimensions=value)
    assert "BadRequestError" in error.classes
    assert error.fields["param"] == "dimensions"


def test_a_text_that_is_too_long_is_told_in_openais_words(refusal):
    error = refusal(input="word " * 1000)
    assert "BadRequestError" in error.classes
    assert "maximum context length is 256 tokens" in error.message


def test_a_wrong_key(refusal):
    error = refusal(key="wrong", input="a")
    assert "AuthenticationError" in error.classes
    assert error.fields["code"] == "invalid_api_key"


def test_another_model(refusal):
    error = refusal(model="text-embedding-3-small", input="a")
    assert "NotFoundError" in error.classes
    assert error.fields["code"] == "model_not_found"


def test_who_is_over_a_limit_waits_as_told_and_is_served(openai, strict_server):
    """The key may spend 4 tokens a second, 20 at once: after 32 it has to wait, and the library does."""
    call = {"url": f"{strict_server.url}/v1", "key": SLOW_KEY, "max_retries": 0}
    spend = partial(openai.call, "create", **call, body={"model": MODEL, "input": "word " * 30})
    with pytest.raises(ClientError) as caught:
        [spend() for _ in range(3)]
    assert "RateLimitError" in caught.value.classes
    assert caught.value.fields["code"] == "rate_limit_exceeded"
    answer = openai.call("create", **call | {"max_retries": 5}, body={"model": MODEL, "input": "a"})
    assert len(answer["vectors"][0]) == 384


def test_a_deadline_that_passes_is_a_server_error(openai, strict_server):
    error = openai.refusal(
        "create",
        url=f"{strict_server.url}/v1",
        key=KEY,
        headers={"x-vecd-timeout-ms": "1"},
        body={"model": MODEL, "input": ["word " * 200] * 2048},
    )
    assert "InternalServerError" in error.classes
    assert error.fields["status_code"] == 503
    assert error.fields["type"] != "invalid_request_error"


def test_two_hundred_at_once_and_again_after_connections_have_been_idle(float32_server, is_right):
    """Longer idle than httpx keeps a connection, which is 5 s, so that either end may be closing it."""
    texts = numbers(200)
    with running_client("openai-3", "openai_client") as newest:
        both = newest.call("create_concurrently", url=f"{float32_server.url}/v1", texts=texts, idle_s=6.0)
    assert is_right(both[0], texts)
    assert is_right(both[1], texts)


def test_models(openai, float32_server, strict_server):
    answer = openai.call("models", url=f"{float32_server.url}/v1", name=MODEL)
    assert answer == {"ids": [MODEL], "retrieved": MODEL}
    error = openai.refusal("models", url=f"{strict_server.url}/v1", key=KEY, name="no/such")
    assert "NotFoundError" in error.classes


@pytest.mark.parametrize("path", ["", "/", "/v1/", "/v1/v1", "/v1/embeddings"])
def test_a_base_url_that_is_a_little_off(openai, float32_server, is_right, path):
    answer = openai.call("create", url=float32_server.url + path, body={"model": MODEL, "input": TEXTS})
    assert is_right(answer["vectors"], TEXTS)


@pytest.mark.parametrize("encoding", ["float", None])
@pytest.mark.parametrize("shape", [{}, {"top_k": 3}, {"sparse_format": "map"}])
def test_sparse(openai, sparse_server, encoding, shape):
    options = {} if encoding is None else {"encoding_format": encoding}
    url, fields = f"{sparse_server.url}/v1", {"output": "sparse", **shape}
    given = openai.call("create_other", url=url, texts=["w5 w9", "w30"], key="sparse", fields=fields, **options)
    body = {"input": ["w5 w9", "w30"], **fields}
    answer = httpx.post(f"{url}/embeddings", json=body, timeout=30).raise_for_status().json()
    assert given == [item["sparse"] for item in answer["data"]]
