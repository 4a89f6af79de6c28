"""openai-python, as people use it."""

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
