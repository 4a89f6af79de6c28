"""Scores, labels, weights and vectors of tokens that a server returns, against sentence-transformers 6 and the
pipelines of transformers on the same files: 80 texts or pairs for each head, with each activation and each truncation.

One model of each kind, in float32. `make soak` has the other families.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from torch.nn import functional
from transformers import AutoModel, PreTrainedTokenizerFast, pipeline

from tests.support import tiny_tokenizers
from tests.support.every_kind import folders, served
from tests.support.llm_checkpoints import save_causal, save_reranker
from tests.support.multi_vector_checkpoints import WORDS, save_own, save_pylate, save_stanford
from tests.support.score_checkpoints import save_classifier, save_minilm_cross_encoder
from tests.support.serving import RunningServer, bundled_model, exact_server
from tests.support.soak.form import only_long, pick
from tests.support.sparse_checkpoints import save_splade
from tests.support.texts import make_texts
from vecd.model.card import read_card

Floats = NDArray[np.floating[Any]]
Pairs = list[tuple[str, str]]

NUM = pick(short=80, long=200)
BOUND = 1e-5
"""Of the difference in float32, as a part of what is compared or, below 1, as it is."""


@contextmanager
def serving(
    shared: str | None, save: Callable[[Path], Path], folder: Path, *flags: str
) -> Iterator[tuple[RunningServer, Path]]:
    """The server of a model, and its folder. `shared`: its name on the server that all tests share; else it is made in
    `folder`, and has a server of its own."""
    if shared is not None:
        yield served(shared), folders()[shared]
        return
    saved = save(folder)
    with exact_server(str(saved), "--workers", "1", *flags) as server:
        yield server, saved


def assert_close(found: Floats, expected: Floats) -> None:
    assert found.shape == expected.shape
    differences = np.abs(found - expected) / np.maximum(1, np.abs(expected))
    assert differences.size == 0 or float(differences.max()) <= BOUND


def words_of(vocabulary: list[str], num: int, most: int, seed: int = 0) -> list[str]:
    """Texts of 0 to `most` words, some of them twice, some longer than the model takes."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices([*vocabulary, "unknown"], k=rng.randint(0, most))) for _ in range(num - 2)]
    return [*texts, "", texts[0]]


TEXTS = words_of([f"w{index}" for index in range(4, 120)], NUM, 80)


# --- pairs ------------------------------------------------------------------------------------------------------


class Ranker(NamedTuple):
    """A model that scores pairs, and what is sent to it."""

    save: Callable[[Path], Path]
    pairs: Pairs
    flags: tuple[str, ...] = ()
    prompt: str | None = None
    """A default of the request, as its instruction."""
    shared: str | None = None
    """Its name on the server that all tests share."""


def tiny(family: str, activation: torch.nn.Module | None = None, shared: str | None = None, **settings: Any) -> Ranker:
    """With an activation: as sentence-transformers saves it; else as transformers does."""
    pairs = list(zip(words_of([f"w{index}" for index in range(4, 120)], NUM, 40, seed=1), TEXTS, strict=True))

    def save(folder: Path) -> Path:
        plain = folder if activation is None else folder.with_name(f"{folder.name}-plain")
        save_classifier(plain, family, **settings)
        if activation is not None:
            model: Any = CrossEncoder(str(plain), device="cpu", local_files_only=True, activation_fn=activation)
            model.save_pretrained(str(folder))
        return folder

    return Ranker(save, pairs, ("--kind", "rerank"), shared=shared)


def minilm() -> Ranker:
    texts = [text[:160] for text in make_texts(NUM, seed=7)]
    queries = [text[:60] for text in make_texts(20, seed=8)]
    save = partial(save_minilm_cross_encoder, minilm=bundled_model())
    return Ranker(save, [(queries[at % 20], text) for at, text in enumerate(texts)])


def causal(save: Callable[[Path], Path], prompt: str | None) -> Ranker:
    rng = random.Random(3)
    texts = ["".join(rng.choices("abcde fgh", k=rng.randint(0, 300))) for _ in range(NUM)]
    pairs = [(texts[at % 20][:40], text) for at, text in enumerate(texts)]
    return Ranker(save, pairs, ("--accept-unordered",), prompt)


def _save_yes_and_no(folder: Path) -> Path:
    save_reranker(folder, save_causal(folder.with_name(f"{folder.name}-plain")))
    return folder


