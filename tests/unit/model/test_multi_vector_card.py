"""Multi-vector models, read and refused. No test loads a weight."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.model_folders import ModelFolder, write_header
from vecd.model.card import read_card
from vecd.model.steps import TokenHead
from vecd.shm.output import Output

TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]", "!", ",", "[EOS]")
IDS = {token: index for index, token in enumerate(TOKENS)}
TYPES = {
    "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    "Dense": "sentence_transformers.base.modules.dense.Dense",
    "MultiVectorMask": "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask",
    "Normalize": "sentence_transformers.base.modules.normalize.Normalize",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "PyLate": "pylate.models.Dense.Dense",
    "HierarchicalTokenPooling": "sentence_transformers.multi_vector_encoder.modules.HierarchicalTokenPooling",
}
DENSE = {"in_features": 32, "out_features": 8, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
PYLATE = {
    "model_type": "ColBERT",
    "prompts": {},
    "query_prefix": "[Q] ",
    "document_prefix": "[D] ",
    "query_length": 16,
    "document_length": 24,
    "attend_to_expansion_tokens": False,
    "do_query_expansion": True,
    "skiplist_words": ["!", ",", "zebra"],
}


class Folder(ModelFolder):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        sizes = {"hidden_size": 32, "vocab_size": 14, "max_position_embeddings": 64, "pad_token_id": 0}
        self.write("config.json", {"model_type": "bert", **sizes})
        added = [{"content": "[Q] ", "id": 12}, {"content": "[D] ", "id": 13}]
        self.write("tokenizer.json", {"model": {"vocab": IDS}, "added_tokens": added})
        self.write("tokenizer_config.json", {"model_max_length": 31})
        write_header(path / "model.safetensors", {"linear.weight": [8, 32]})

    def chain(self, *kinds: str) -> None:
        chain = [(kind, f"{index}_{kind}" if index else "") for index, kind in enumerate(kinds)]
        self.write("modules.json", [{"type": TYPES[kind], "path": path} for kind, path in chain])
        for kind, path in chain:
            if kind in ("Dense", "PyLate"):
                self.write(f"{path}/config.json", DENSE)
                (self.path / path / "model.safetensors").touch()
            if kind == "Normalize":
                self.write(f"{path}/config.json", {"module_input_name": "token_embeddings"})
            if kind == "MultiVectorMask":
                self.write(f"{path}/config.json", {"skiplist_words": ["!"]})

    @property
    def head(self) -> TokenHead:
        head = self.read().tokens
        assert head is not None
        return head


def save_pylate(path: Path) -> Folder:
    folder = Folder(path)
    folder.chain("Transformer", "PyLate")
    folder.write("config_sentence_transformers.json", PYLATE)
    return folder


def save_own(path: Path) -> Folder:
    folder = Folder(path)
    folder.chain("Transformer", "Dense", "MultiVectorMask", "Normalize")
    settings = {"model_type": "MultiVectorEncoder", "prompts": {"query": "[Q] ", "document": "[D] "}}
    folder.write("config_sentence_transformers.json", settings)
    return folder


def save_stanford(path: Path) -> Folder:
    folder = Folder(path)
    folder.change("config.json", architectures=["HF_ColBERT"])
    folder.write("artifact.metadata", {"query_maxlen": 20, "doc_maxlen": 40})
    return folder


@pytest.fixture
def pylate(tmp_path: Path) -> Folder:
    return save_pylate(tmp_path / "model")


@pytest.fixture
def own(tmp_path: Path) -> Folder:
    return save_own(tmp_path / "model")


@pytest.fixture
def stanford(tmp_path: Path) -> Folder:
    return save_stanford(tmp_path / "model")


@pytest.mark.parametrize(
    ("changes", "expansion"),
    [
        ({}, (4, 16, False, True)),
        ({"do_query_expansion": False}, (None, 16, False, False)),
        ({"attend_to_expansion_tokens": True}, (4, 16, True, False)),
    ],
)
def test_the_expansion_of_pylate(changes: dict[str, bool], expansion: tuple[Any, ...], pylate: Folder) -> None:
    pylate.change("config_sentence_transformers.json", **changes)
    head = pylate.head
    assert (head.expansion_id, head.query_tokens, head.attends_to_expansion, head.has_unattended) == expansion


def test_pylate(pylate: Folder) -> None:
    card, head = pylate.read(), pylate.head
    assert card.capabilities == ("multi-vector",)
    assert (card.token_dim, card.dim, card.row_dim) == (8, 8, 8)
    assert card.main_output is Output.TOKEN_VECTORS
    assert card.outputs == {Output.TOKEN_VECTORS}
    assert card.max_tokens == 64, "not the limit of the text that was embedded last"
    assert [(step.kind, step.path) for step in head.steps] == [("dense", "1_PyLate"), ("normalize", "")]
    assert (head.query_marker, head.document_marker, head.query_prompt, head.document_prompt) == (12, 13, "", "")
    assert (head.query_tokens, head.max_query_tokens, head.document_tokens) == (16, None, 24)
    assert head.ignored_ids == (7, 8)
    assert not head.is_mean
    settings = {name: value for name, value in PYLATE.items() if name != "skiplist_words"}
    pylate.write("config_sentence_transformers.json", settings)
    assert pylate.head.ignored_ids == tuple(IDS[token] for token in "!,"), "the default words are punctuation"


@pytest.mark.parametrize(
    ("prefix", "prompt", "marker", "text"),
    [
        ("[Q] ", "find: ", 12, "find: "),
        ("[Q] ", "[Q] find: ", 12, "find: "),
        ("[unused0] look", None, 5, " look"),
        ("query: ", "find: ", None, "query: find: "),
        ("", "", None, ""),
    ],
)
def test_a_prefix_is_a_token_if_the_vocabulary_has_it(
    prefix: str | None, prompt: str | None, marker: int | None, text: str, pylate: Folder
) -> None:
    pylate.change("config_sentence_transformers.json", query_prefix=prefix, prompts={"query": prompt})
    assert (pylate.head.query_marker, pylate.head.query_prompt) == (marker, text)


def test_stanford(stanford: Folder) -> None:
    card, head = stanford.read(), stanford.head
    assert (card.capabilities, card.token_dim) == (("multi-vector",), 8)
    assert [(step.kind, step.tensor, step.bias) for step in head.steps] == [
        ("dense", "linear", False),
        ("normalize", "", True),
    ]
    assert (head.query_marker, head.document_marker) == (5, 6)
    assert (head.query_tokens, head.document_tokens, head.expansion_id) == (20, 40, 4)
    assert head.ignored_ids == (7, 8)
    stanford.write("artifact.metadata", {"mask_punctuation": False, "attend_to_mask_tokens": True})
    head = stanford.head
    assert (head.ignored_ids, head.attends_to_expansion) == ((), True)
    assert (head.query_tokens, head.document_tokens, stanford.read().max_tokens) == (32, 31, 64)
    (stanford.path / "artifact.metadata").unlink()
    assert stanford.head is not None
    stanford.change("config.json", hidden_size=16)
    assert "linear.weight is [8, 32]" in stanford.refusal()


def test_the_layout_of_sentence_transformers(own: Folder) -> None:
    own.change("config_sentence_transformers.json", similarity_fn_name="meanmaxsim")
    card, head = own.read(), own.head
    assert [step.kind for step in head.steps] == ["dense", "normalize"]
    assert (head.query_marker, head.query_prompt, head.document_prompt) == (None, "[Q] ", "[D] ")
    assert (head.query_tokens, head.expansion_id, head.document_tokens) == (0, None, 0)
    assert card.max_tokens == 31, "the tokenizer's limit, where none is set for documents"
    assert head.ignored_ids == (7,)
    assert head.is_mean


@pytest.mark.parametrize(
    ("expansion", "more", "expected"),
    [
        ({"strategy": "fixed", "length": 12}, {}, (12, None, 4, False)),
        ({"strategy": "fixed", "length": 12, "attend": True, "token": "[EOS]"}, {}, (12, None, 9, True)),
        ({"strategy": "min", "length": 12}, {"query_length": 20}, (12, 20, 4, False)),
        (None, {"query_length": 20}, (20, None, None, False)),
    ],
)
def test_the_expansion_of_queries(
    expansion: dict[str, Any] | None, more: dict[str, Any], expected: tuple[Any, ...], own: Folder
) -> None:
    own.write("sentence_bert_config.json", {"query_expansion": expansion, **more})
    head = own.head
    assert (head.query_tokens, head.max_query_tokens, head.expansion_id, head.attends_to_expansion) == expected


def test_without_a_mask_queries_are_filled_up_with_the_end(pylate: Folder) -> None:
    vocab = {token: index for token, index in IDS.items() if token != "[MASK]"}
    pylate.write("tokenizer.json", {"model": {"vocab": vocab}})
    assert "no token to expand" in pylate.refusal()
    pylate.change("tokenizer_config.json", eos_token={"content": "[EOS]"})
    assert pylate.head.expansion_id == 9


@pytest.mark.parametrize(
    ("file", "changes", "named"),
    [
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "max", "length": 4}}, "query_expansion"),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "fixed"}}, "length"),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "fixed", "length": 99}}, "limit is 64"),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "min", "length": 3, "token": "x"}}, "(x)"),
        ("2_MultiVectorMask/config.json", {"skiplist_tasks": ["query", "document"]}, "skiplist_tasks"),
        ("2_MultiVectorMask/config.json", {"keep_only_token_ids": [1]}, "keep_only_token_ids"),
        ("1_Dense/config.json", {"module_input_name": "sentence_embedding"}, "module_input_name"),
        ("1_Dense/config.json", {"in_features": 16}, "in_features"),
        ("3_Normalize/config.json", {"module_input_name": None, "module_output_name": "other"}, "module_output_name"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(file: str, changes: dict[str, Any], named: str, own: Folder) -> None:
    own.change(file, **changes)
    assert named in own.refusal()


def test_modules_of_other_kinds_are_refused(own: Folder) -> None:
    own.chain("Transformer", "Dense", "MultiVectorMask", "HierarchicalTokenPooling")
    assert "HierarchicalTokenPooling" in own.refusal()
    own.chain("Transformer", "Dense", "Normalize")
    assert "must have a MultiVectorMask" in own.refusal()
    own.chain("Dense", "MultiVectorMask")
    assert "begin with Transformer" in own.refusal()
    own.chain("Transformer", "MultiVectorMask", "Normalize")
    assert own.read().token_dim == 32, "a model may have no projection"


# --- BGE-M3 -----------------------------------------------------------------------------------------------------


@pytest.fixture
def bge_m3(tmp_path: Path) -> Folder:
    folder = Folder(tmp_path / "model")
    folder.chain("Transformer", "Pooling", "Normalize")
    folder.write("1_Pooling/config.json", {"pooling_mode": "cls"})
    folder.write("2_Normalize/config.json", {})
    special = {"cls_token": "[CLS]", "eos_token": "[SEP]", "pad_token": "[PAD]", "unk_token": {"content": "[UNK]"}}
    folder.change("tokenizer_config.json", mask_token="[MASK]", **special)
    for name in ("sparse_linear.safetensors", "colbert_linear.safetensors"):
        (folder.path / name).write_bytes(bytes(100))
    return folder


def test_bge_m3(bge_m3: Folder) -> None:
    card = bge_m3.read()
    assert card.capabilities == ("dense", "sparse", "multi-vector")
    assert (card.dim, card.token_dim, card.row_dim) == (32, 32, 33)
    assert card.main_output is Output.HYBRID
    assert card.outputs == {
        Output.VECTORS, Output.UNNORMALIZED, Output.TOKENS, Output.LEXICAL, Output.TOKEN_VECTORS, Output.HYBRID,
    }  # fmt: skip
    assert card.sparse is not None
    assert card.sparse.is_lexical
    assert card.sparse.ignored_ids == (0, 1, 2, 3), "padding, unknown, first and last; not the mask"
    assert [step.file for step in card.all_steps] == ["", "sparse_linear.safetensors", "colbert_linear.safetensors", ""]
    assert card.tokens is not None
    assert (card.tokens.drops_first, card.tokens.is_mean, card.tokens.has_unattended) == (True, True, False)
    assert card.weights_bytes == (bge_m3.path / "model.safetensors").stat().st_size + 200


def test_bge_m3_as_a_dense_model(bge_m3: Folder) -> None:
    assert read_card(bge_m3.path, "dense").capabilities == ("dense",)
    assert read_card(bge_m3.path, "sparse") == read_card(bge_m3.path, "multi-vector") == bge_m3.read()
    (bge_m3.path / "sparse_linear.safetensors").unlink()
    assert bge_m3.read().capabilities == ("dense",)
