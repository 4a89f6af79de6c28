"""Folders of SPLADE models, read and refused. Of the weights there are headers alone."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.model_folders import ModelFolder, write_header
from vecd.model.steps import SparseHead, Step
from vecd.shm.output import Output, span_of

STATIC = "query_0_SparseStaticEmbedding"
MODULES = "sentence_transformers.sparse_encoder.modules."
CONFIG = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "hidden_size": 32,
    "vocab_size": 3000,
    "max_position_embeddings": 64,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}
BERT = ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm")
NAMES = ["bert.embeddings.word_embeddings.weight", "cls.predictions.bias"] + [
    f"{name}.{end}" for name in BERT for end in ("weight", "bias")
]


def modules(*chain: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"idx": index, "path": path, "type": MODULES + kind} for index, (kind, path) in enumerate(chain)]


class Folder(ModelFolder):
    """A SPLADE model's folder that can be served, until a test spoils it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.write("config.json", CONFIG)
        self.write("tokenizer.json", {})
        self.write_weights(*NAMES)
        self.write("modules.json", modules(("Transformer", ""), ("SpladePooling", "1_SpladePooling")))
        self.write("sentence_bert_config.json", {"transformer_task": "fill-mask", "max_seq_length": 48})
        self.write("1_SpladePooling/config.json", {"pooling_strategy": "max", "activation_function": "relu"})
        self.write("config_sentence_transformers.json", {"model_type": "SparseEncoder"})

    def write_weights(self, *names: str, module: str = "") -> None:
        """Tensors without elements."""
        write_header(self.path / module / "model.safetensors", {name: [0] for name in names})

    def without_modules(self) -> "Folder":
        for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
            (self.path / name).unlink()
        return self

    def head(self, kind: str = "auto") -> SparseHead:
        head = self.read(kind).sparse
        assert head is not None
        return head

    def route(self, query: list[str], parameters: dict[str, Any] | None = None, **types: str) -> None:
        """A Router over the same document modules, as OpenSearch's models have it."""
        self.write("modules.json", modules(("Router", "")))
        kinds = {
            "": "MLMTransformer",
            "1_SpladePooling": "SpladePooling",
            STATIC: "SparseStaticEmbedding",
            **types,
        }
        structure = {"query": query, "document": ["", "1_SpladePooling"]}
        found = {"types": {name: MODULES + kind for name, kind in kinds.items()}, "structure": structure}
        self.write("router_config.json", {**found, "parameters": parameters or {"default_route": "document"}})


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path.resolve() / "model")


def test_a_sparse_encoder(folder: Folder) -> None:
    card = folder.read()
    assert card.capabilities == ("sparse",)
    assert (card.dim, card.vocab_size, card.max_tokens) == (3000, 3000, 48)
    assert card.main_output is Output.SPARSE
    assert card.outputs == {Output.SPARSE}
    assert (card.row_dim, span_of(card)) == (1024, 3)
    head = folder.head()
    assert (head.pooling, head.num_logs, head.query_weights) == ("max", 1, "")
    assert head.steps == (
        Step("dense", in_dim=32, out_dim=32, activation="gelu", tensor=BERT[0]),
        Step("layer_norm", in_dim=32, out_dim=32, tensor=BERT[1], epsilon=1e-12),
        Step(
            "dense",
            in_dim=32,
            out_dim=3000,
            tensor="bert.embeddings.word_embeddings",
            bias_tensor="cls.predictions.bias",
        ),
    )


def test_the_layout_of_sentence_transformers_5(folder: Folder) -> None:
    """Which names no task and no kind of model, and has another name for the transformer."""
    folder.write("modules.json", modules(("MLMTransformer", ""), ("SpladePooling", "1_SpladePooling")))
    folder.write("sentence_bert_config.json", {"max_seq_length": 48})
    folder.write("config_sentence_transformers.json", {})
    folder.write("1_SpladePooling/config.json", {"pooling_strategy": "sum", "activation_function": "log1p_relu"})
    assert (folder.head().pooling, folder.head().num_logs) == ("sum", 2)


def test_norms_and_decoders_under_other_names(folder: Folder) -> None:
    old = [
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        for name in NAMES
    ]
    folder.write_weights(*old, "cls.predictions.decoder.weight")
    _, norm, decoder = folder.head().steps
    assert norm.bias
    assert decoder.tensor == "cls.predictions.decoder"


