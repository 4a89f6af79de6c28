import orjson
import pytest

from client.answers import Receipt, read_answer
from client.connection import Answer, BadAnswer

ITEM = {"object": "embedding", "index": 0, "embedding": [0.5, 0.5]}
USAGE = {"prompt_tokens": 9, "total_tokens": 9}


def dump(*, indent: bool = False, **fields: object) -> Answer:
    return Answer(200, orjson.dumps(fields, option=orjson.OPT_INDENT_2 if indent else 0))


@pytest.mark.parametrize("num_texts", [1, 2, 64])
def test_embeddings_and_tokens_are_counted(num_texts: int) -> None:
    answer = dump(object="list", data=[ITEM] * num_texts, model="m", usage=USAGE)
    assert read_answer(answer, num_texts) == Receipt(num_texts, 9)


def test_spacing_does_not_matter() -> None:
    assert read_answer(dump(indent=True, data=[ITEM, ITEM], usage=USAGE), 2) == Receipt(2, 9)


def test_the_order_of_fields_does_not_matter() -> None:
    data = [{**ITEM, "embedding": [0.5] * 1000}]
    assert read_answer(dump(usage=USAGE, data=data), 1) == Receipt(1, 9)


def test_a_model_called_embedding_is_not_counted() -> None:
    assert read_answer(dump(data=[ITEM], model='"embedding":', usage=USAGE), 1) == Receipt(1, 9)


@pytest.mark.parametrize("usage", [None, {}])
def test_usage_may_be_missing(usage: object) -> None:
    assert read_answer(dump(data=[ITEM], usage=usage), 1) == Receipt(1, 0)


@pytest.mark.parametrize("num_vectors", [0, 1, 3])
def test_every_text_needs_its_embedding(num_vectors: int) -> None:
    with pytest.raises(BadAnswer, match=f"{num_vectors} embeddings for 2 texts"):
        read_answer(dump(data=[ITEM] * num_vectors, usage=USAGE), 2)


def test_an_empty_vector_is_no_embedding() -> None:
    with pytest.raises(BadAnswer):
        read_answer(dump(data=[{**ITEM, "embedding": []}]), 1)


@pytest.mark.parametrize("body", [b"", b"OK", b"[[0.5]]", b'{"data":{}}', b'{"data":[{}]}', b'{"data":[1]}'])
def test_other_shapes_are_bad_answers(body: bytes) -> None:
    with pytest.raises(BadAnswer):
        read_answer(Answer(200, body), 1)