RANKERS = {
    "bert": tiny("bert", shared="scores"),
    "bert-2": tiny("bert", labels=2),
    "modernbert-mean": tiny("modernbert", classifier_pooling="mean"),
    "qwen3-yes-no": causal(_save_yes_and_no, "Find code"),
    "minilm": minilm(),
    "roberta": tiny("roberta", torch.nn.Identity()),
    "modernbert-cls": tiny("modernbert", classifier_pooling="cls"),
    "deberta-v2": tiny("deberta-v2"),
    "distilbert": tiny("distilbert"),
    "electra": tiny("electra", torch.nn.Tanh()),
    "xlm-roberta": tiny("xlm-roberta"),
}


_NEVER_LONG = ("minilm", "qwen3-yes-no")
"""Their pairs are shorter than the model's limit."""


def reference_of(folder: Path) -> Any:
    return CrossEncoder(str(folder), device="cpu", local_files_only=True)


def logits_of(model: Any, pairs: Pairs, prompt: str | None = None) -> Floats:
    """[N, labels]. Each length by itself: sentence-transformers sorts by it, so that little is padded."""
    made = model.predict(pairs, activation_fn=torch.nn.Identity(), prompt=prompt, batch_size=16)
    return np.asarray(made, dtype=np.float64).reshape(len(pairs), -1)


def relevance(logits: Floats) -> Floats:
    """What documents are ranked by."""
    difference: Floats = logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]
    return difference


def scores_of(server: RunningServer, pairs: Pairs, **fields: Any) -> Floats:
    queries, documents = zip(*pairs, strict=True)
    data = server.post("/score", text_1=queries, text_2=documents, **fields)["data"]
    assert [item["index"] for item in data] == list(range(len(pairs)))
    return np.array([item["score"] for item in data])


def sigmoid(logits: Floats) -> Floats:
    return 1 / (1 + np.exp(-logits.astype(np.float64)))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[only_long] * (ranker.shared is None)) for name, ranker in RANKERS.items()]
)
def test_pairs_have_the_reference_s_scores_and_order(name: str, tmp_path: Path) -> None:
    ranker = RANKERS[name]
    pairs = ranker.pairs
    with serving(ranker.shared, ranker.save, tmp_path / "model", *ranker.flags) as (server, folder):
        model = reference_of(folder)
        asked = {} if ranker.prompt is None else {"instruction": ranker.prompt}
        logits = logits_of(model, pairs, ranker.prompt)
        expected = relevance(logits)
        assert len(set(expected)) > NUM // 2, "the reference tells them apart"
        assert_close(scores_of(server, pairs, raw_scores=True, **asked), expected)
        if asked:
            assert np.abs(scores_of(server, pairs, raw_scores=True) - expected).max() > 1e-3
            assert_close(scores_of(server, pairs, raw_scores=True), relevance(logits_of(model, pairs)))
        if logits.shape[1] == 1:
            own = model.predict(pairs, prompt=ranker.prompt)
            assert_close(scores_of(server, pairs, **asked), np.asarray(own, dtype=np.float64))
        if not asked:
            assert_labels(server, pairs, logits)
        if name not in _NEVER_LONG:
            assert_cuts(server, model, pairs)
        assert_order(server, model, ranker)


def assert_labels(server: RunningServer, pairs: Pairs, logits: Floats) -> None:
    """The logits and the activations of all labels, which rerankers have, too."""
    softmax = np.exp(logits - logits.max(axis=1, keepdims=True))
    softmax /= softmax.sum(axis=1, keepdims=True)
    for function, expected in (("none", logits), ("sigmoid", sigmoid(logits)), ("softmax", softmax)):
        rows = server.post("/predict", inputs=pairs, function_to_apply=function)
        found = [{item["label"]: item["score"] for item in row} for row in rows]
        named = [[row[f"LABEL_{index}"] for index in range(logits.shape[1])] for row in found]
        assert_close(np.array(named), expected)