def test_a_plain_model_for_masked_words_is_what_the_kind_says(folder: Folder) -> None:
    refusal = folder.without_modules().refusal()
    assert "BertForMaskedLM without modules.json" in refusal
    assert "--kind dense serves it with mean pooling, --kind sparse as SPLADE" in refusal
    assert folder.read("dense").capabilities == ("dense",)
    assert folder.read("sparse").capabilities == ("sparse",)
    assert (folder.head("sparse").pooling, folder.head("sparse").num_logs) == ("max", 1)


def test_other_models_are_not_sparse(folder: Folder) -> None:
    folder.without_modules().change("config.json", architectures=["BertModel"])
    assert "config.json: is not a sparse model: architectures is ['BertModel']" in folder.refusal("sparse")
    folder.write("modules.json", modules(("Transformer", ""), ("Pooling", "1_Pooling")))
    assert folder.refusal("sparse").startswith("modules.json: is not a sparse model: its modules are Transformer, Poo")


@pytest.mark.parametrize(
    ("chain", "why"),
    [
        ([("Transformer", ""), ("Pooling", "1"), ("SparseAutoEncoder", "2")], "Pooling is not supported in a sparse"),
        ([("Transformer", ""), ("SpladePooling", "1_SpladePooling"), ("Normalize", "2")], "Normalize"),
        ([("SpladePooling", "1_SpladePooling")], "must be a Transformer and a SpladePooling"),
        ([("SpladePooling", "../1")], "leads out of the model's folder"),
    ],
)
def test_chains_that_cannot_be_served(folder: Folder, chain: list[tuple[str, str]], why: str) -> None:
    folder.write("modules.json", modules(*chain))
    folder.assert_refused("modules.json", why)


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("1_SpladePooling/config.json", {"pooling_strategy": "mean"}, "pooling_strategy 'mean' is unknown"),
        ("sentence_bert_config.json", {"transformer_task": "feature-extraction"}, "is not a sparse model's"),
        ("config_sentence_transformers.json", {"max_active_dims": 64}, "max_active_dims is not supported"),
        ("config.json", {"model_type": "albert"}, "the head for masked words of albert is not described"),
        ("config.json", {"hidden_act": "gelu_new"}, "activation gelu_new in the head for masked words"),
        ("config.json", {"tie_word_embeddings": False}, "cls.predictions.decoder.weight is missing"),
    ],
)
def test_settings_that_cannot_be_served(folder: Folder, name: str, changes: dict[str, Any], why: str) -> None:
    folder.change(name, **changes)
    folder.assert_refused(name, why)


def test_weights_without_the_head(folder: Folder) -> None:
    folder.write_weights(*NAMES[:2])
    assert f"the weights have no head for masked words: {BERT[0]}.weight is missing" in folder.refusal()


# --- queries ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [f"{STATIC}/idf.json", "idf.json"])
def test_queries_with_static_weights(folder: Folder, where: str) -> None:
    folder.route([STATIC])
    assert f"{STATIC}/model.safetensors: file missing" in folder.refusal()
    folder.write_weights("weight", module=STATIC)
    assert folder.head().query_weights == f"{STATIC}/model.safetensors"
    folder.write(f"{STATIC}/config.json", {"frozen": False, "path": "/somewhere/idf.json"})
    folder.write(where, {"a": 1.5})
    assert folder.head().query_weights == where
    folder.write("tokenizer.json", {"model": {"vocab": {"a": 0, "b": 1}}, "truncation": {"max_length": 9}})
    folder.write(f"{STATIC}/tokenizer.json", {"model": {"vocab": {"a": 0, "b": 1}}})
    assert folder.head().query_weights == where
    folder.write(f"{STATIC}/tokenizer.json", {"model": {"vocab": {"a": 1, "b": 0}}})
    folder.assert_refused(f"{STATIC}/tokenizer.json", "another tokenizer")


@pytest.mark.parametrize(
    ("query", "changes", "why"),
    [
        (["2"], {"types": {"2": "MLMTransformer"}}, "the query's modules are MLMTransformer"),
        (["3"], {}, "cannot be read: KeyError('3')"),
        ([""], {"parameters": {"route_mappings": {"('query', 'text')": "query"}}}, "route_mappings is not supported"),
    ],
)
def test_routers_that_cannot_be_served(folder: Folder, query: list[str], changes: dict[str, Any], why: str) -> None:
    folder.route(query, changes.get("parameters"), **changes.get("types", {}))
    folder.assert_refused("router_config.json", why)
