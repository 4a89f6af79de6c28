"""A model with dense and sparse vectors and vectors of tokens: every exchange to the byte, and the same vectors by
every route."""

import base64
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support import goldens
from tests.support.serving import Server, running_server


@pytest.fixture(scope="module")
def hybrid(minilm_folder: Path, tmp_path_factory) -> Iterator[Server]:
    """The dummy engine, in the sizes of the bundled model, with the two files that make it one of BGE-M3's kind."""
    folder = tmp_path_factory.mktemp("m3")
    for file in minilm_folder.iterdir():
        (folder / file.name).symlink_to(file)
    for name in ("sparse_linear.safetensors", "colbert_linear.safetensors"):
        (folder / name).touch()
    with running_server(str(folder), "--served-model-name", "m3", "--engine", "weightless", "--workers", "1") as server:
        yield server


def test_golden(hybrid):
    goldens.check("outputs", hybrid.url, {"id", "created"})


def test_all_kinds_of_one_request_are_those_of_three(hybrid):
    texts = ["one text", "another text, which is longer", ""]
    together = hybrid.post("/v1/embeddings", input=texts, output=["multi-vector", "dense", "sparse"])["data"]
    for kind, key in (("dense", "embedding"), ("sparse", "sparse"), ("multi-vector", "embeddings")):
        alone = hybrid.post("/v1/embeddings", input=texts, output=kind)["data"]
        for ours, theirs in zip(together, alone, strict=True):
            assert set(theirs) == {"object", "index", key}
            if kind == "sparse":
                assert ours[key]["indices"] == theirs[key]["indices"]
                assert ours[key]["values"] == pytest.approx(theirs[key]["values"], rel=1e-5)
            else:
                assert np.allclose(ours[key], theirs[key], atol=1e-5)
                assert np.shape(ours[key]) == np.shape(theirs[key])


def test_the_same_sparse_vectors_in_every_shape(hybrid):
    texts = ["one text", "another"]
    items = [item["sparse"] for item in hybrid.post("/v1/embeddings", input=texts, output="sparse")["data"]]
    indexed = hybrid.post("/embed_sparse", inputs=texts)
    assert [[pair["index"] for pair in row] for row in indexed] == [item["indices"] for item in items]
    assert [[pair["value"] for pair in row] for row in indexed] == [item["values"] for item in items]
    maps = hybrid.post("/v1/embeddings", input=texts, output="sparse", sparse_format="map")["data"]
    named = hybrid.post("/v1/embeddings", input=texts, output="sparse", return_tokens=True)["data"]
    for item, other in zip(maps, named, strict=True):
        assert item["sparse"] == dict(zip(other["sparse"]["tokens"], other["sparse"]["values"], strict=True))
    assert set(maps[0]["sparse"]) <= {"one", "text", "[SEP]"}


def test_the_same_vectors_of_tokens_in_every_shape(hybrid):
    texts = ["one text", "another"]
    items = hybrid.post("/v1/embeddings", input=texts, return_multivector=True)
    assert [np.shape(item["embeddings"]) for item in items["data"]] == [(3, 384), (2, 384)], "none for [CLS]"
    assert items["usage"]["prompt_tokens"] == 4 + 3
    pooled = hybrid.post("/pooling", input=texts, task="token_embed")["data"]
    assert [item["data"] for item in pooled] == [item["embeddings"] for item in items["data"]]
    assert hybrid.post("/v1/multi-vector", input=texts)["data"] == items["data"]
    encoded = hybrid.post("/v1/embeddings", input=texts, return_multivector=True, encoding_format="base64")["data"]
    for item, other in zip(items["data"], encoded, strict=True):
        rows = np.frombuffer(base64.b64decode(other["embeddings"]), np.float32).reshape(-1, 384)
        assert np.array_equal(rows, np.array(item["embeddings"], np.float32))


def test_many_inputs_at_once(hybrid):
    """More than are rendered on the event loop."""
    texts = [f"text {index}" for index in range(64)]
    items = hybrid.post("/v1/embeddings", input=texts, output=["sparse", "dense"])["data"]
    assert [item["index"] for item in items] == list(range(64))
    assert len(hybrid.post("/embed_sparse", inputs=texts)) == 64


def test_labels_are_chosen_by_cosines(hybrid):
    response = hybrid.post("/v1/classify", input=["one", "two"], labels=["two", "one"], temperature=0.01)
    assert [item["prediction"] for item in response["data"]] == ["one", "two"]
    assert all(sum(row["score"] for row in item["predictions"]) == pytest.approx(1) for item in response["data"])
