"""openai-python, as people use it."""

import asyncio

import numpy as np
import openai
import pytest


@pytest.fixture
def client(float32_server):
    with openai.OpenAI(base_url=f"{float32_server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_default_settings(client, reference):
    answer = client.embeddings.create(model="all-MiniLM-L6-v2", input=["Hello, world", "second"])
    vectors = np.array([item.embedding for item in answer.data], dtype=np.float32)
    assert np.abs(vectors - reference(["Hello, world", "second"])).max() < 1e-5
    assert [item.index for item in answer.data] == [0, 1]
    assert (answer.model, answer.object) == ("all-MiniLM-L6-v2", "list")
    assert answer.usage.total_tokens == 5 + 3
    assert answer._request_id


def test_float_is_the_same_as_the_default(client):
    default = client.embeddings.create(model="m", input="one text").data[0].embedding
    floats = client.embeddings.create(model="m", input="one text", encoding_format="float").data[0].embedding
    assert np.array(default, np.float32).tobytes() == np.array(floats, np.float32).tobytes()


def test_nulls_and_unknown_fields(client):
    extra: dict[str, object] = {
        "input_type": "query",
        "user": None,
        "dimensions": None,
        "encoding_format": None,
        "x": {},
    }
    assert len(client.embeddings.create(model="m", input="a", extra_body=extra).data[0].embedding) == 384


def test_what_the_sdk_has_no_argument_for_goes_as_a_field(client, reference):
    answer = client.embeddings.create(
        model="m", input=["first", "second"], extra_body={"prompt": "query: ", "report": True}
    )
    vectors = np.array([item.embedding for item in answer.data], dtype=np.float32)
    assert np.abs(vectors - reference(["query: first", "query: second"])).max() < 1e-5
    assert answer.data[0].report["source"] == "text"
    raw = client.embeddings.create(model="m", input="first", extra_body={"normalize": False}).data[0].embedding
    expected = reference(["first"])[0]
    assert abs(np.linalg.norm(raw) - 1) > 0.1
    assert np.abs(np.array(raw) / np.linalg.norm(raw) - expected).max() < 1e-5


def test_a_long_text_is_cut_or_refused_or_embedded_in_chunks(client, reference):
    text = " ".join(f"word{n}" for n in range(300))
    cut = client.embeddings.with_raw_response.create(model="m", input=text)
    assert cut.headers["x-vecd-truncated"] == "1"
    assert np.abs(np.array(cut.parse().data[0].embedding) - reference([text])[0]).max() < 1e-5
    with pytest.raises(openai.BadRequestError, match="This model's maximum context length is 256 tokens"):
        client.embeddings.create(model="m", input=text, extra_body={"truncate": False})
    chunked = client.embeddings.with_raw_response.create(model="m", input=text, extra_body={"overflow": "chunk"})
    assert chunked.headers["x-vecd-chunked"] == "1"
    assert abs(np.linalg.norm(chunked.parse().data[0].embedding) - 1) < 1e-5


def test_padding_to_the_maximum_length_gives_the_vector_that_transformers_computes(client, minilm_folder):
    import torch
    from transformers import AutoModel, AutoTokenizer

    texts = ["one", "a text that is a little longer"]
    model = AutoModel.from_pretrained(minilm_folder)
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder)
    padded = tokenizer(texts, padding="max_length", max_length=256, return_tensors="pt")
    assert padded["input_ids"].shape == (2, 256)
    with torch.inference_mode():
        hidden = model(**padded).last_hidden_state
    mask = padded["attention_mask"][:, :, None]
    expected = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1)).numpy()
    answer = client.embeddings.create(model="m", input=texts, extra_body={"padding": "max_length"})
    assert np.abs(np.array([item.embedding for item in answer.data]) - expected).max() < 1e-5
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="m", input=texts, extra_body={"padding": "longest"})
    assert caught.value.param == "padding"


def test_empty_texts_are_embedded(client, reference):
    answer = client.embeddings.create(model="m", input=["a", ""])
    vectors = np.array([item.embedding for item in answer.data], dtype=np.float32)
    assert np.abs(vectors - reference(["a", ""])).max() < 1e-5
    assert client.embeddings.create(model="m", input="").data[0].embedding == answer.data[1].embedding


def test_async_with_many_at_once(float32_server, reference):
    async def embed_all() -> np.ndarray:
        async with openai.AsyncOpenAI(base_url=f"{float32_server.url}/v1", api_key="x", max_retries=0) as client:
            answers = await asyncio.gather(
                *(client.embeddings.create(model="m", input=f"text number {i}") for i in range(100))
            )
        return np.array([answer.data[0].embedding for answer in answers], dtype=np.float32)

    expected = reference([f"text number {i}" for i in range(100)])
    assert np.abs(asyncio.run(embed_all()) - expected).max() < 1e-5


def test_models(client):
    assert [model.id for model in client.models.list()] == ["all-MiniLM-L6-v2"]
    assert client.models.retrieve("all-MiniLM-L6-v2").object == "model"
    assert client.embeddings.create(model="no/such", input="a").model == "all-MiniLM-L6-v2"
    with pytest.raises(openai.NotFoundError, match="no/such"):
        client.models.retrieve("no/such")


@pytest.mark.parametrize("value", [[], [None], {}, 5, [1.5], [True], ["a"] * 2049])
def test_bad_input_is_a_bad_request_that_names_it(client, value):
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="m", input=value)
    assert (caught.value.param, caught.value.type) == ("input", "invalid_request_error")


@pytest.mark.parametrize(("dimensions", "accepted"), [(384, True), (383, False), (0, True), (385, False), ("4", False)])
def test_dimensions(client, dimensions, accepted):
    if accepted:
        assert len(client.embeddings.create(model="m", input="a", dimensions=dimensions).data[0].embedding) == 384
    else:
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model="m", input="a", dimensions=dimensions)
        assert caught.value.param == "dimensions"