def assert_cuts(server: RunningServer, model: Any, pairs: Pairs) -> None:
    """Pairs that are too long, cut at the other end; pairs that may have fewer tokens; documents that may."""
    tokenizer = model.tokenizer
    tokenizer.truncation_side = "left"
    expected = relevance(logits_of(model, pairs))
    tokenizer.truncation_side = "right"
    assert np.abs(expected - relevance(logits_of(model, pairs))).max() > 1e-3, "some are too long"
    assert_close(scores_of(server, pairs, raw_scores=True, overflow="truncate_left"), expected)
    limit, model.max_seq_length = model.max_seq_length, 20
    expected = relevance(logits_of(model, pairs))
    model.max_seq_length = limit
    assert_close(scores_of(server, pairs, raw_scores=True, truncate_prompt_tokens=20), expected)
    encodings = [
        tokenizer(document, truncation=True, max_length=7, add_special_tokens=False, return_offsets_mapping=True)
        for _, document in pairs
    ]
    ends = [encoding["offset_mapping"][-1][1] if encoding["input_ids"] else 0 for encoding in encodings]
    cut = [(query, document[:end]) for (query, document), end in zip(pairs, ends, strict=True)]
    assert_close(scores_of(server, pairs, raw_scores=True, max_tokens_per_doc=7), relevance(logits_of(model, cut)))


def assert_order(server: RunningServer, model: Any, ranker: Ranker) -> None:
    """All documents for one query: none is before another one whose reference is greater by more than twice the
    bound."""
    query, documents = ranker.pairs[1][0], [document for _, document in ranker.pairs]
    expected = relevance(logits_of(model, [(query, document) for document in documents]))
    results = server.post("/rerank", query=query, documents=documents)["results"]
    order = [item["index"] for item in results]
    assert sorted(order) == list(range(NUM))
    assert_close(np.array([item["relevance_score"] for item in results]), sigmoid(expected[order]))
    assert_ranked(expected, order)
    best = [item["index"] for item in server.post("/rerank", query=query, documents=documents, top_n=10)["results"]]
    assert len(best) == 10
    assert_ranked(expected, [*best, *sorted(set(range(NUM)) - set(best), key=lambda index: -expected[index])])


def assert_ranked(expected: Floats, order: list[int]) -> None:
    ranked = expected[order]
    greatest_behind = np.maximum.accumulate(ranked[::-1])[::-1]
    assert (greatest_behind - ranked <= 2 * BOUND * np.maximum(1, np.abs(greatest_behind))).all()


# --- labels -----------------------------------------------------------------------------------------------------

LABELS = ["sad", "glad", "mad"]
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "distilbert": {"labels": LABELS},
    "roberta": {"labels": LABELS, "problem_type": "multi_label_classification"},
    "qwen3": {"labels": LABELS},
    "bert": {"labels": LABELS, "problem_type": "regression"},
}
FUNCTIONS = ("default", "none", "sigmoid", "softmax")


@only_long
@pytest.mark.parametrize("family", CLASSIFIERS)
def test_labels_of_texts_are_those_of_transformers_pipeline(family: str, tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "model", family, **CLASSIFIERS[family])
    reference: Any = pipeline("text-classification", model=str(folder), device="cpu")
    # The pipeline takes a pair with an empty second text for a single text.
    pairs = [(first, second) for first, second in zip(TEXTS[::-1], TEXTS, strict=True) if second]
    with exact_server(str(folder), "--workers", "1", "--kind", "classify") as server:
        for function in FUNCTIONS:
            own = {} if function == "default" else {"function_to_apply": function}
            for inputs, known in (
                ([[text] for text in TEXTS], TEXTS),
                (pairs, [{"text": first, "text_pair": second} for first, second in pairs]),
            ):
                rows = server.post("/predict", inputs=inputs, function_to_apply=function)
                expected = [reference(each, top_k=None, truncation=True, **own) for each in known]
                assert_same_labels(rows, expected)
                if function == "none" and known is TEXTS:
                    assert_same_labels(server.post("/classify", input=TEXTS, raw_scores=True)["data"], expected)


