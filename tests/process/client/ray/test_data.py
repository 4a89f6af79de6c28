"""The actor of Ray Data, without Ray: with a real server of the dummy engine, and before one that fails as told."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import vecd
from tests.support.bulk_server import BulkServer, vectors_of
from tests.support.serving import clean_environment
from vecd.client.ray import data
from vecd.client.ray.data import RayEmbedder

_TEXTS = [f"row {n}" for n in range(1200)]
_FLAGS = ("--engine", "dummy", "--workers", "1", "--matryoshka")


def _column(*cells: object) -> dict[str, np.ndarray]:
    column = np.empty(len(cells), object)
    column[:] = cells
    return {"text": column}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("node")
    (folder / "tmp").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in clean_environment(folder, {}).items():
            patch.setenv(name, value)
        patch.setattr("tempfile.tempdir", None)
        embedder = RayEmbedder(None, _FLAGS)
        yield embedder
        embedder.close()


@pytest.fixture
def before(monkeypatch):
    """Make an actor whose node's server is another one."""

    def make(server: BulkServer, **options: Any) -> RayEmbedder:
        node = SimpleNamespace(path=lambda name: "", serve=lambda: None)
        monkeypatch.setattr(data, "NodeServer", lambda *arguments: node)
        monkeypatch.setattr(data, "Client", lambda _, **arguments: vecd.Client(server.url, **arguments))
        return RayEmbedder(**options)

    return make


def test_a_batch_has_its_vectors_in_order(embedder):
    ids = np.arange(len(_TEXTS))
    batch = embedder({"id": ids, **_column(*_TEXTS)})
    assert list(batch) == ["id", "text", "embedding"]
    assert batch["id"] is ids
    vectors = batch["embedding"]
    assert (vectors.shape, vectors.dtype) == ((len(_TEXTS), 384), np.float32)
    for n in (0, 511, 512, 1199):
        assert np.array_equal(embedder({"text": np.array([_TEXTS[n]])})["embedding"], vectors[n : n + 1])


def test_a_null_text_has_no_vector(embedder):
    expected = embedder(_column("a", "None", "b"))["embedding"]
    assert np.isfinite(expected).all()
    found = embedder(_column(None, "a", float("nan"), "None", "b", None))["embedding"]
    assert (found.shape, found.dtype) == ((6, 384), np.float32)
    assert np.isnan(found[[0, 2, 5]]).all()
    assert np.array_equal(found[[1, 3, 4]], expected)


@pytest.mark.parametrize(
    "column", [np.array([None, None]), np.full(2, np.nan, np.float32), np.array([], object), np.array([], np.float64)]
)
def test_a_batch_of_nulls_or_without_rows_is_as_wide_as_the_others(embedder, column):
    found = embedder({"text": column})["embedding"]
    assert (found.shape, found.dtype, np.isnan(found).all()) == ((len(column), 384), np.float32, True)


@pytest.mark.parametrize("column", [np.array([1, 2]), np.array(["a", 2], object), np.array([["a"], ["b"]])])
def test_what_is_no_text_is_not_made_one(embedder, column):
    with pytest.raises(ValueError, match="column 'text' must hold texts"):
        embedder({"text": column})


def test_a_failure_that_passes_ends_nothing_and_one_that_lasts_the_batch(before):
    failures = [(status, "no luck") for status in (0, 500, 503)]
    with BulkServer(lambda texts: failures.pop() if failures else None) as server:
        found = before(server)(_column("a", None, "b"))["embedding"]
        assert failures == []
        assert np.array_equal(found[[0, 2]], vectors_of(["a", "b"]))
        server.fail = lambda texts: (503, "no luck")
        with pytest.raises(vecd.Overloaded, match="no luck"):
            before(server, retry_for=0.3)(_column("a", "b"))


def test_arguments_of_the_client(embedder, before):
    node = SimpleNamespace(url=embedder._client.url)
    actor = before(node, text_column="a", output_column="b", fields={"dimensions": 64})
    column = _column("x", None)["text"]
    assert [actor({"a": column[part]})["b"].shape for part in (slice(2), slice(1, 2), slice(0))] == [
        (2, 64), (1, 64), (0, 64)
    ]  # fmt: skip
    with pytest.raises(TypeError, match="no_such_field"):
        before(node, fields={"no_such_field": 1})(_column("x"))


def test_a_demanded_identity(embedder, before):
    expected = embedder(_column("a", "b"))["embedding"]
    node, identity = SimpleNamespace(url=embedder._client.url), embedder._client.identity
    name = identity.partition(";")[0]
    assert identity == f"{name};dtype=float32"
    for demanded in (identity, name):
        actor = before(node, identity=demanded)
        assert np.array_equal(actor(_column("a", "b"))["embedding"], expected)
    for other in (f"{name};dtype=bfloat16", "0" * 32):
        for cells in (["a", "b"], ["a"], [None]):
            with pytest.raises(vecd.IdentityMismatch):
                before(node, identity=other)(_column(*cells))


def test_the_class_needs_no_ray():
    code = "import sys; sys.modules['ray'] = None; import vecd.client.ray.data"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
