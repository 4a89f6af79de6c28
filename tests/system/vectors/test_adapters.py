"""Adapters over HTTP, fetched from the hub with their bases: tasks of one base, and a fine-tune of another."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.support.hub_stand_in import Hub
from tests.support.published import RowsOf
from tests.support.published import adapters as published
from tests.support.published.adapters import change
from tests.support.serving import RunningServer, running_server

V5 = "jinaai/jina-embeddings-v5-text-small"
TEXTS = ["isn't it the quick brown fox?", "日本語のテキスト", " "]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By hub id."""
    place = tmp_path_factory.mktemp("hub")
    found = {V5: place / "v5", "org/fine-tune": place / "fine-tune"}
    for folder in found.values():
        folder.mkdir()
    published.save_v5(found[V5])
    published.save_bert_adapter(found["org/fine-tune"])
    found["org/base"] = place / "base"
    (found["org/fine-tune"] / "base").rename(found["org/base"])
    change(found["org/fine-tune"] / "adapter_config.json", base_model_name_or_path="org/base")
    return found


@pytest.fixture(scope="module")
def server(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = (f"{V5}/retrieval", f"{V5}/text-matching", "org/fine-tune")
    flags = ("--workers", "1", "--engine", "lean", "--device", "cpu")
    home = tmp_path_factory.mktemp("home")
    with Hub(folders) as hub, running_server(*models, *flags, env=hub.environment(home)) as server:
        yield server


def response(server: RunningServer, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/embeddings", json={"input": TEXTS, **body}, timeout=60)


def assert_rows(found: httpx.Response, reference: RowsOf, folder: Path, prompt: str = "") -> None:
    assert found.status_code == 200, found.text
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(64)
    for item, text in zip(found.json()["data"], TEXTS, strict=True):
        expected = reference(np.array(tokenizer.encode(prompt + text).ids, np.int64), 0)
        np.testing.assert_allclose(item["embedding"], expected, atol=1e-5)


def test_a_task_of_the_base_is_answered_by_its_adapter(server, folders):
    folder = folders[V5]
    retrieval, matching = (published.v5_reference(folder, task) for task in ("retrieval", "text-matching"))
    found = response(server, model=V5, task="retrieval.query")
    assert_rows(found, retrieval, folder, "Query: ")
    assert found.json()["model"] == found.headers["x-vecd-model"] == f"{V5}/retrieval"
    assert_rows(response(server, model=V5, input_type="passage"), retrieval, folder, "Document: ")
    assert_rows(response(server, model=f"{V5}:query"), retrieval, folder, "Query: ")
    assert_rows(response(server, model=V5, task="text-matching"), matching, folder)
    assert_rows(response(server, model=f"{V5}/text-matching", prompt_name="document"), matching, folder, "Document: ")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"model": V5}, f"one of the adapters of '{V5}' that are served: 'retrieval', 'text-matching'"),
        ({"model": V5, "task": "classification"}, "'retrieval', 'text-matching', is 'classification'"),
        ({"model": f"{V5}/retrieval", "task": "separation"}, f"model '{V5}/retrieval' has that of 'retrieval'"),
    ],
)
def test_a_task_that_is_not_served(body, why, server):
    found = response(server, **body)
    assert (found.status_code, found.json()["error"]["param"]) == (400, "task")
    assert why in found.json()["error"]["message"]


def test_a_fine_tune_is_merged_into_the_base_that_its_file_names(server, folders):
    reference = published.rows_of(published.bert_of(folders["org/base"]), lambda states: states.mean(0))
    assert_rows(response(server, model="org/fine-tune"), reference, folders["org/base"])