def assert_same_labels(found: list[Any], expected: list[Any]) -> None:
    """Also in the same order, but where that is a matter of rounding."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        scores = {item["label"]: item["score"] for item in theirs}
        assert {item["label"] for item in ours} == set(LABELS) == set(scores)
        assert_close(np.array([item["score"] for item in ours]), np.array([scores[item["label"]] for item in ours]))
        assert_close(np.array([item["score"] for item in ours]), np.array([item["score"] for item in theirs]))


def test_entities_are_those_of_transformers_pipeline() -> None:
    server, folder = served("word-pieces"), folders()["word-pieces"]
    words = " ".join(tiny_tokenizers.CORPUS[:1] * 3).split()
    texts = [text for text in words_of(words, NUM, 30) if text]
    reference: Any = pipeline("token-classification", model=str(folder), device="cpu")
    labels = dict(reference.model.config.id2label)
    num_found = 0
    for aggregation in ("none", "simple", "first", "average", "max"):
        for ignored in ([], ["O"]):
            reference.model.config.id2label = dict(labels)
            answers = server.post("/predict", inputs=texts, aggregation_strategy=aggregation, ignore_labels=ignored)
            expected = [reference(text, aggregation_strategy=aggregation, ignore_labels=ignored) for text in texts]
            key = "entity" if aggregation == "none" else "entity_group"
            for ours, theirs in zip(answers, expected, strict=True):
                places = [[(item[key], item["start"], item["end"]) for item in items] for items in (ours, theirs)]
                assert places[0] == places[1]
                scores = [np.array([float(item["score"]) for item in items]) for items in (ours, theirs)]
                assert_close(*scores)
                num_found += len(ours)
    assert num_found > 10 * NUM


# --- sparse vectors ---------------------------------------------------------------------------------------------


def weights_of(server: RunningServer, texts: list[str], num_words: int, **fields: Any) -> Floats:
    """[N, vocabulary]"""
    rows = np.zeros((len(texts), num_words), dtype=np.float32)
    for row, vector in zip(rows, server.post("/embed_sparse", inputs=texts, **fields), strict=True):
        row[[item["index"] for item in vector]] = [item["value"] for item in vector]
    return rows


def _save_tiny_splade(**settings: Any) -> Callable[[Path], Path]:
    return lambda folder: save_splade(folder, **settings)


SPARSE: dict[str, Callable[[Path], Path]] = {
    "bert-max": save_splade,
    "distilbert-sum": _save_tiny_splade(family="distilbert", pooling="sum"),
    "router": _save_tiny_splade(query_weights=torch.rand(120, generator=torch.Generator().manual_seed(0))),
    "xlm-roberta-log1p": _save_tiny_splade(family="xlm-roberta", activation="log1p_relu"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[only_long] * (name != "bert-max")) for name in SPARSE])
def test_weights_are_those_of_sentence_transformers(name: str, tmp_path: Path) -> None:
    texts = [text for text in TEXTS if text]

    def expected(encode: Callable[..., Any], **options: Any) -> Floats:
        made: Floats = encode(texts, batch_size=8, convert_to_sparse_tensor=False, **options).numpy()
        return made

    shared = "splade" if name == "bert-max" else None
    with serving(shared, SPARSE[name], tmp_path, "--kind", "sparse") as (server, folder):
        model = SparseEncoder(str(folder), device="cpu", local_files_only=True)
        num_words = read_card(folder).vocab_size
        documents = expected(model.encode_document)
        assert (documents > 0).any()
        assert_close(weights_of(server, texts, num_words), documents)
        queries = weights_of(server, texts, num_words, input_type="query")
        assert_close(queries, expected(model.encode_query))
        cut = weights_of(server, texts, num_words, top_k=8)
        assert ((cut > 0).sum(axis=1) <= 8).all()
        assert_close(cut.sum(axis=1), expected(model.encode_document, max_active_dims=8).sum(axis=1))
        items = server.post("/v1/embeddings", input=texts, output="sparse", min_weight=0.5)["data"]
        kept = np.where(documents > 0.5, documents, 0)
        near = np.abs(documents - 0.5) <= BOUND
        for item, row, is_near in zip(items, kept, near, strict=True):
            found = np.zeros(num_words, dtype=np.float32)
            found[item["sparse"]["indices"]] = item["sparse"]["values"]
            assert_close(found[~is_near], row[~is_near])


# --- vectors of tokens ------------------------------------------------------------------------------------------

MANY_WORDS = words_of([*WORDS, ",", "!", "."], NUM, 40)
MULTI_VECTOR: dict[str, Callable[[Path], Path]] = {
    "pylate": lambda folder: save_pylate(folder, "bert"),
    "pylate-modernbert-attending": lambda folder: save_pylate(folder, "modernbert", attend_to_expansion_tokens=True),
    "stanford": save_stanford,
    "sentence-transformers": lambda folder: save_own(
        folder, "bert", query_expansion={"strategy": "min", "length": 12, "attend": False}, document_length=30
    ),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[only_long] * (name != "pylate")) for name in MULTI_VECTOR])
def test_vectors_of_tokens_are_those_of_sentence_transformers(name: str, tmp_path: Path) -> None:
    shared = name if name == "pylate" else None
    with serving(shared, MULTI_VECTOR[name], tmp_path / "model") as (server, folder):
        model = MultiVectorEncoder(str(folder), device="cpu", local_files_only=True)
        matrices: dict[str, list[Floats]] = {}
        for role, encode in (("query", model.encode_query), ("document", model.encode_document)):
            made: Any = encode(MANY_WORDS, batch_size=1, convert_to_numpy=True)
            matrices[role] = [np.asarray(matrix) for matrix in made]
            items = server.post("/v1/embeddings", input=MANY_WORDS, output="multi-vector", input_type=role)["data"]
            for item, expected in zip(items, matrices[role], strict=True):
                assert_close(np.array(item["embeddings"], dtype=np.float32).reshape(expected.shape), expected)
        query = next(at for at, text in enumerate(MANY_WORDS) if len(text) > 20)
        results = server.post("/rerank", query=MANY_WORDS[query], documents=MANY_WORDS)["results"]
        [scores] = model.similarity([matrices["query"][query]], matrices["document"]).numpy()
        order = [item["index"] for item in results]
        assert sorted(order) == list(range(NUM))
        assert_close(np.array([item["relevance_score"] for item in results]), scores[order])
        steps = np.diff(scores[order])
        assert (steps <= 2 * BOUND * np.maximum(1, np.abs(scores[order][1:]))).all()
        times = 2000 // NUM
        assert name != "pylate" or times * sum(matrix.size for matrix in matrices["document"]) > 8 * 2**20
        many = server.post("/score", text_1=MANY_WORDS[query], text_2=MANY_WORDS * times)["data"]
        assert_close(np.array([item["score"] for item in many]), np.tile(scores, times))
        pairs = server.post("/score", text_1=MANY_WORDS, text_2=MANY_WORDS[::-1])["data"]
        expected = model.similarity_pairwise(matrices["query"], matrices["document"][::-1]).numpy()
        assert_close(np.array([item["score"] for item in pairs]), expected)


# --- all of BGE-M3 ----------------------------------------------------------------------------------------------


def test_one_pass_has_the_vectors_of_three_requests_and_of_the_reference() -> None:
    server, folder = served("m3"), folders()["m3"]
    kinds = ("dense", "sparse", "multi-vector")
    together = server.post("/v1/embeddings", input=MANY_WORDS, output=list(kinds))["data"]
    alone = {kind: server.post("/v1/embeddings", input=MANY_WORDS, output=kind)["data"] for kind in kinds}
    dense = SentenceTransformer(str(folder), device="cpu", local_files_only=True).encode(MANY_WORDS, batch_size=1)
    for at, item in enumerate(together):
        sparse, tokens = item["sparse"], np.array(item["embeddings"])
        assert sparse["indices"] == alone["sparse"][at]["sparse"]["indices"]
        assert_close(np.array(sparse["values"]), np.array(alone["sparse"][at]["sparse"]["values"]))
        assert_close(tokens, np.array(alone["multi-vector"][at]["embeddings"]))
        assert_close(np.array(item["embedding"]), np.array(alone["dense"][at]["embedding"]))
        assert_close(np.array(item["embedding"]), dense[at])
    for (weights, matrix), item in zip(_by_hand(folder, MANY_WORDS), together, strict=True):
        found = dict(zip(item["sparse"]["indices"], item["sparse"]["values"], strict=True))
        assert found.keys() ^ weights.keys() <= {index for index, weight in weights.items() if weight <= BOUND}
        shared = sorted(found.keys() & weights.keys())
        assert_close(np.array([found[index] for index in shared]), np.array([weights[index] for index in shared]))
        assert_close(np.array(item["embeddings"]).reshape(matrix.shape), matrix)


def _by_hand(folder: Path, texts: list[str]) -> Iterator[tuple[dict[int, float], Floats]]:
    """As FlagEmbedding's M3 computes them: the greatest weight of each word that is no special token, and a vector of
    every token but the first."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    heads = {name: load_file(folder / f"{name}_linear.safetensors") for name in ("sparse", "colbert")}
    linear = {name: (state["weight"], state["bias"]) for name, state in heads.items()}
    for text in texts:
        encoding = tokenizer(text, truncation=True, return_tensors="pt")
        ids = encoding["input_ids"]
        with torch.inference_mode():
            states = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
            weights = functional.linear(states, *linear["sparse"]).relu()[:, 0].tolist()
            matrix = functional.normalize(functional.linear(states[1:], *linear["colbert"]), dim=-1).numpy()
        greatest: dict[int, float] = {}
        for index, weight in zip(ids[0].tolist(), weights, strict=True):
            if index not in tokenizer.all_special_ids and weight > 0:
                greatest[index] = max(weight, greatest.get(index, 0.0))
        yield greatest, matrix
