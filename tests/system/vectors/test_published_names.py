"""Every model by its published name, over HTTP: from a folder and from the hub, in float32 and in the default format,
texts of all kinds, with every prompt of the model.

The expected rows are the reference's, of the ids that the model's own tokenizer gives.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sentence_transformers import MultiVectorEncoder
from tokenizers import Tokenizer

from tests.support.checkpoints import cosines_of
from tests.support.hub_stand_in import Hub
from tests.support.published import Ids, IdsOf, Layout, folder_of, layouts, table_of
from tests.support.published._configured import configured
from tests.support.serving import RunningServer, cache_folder, running_server
from tests.support.several_models import model_of
from tests.support.tiny_tokenizers import CORPUS
from vecd.model.card import ModelCard
from vecd.workers.select import compute_reference

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

Rows = NDArray[np.float32]

BOUND = 1e-5
"""Of numbers in float32, as a part of them or, below 1, as it is."""
COSINE, LOSSY_COSINE = 0.99999, 0.998
LOSSY_BOUND = 0.15
"""Of logits in another format than float32: a part of their standard deviation."""
NUM_OF_SERVER = 4
"""Models of one server, each in three tables."""
QUERY = "isn't it the quick brown fox?"


@contextmanager
def serving(some: list[Layout], folder: Path) -> Iterator[RunningServer]:
    """Each model as folder/NAME and hub/NAME in float32, and as default/NAME, which is from the hub, too."""
    hub_of = {"/".join(layout.name.split("/")[:2]): folder_of(layout) for layout in some}
    tables = [
        table_of(layout, source, f"{place}/{layout.name}", **settings)
        for layout in some
        for place, source, settings in (
            ("folder", folder_of(layout), {"dtype": "float32"}),
            ("hub", layout.name, {"dtype": "float32"}),
            ("default", layout.name, {}),
        )
    ]
    (folder / "vecd.toml").write_text("\n".join(tables))
    flags = (
        "--workers",
        "1",
        "--load",
        "demand",
        "--keep-alive",
        "15s",
        "--accept-unordered",
        "--start-timeout",
        "120",
    )
    with (
        Hub(hub_of) as hub,
        running_server(*flags, "--config", str(folder / "vecd.toml"), env=hub.environment(folder / "hub")) as server,
    ):
        yield server


def _chunks() -> list[list[Layout]]:
    every = layouts()
    return [list(every[first : first + NUM_OF_SERVER]) for first in range(0, len(every), NUM_OF_SERVER)]


@pytest.fixture(scope="module", params=_chunks(), ids=lambda some: some[0].name)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningServer, list[Layout]]]:
    with serving(request.param, tmp_path_factory.mktemp("published")) as server:
        yield server, request.param


@pytest.mark.parametrize("place", ["folder", "hub", "default"])
@pytest.mark.parametrize("number", range(NUM_OF_SERVER))
def test_a_name(served: tuple[RunningServer, list[Layout]], number: int, place: str, tmp_path: Path) -> None:
    server, some = served
    if number >= len(some):
        return  # the last server has fewer models
    layout, folder = some[number], folder_of(some[number])
    with configured(layout, "float32", tmp_path) as config:
        if not (config.card.is_static or config.card.export_file):
            compute_reference(replace(config, cache_dir=Path(cache_folder())))  # which takes a server longer
        card = config.card
    model = Asked(model_of(server, f"{place}/{layout.name}"), layout, folder, card, place == "default")
    _ASK[layout.capability](model)
    [worker, *_] = model.server.info()["workers"]
    if place != "default":
        assert (worker["path"], worker["dtype"]) == (layout.path, "float32")
    elif layout.dtype:
        assert worker["dtype"] == layout.dtype


@dataclass
class Asked:
    server: RunningServer
    layout: Layout
    folder: Path
    card: ModelCard
    is_lossy: bool
    """It may be computed in another format than float32."""

    def __post_init__(self) -> None:
        self.reference = self.layout.reference(self.folder)
        make = self.layout.ids
        self.ids = ids_of(Path(self.card.tokenizer_file), self.card) if make is None else make(self.folder)

    def post(self, path: str, **fields: Any) -> Any:
        response = httpx.post(f"{self.server.url}{path}", json=fields, timeout=200)
        assert response.status_code == 200, response.text
        return response.json()

    def expected(self, first: str, second: str = "") -> Rows:
        ids, border = self.ids(first, second)
        return self.reference(np.array(ids, dtype=np.int64), border)

    def texts(self) -> list[str]:
        """Blanks, scripts, emoji, special tokens inside, and more tokens than the model takes."""
        tokens = [token["content"] for token in special_tokens_in(Path(self.card.tokenizer_file))]
        inside = [f"one {token} two{token}three" for token in tokens[:6]]
        long = " ".join(CORPUS[0] for _ in range(1 + min(self.card.max_tokens, 2000) // 10))
        return [*CORPUS, "a", "  blanks \t and\n\nlines   ", "🙂🙃 👩‍👩‍👧‍👦 🇪🇺", *inside, long]

    def assert_vectors(self, found: list[Any], expected: list[Rows]) -> None:
        for ours, theirs in zip(found, expected, strict=True):
            rows, wanted = np.atleast_2d(np.array(ours, dtype=np.float32)), np.atleast_2d(theirs)
            assert rows.shape == wanted.shape
            if wanted.any() or rows.any():  # of a text without words they are 0
                assert cosines_of(rows, wanted).min() >= (LOSSY_COSINE if self.is_lossy else COSINE)

    def assert_numbers(self, found: Any, expected: Any) -> None:
        ours, theirs = np.array(found, dtype=np.float32), np.array(expected, dtype=np.float32)
        assert ours.shape == theirs.shape
        bound = LOSSY_BOUND * theirs.std() if self.is_lossy else BOUND * np.maximum(1, np.abs(theirs))
        assert (np.abs(ours - theirs) <= bound).all(), (ours, theirs)


def special_tokens_in(tokenizer: Path) -> list[Any]:
    return [token for token in json.loads(tokenizer.read_text()).get("added_tokens", []) if token["special"]]


def ids_of(file: Path, card: ModelCard) -> IdsOf:
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_padding()
    tokenizer.enable_truncation(card.max_tokens)

    def ids(first: str, second: str) -> Ids:
        text, pair = (each.lower() if card.lowercase else each for each in (first, second))
        encoding = tokenizer.encode(text, pair or None, add_special_tokens=not card.is_static)
        return encoding.ids, next((place for place, kind in enumerate(encoding.type_ids) if kind), 0)

    return ids


# --- by capability --------------------------------------------------------------------------------------------------


def _ask_for_vectors(model: Asked) -> None:
    texts = model.texts()
    for name, prompt in (model.layout.prompts or prompts_in(model.folder)).items():
        items = model.post("/v1/embeddings", input=texts, **({"prompt_name": name} if name else {}))["data"]
        expected = [model.expected(f"{prompt}{text}") for text in texts]
        model.assert_vectors([item["embedding"] for item in items], expected)


def prompts_in(folder: Path) -> dict[str, str]:
    stated = folder / "config_sentence_transformers.json"
    settings = json.loads(stated.read_text()) if stated.is_file() else {}
    prompts = settings.get("prompts") or {}
    return {"": prompts.get(settings.get("default_prompt_name") or "", ""), **prompts}


def _ask_for_scores(model: Asked) -> None:
    documents = model.texts()
    results = model.post("/rerank", query=QUERY, documents=documents, raw_scores=True)["results"]
    found = {item["index"]: item["relevance_score"] for item in results}
    logits = np.array([model.expected(QUERY, document) for document in documents])
    relevance = logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]
    model.assert_numbers([found[index] for index in range(len(documents))], relevance)


def _ask_for_labels(model: Asked) -> None:
    texts = model.texts()
    labels = [model.card.score.labels[index] for index in range(model.card.num_labels)] if model.card.score else []
    rows = model.post("/predict", inputs=[[text] for text in texts], function_to_apply="none")
    named = [{item["label"]: item["score"] for item in row} for row in rows]
    model.assert_numbers([[row[label] for label in labels] for row in named], [model.expected(text) for text in texts])
    pairs = [[QUERY, text] for text in texts]
    rows = model.post("/predict", inputs=pairs, function_to_apply="none")
    named = [{item["label"]: item["score"] for item in row} for row in rows]
    expected = [model.expected(*pair) for pair in pairs]
    model.assert_numbers([[row[label] for label in labels] for row in named], expected)


def _ask_for_entities(model: Asked) -> None:
    texts = model.texts()
    answers = model.post("/predict", inputs=texts, aggregation_strategy="none", ignore_labels=[])
    found, expected = [], []
    for text, items in zip(texts, answers, strict=True):
        logits = model.expected(text).astype(np.float64)
        scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        found += [item["score"] for item in items]
        expected += [scores[item["index"]].max() for item in items]
    assert len(found) > 10 * len(texts) // 2
    model.assert_numbers(found, expected)


def _ask_for_weights(model: Asked) -> None:
    texts = model.texts()
    answers = model.post("/embed_sparse", inputs=texts)
    found = np.zeros((len(texts), model.card.vocab_size), dtype=np.float32)
    for row, items in zip(found, answers, strict=True):
        row[[item["index"] for item in items]] = [item["value"] for item in items]
    expected = np.array([model.expected(text) for text in texts])
    if model.is_lossy:
        model.assert_vectors(list(found), list(expected))
    else:
        model.assert_numbers(found, expected)


def _ask_for_token_vectors(model: Asked) -> None:
    """Where the layout does not have the ids, sentence-transformers tokenizes, expands queries and leaves out words;
    the vectors are the reference's."""
    texts = model.texts()
    encoder = None if model.layout.ids else _encoder_of(model)
    for role in ("query", "document"):
        items = model.post("/v1/embeddings", input=texts, output="multi-vector", input_type=role)["data"]
        if encoder is None:
            expected = [model.expected(text, role) for text in texts]
        else:
            encode = encoder.encode_query if role == "query" else encoder.encode_document
            expected = [np.asarray(each) for each in encode(texts, batch_size=1, convert_to_numpy=True)]
        model.assert_vectors([item["embeddings"] for item in items], expected)


def _encoder_of(model: Asked) -> Any:
    encoder: Any = MultiVectorEncoder(str(model.folder), device="cpu", local_files_only=True)
    forward = encoder.forward

    def refer(features: Any, **options: Any) -> Any:
        ids, num_attended = features["input_ids"][0].numpy(), int(features["attention_mask"].sum())
        made = forward(features, **options)
        rows = model.reference(ids, num_attended if num_attended < ids.size else 0)
        return {**made, "token_embeddings": torch.from_numpy(rows)[None]}

    encoder.forward = refer
    return encoder


_ASK: dict[str, Callable[[Asked], None]] = {
    "dense": _ask_for_vectors,
    "rerank": _ask_for_scores,
    "classify": _ask_for_labels,
    "token-classify": _ask_for_entities,
    "sparse": _ask_for_weights,
    "multi-vector": _ask_for_token_vectors,
}
