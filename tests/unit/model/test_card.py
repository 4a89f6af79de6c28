"""Model folders, read and refused. No test loads a weight: the files are there, and empty."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.model_folders import ModelFolder
from vecd.model.card import ModelCard, ModelError, export_files, read_card
from vecd.model.steps import Step
from vecd.shm.output import Output

OLD = "sentence_transformers.models."
NEW = {
    "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "Dense": "sentence_transformers.base.modules.dense.Dense",
    "LayerNorm": "sentence_transformers.sentence_transformer.modules.layer_norm.LayerNorm",
    "Normalize": "sentence_transformers.base.modules.normalize.Normalize",
}
CONFIG = {"model_type": "bert", "hidden_size": 32, "vocab_size": 100, "max_position_embeddings": 64, "pad_token_id": 0}


def modules(*chain: tuple[str, str], old: bool = False) -> list[dict[str, Any]]:
    return [
        {"idx": index, "name": str(index), "path": path, "type": OLD + kind if old else NEW.get(kind, OLD + kind)}
        for index, (kind, path) in enumerate(chain)
    ]


TRANSFORMER, POOLING, NORMALIZE = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")


class Folder(ModelFolder):
    """A model's folder that can be served, until a test spoils it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.write("config.json", CONFIG)
        self.write("tokenizer.json", {})
        self.write("model.safetensors", "")
        self.write("modules.json", modules(TRANSFORMER, POOLING, NORMALIZE))
        self.write("1_Pooling/config.json", {"embedding_dimension": 32, "pooling_mode": "mean"})

    def add_dense(self, name: str = "2_Dense", weights: str = "model.safetensors", **changes: Any) -> None:
        self.write("modules.json", modules(TRANSFORMER, POOLING, ("Dense", name)))
        config = {"in_features": 32, "out_features": 8, "bias": True, "activation_function": "torch.nn.modules.Tanh"}
        self.write(f"{name}/config.json", {**config, **changes})
        self.write(f"{name}/{weights}", "")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path.resolve() / "model")


# --- what is read -----------------------------------------------------------------------------------------------


def test_the_real_model(minilm_folder: Path) -> None:
    path = minilm_folder
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


def test_the_layout_of_sentence_transformers_2(tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path)
    for name, content in (("config.json", CONFIG), ("tokenizer.json", {}), ("model.safetensors", "")):
        folder.write(f"0_Transformer/{name}", content)
    folder.write("0_Transformer/sentence_bert_config.json", {"max_seq_length": 50, "do_lower_case": True})
    folder.write("1_Pooling/config.json", {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True})
    folder.write("modules.json", modules(("Transformer", "0_Transformer"), POOLING, NORMALIZE, old=True))
    card = folder.read()
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
        ({"architectures": ["Qwen3ForCausalLM"]}, "lasttoken"),
        ({"architectures": ["LlamaForCausalLM"], "is_causal": False}, "mean"),
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
    (folder.path / "model-1-of-1.safetensors").unlink()
    assert folder.refusal().startswith("model-1-of-1.safetensors: file missing")


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


@pytest.mark.parametrize("name", ["vocab.txt", "spiece.model"])
def test_a_tokenizer_that_is_still_to_be_made(folder: Folder, name: str) -> None:
    (folder.path / "tokenizer.json").rename(folder.path / name)
    assert folder.read().tokenizer_file == ""


NOMIC: dict[str, Any] = {
    "model_type": "nomic_bert",
    "auto_map": {
        "AutoConfig": "nomic-ai/nomic-bert-2048--configuration_hf_nomic_bert.NomicBertConfig",
        "AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel",
    },
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
NOMIC_MOE: dict[str, Any] = {
    **NOMIC,
    "activation_function": "gelu",
    **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), True),
    "num_experts": 8,
    "moe_top_k": 2,
    "moe_every_n_layers": 2,
}
_CODE = "jinaai/jina-bert-v2-qk-post-norm"
JINA_BERT: dict[str, Any] = {
    **CONFIG,
    "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
    "position_embedding_type": "alibi",
    "feed_forward_type": "geglu",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
}
FLASH: dict[str, Any] = {
    **JINA_BERT,
    "model_type": "xlm-roberta",
    "auto_map": {"AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_xlm_roberta.XLMRobertaModel"},
    "position_embedding_type": "rotary",
    "hidden_act": "gelu",
    "rotary_emb_base": 20000.0,
}
GTE: dict[str, Any] = {
    **CONFIG,
    "model_type": "new",
    "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "layer_norm_eps": 1e-12,
    "rope_theta": 10_000,
}

QWEN2 = {**CONFIG, "model_type": "qwen2", "is_causal": False, "auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}}
QWEN2_UNSTATED = {key: value for key, value in QWEN2.items() if key != "is_causal"}
NEMOTRON = {**CONFIG, "model_type": "llama_bidirec", "auto_map": {"AutoModel": "m.LlamaBidirectionalModel"}}
VOYAGE = {**CONFIG, "model_type": "qwen3", "auto_map": {"AutoModel": "m.Qwen3BidirectionalModel"}, "num_labels": 48}
PPLX = {**CONFIG, "model_type": "bidirectional_pplx_qwen3", "auto_map": {"AutoModel": "modeling.PPLXQwen3Model"}}
EUROBERT = {**CONFIG, "model_type": "eurobert", "auto_map": {"AutoModel": "modeling_eurobert.EuroBertModel"}}


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
        (QWEN2, "qwen2", 100, 64),
        (QWEN2_UNSTATED, "qwen2", 100, 64),
        (NEMOTRON, "llama", 100, 64),
        (PPLX, "qwen3", 100, 64),
        (EUROBERT, "eurobert", 100, 64),
        (GTE, "gte", 100, 64),
        ({**GTE, "rope_scaling": {"type": "ntk", "factor": 8.0}}, "gte", 100, 64),
        (NOMIC_MOE, "nomic_bert_moe", 100, 8192),
        (JINA_BERT, "jina_bert", 100, 64),
        ({**JINA_BERT, "auto_map": {"AutoModel": f"{_CODE}--modeling_bert.JinaBertModel"}}, "jina_bert_code", 100, 64),
        # A copy of the code beside the weights.
        (
            {**JINA_BERT, "auto_map": {"AutoModel": "modeling_bert.JinaBertModel"}, "_name_or_path": _CODE},
            "jina_bert_code",
            100,
            64,
        ),
        (FLASH, "jina_embeddings_v3", 100, 64),
        ({**FLASH, "position_embedding_type": "absolute"}, "xlm_roberta_flash", 100, 63),
        # The first of these configurations have no model_type.
        ({key: value for key, value in FLASH.items() if key != "model_type"}, "jina_embeddings_v3", 100, 64),
        # Code for heads alone: hidden states come from transformers' own model, in sentence-transformers, too.
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
        ({"sentence_bert_config.json": {"max_seq_length": 40}}, 40),
        ({"sentence_bert_config.json": {"max_seq_length": 400}}, 64),
        (
            {"sentence_bert_config.json": {"max_seq_length": None}, "tokenizer_config.json": {"model_max_length": 30}},
            30,
        ),
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


@pytest.mark.parametrize(
    ("config", "prompt"),
    [
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


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere", "no such folder"),
        ("file", "is a file, and a model is a folder"),
        # The fetch leaves nothing there.
        ("models--a--b-GGUF/snapshots/0a1b", "is in the GGUF format"),
    ],
)
def test_what_is_no_folder_of_a_model(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=f"{name}.*: {why}"):
        read_card(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("config.json", None, "config.json: file missing"),
        ("tokenizer.json", None, "tokenizer.json: file missing"),
        ("model.safetensors", None, "model.safetensors: file missing"),
        ("1_Pooling/config.json", None, "1_Pooling/config.json: file missing"),
        ("config.json", [1], "config.json: must be a JSON object"),
    ],
)
def test_a_missing_file_and_json_of_another_shape(folder: Folder, name: str, content: Any, why: str) -> None:
    folder.write(name, content)
    if content is None:
        (folder.path / name).unlink()
    assert folder.refusal().startswith(why)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("pytorch_model.bin", ": weights only as pickle (pytorch_model.bin); of pickles, vecd converts pytorch_model."),
        ("model.pt", ": weights only as pickle (model.pt)"),
    ],
)
def test_weights_in_another_format(folder: Folder, name: str, why: str) -> None:
    folder.write(name, "")
    (folder.path / "model.safetensors").unlink()
    assert folder.refusal().startswith(why)


_SETTINGS, _BERT = "config_sentence_transformers.json", "sentence_bert_config.json"


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("config.json", {"transformers_weights": "adapter_model.bin"}, "transformers_weights"),
        ("config.json", {"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ("config.json", {"vocab_size": 0}, "vocab_size"),
        ("config.json", {"max_position_embeddings": None}, "how long a text may be"),
        ("config.json", {"model_type": "clip"}, "a model of type clip has images; vecd serves text"),
        ("1_Pooling/config.json", {"pooling_mode": "median"}, "known: cls, max"),
        ("1_Pooling/config.json", {"pooling_mode": [["mean"]]}, "known: cls, max"),
        ("2_Normalize/config.json", {"module_input_name": "token_embeddings"}, "module_input_name"),
        (_SETTINGS, {"default_prompt_name": "clustering"}, "'clustering' is not among"),
        (_SETTINGS, {"truncate_dim": 0}, "truncate_dim is missing or not a positive whole number"),
        (_SETTINGS, {"matryoshka_dims": [8, 64]}, "matryoshka_dims must be a list of whole numbers from 1 to 32"),
        (_BERT, {"transformer_task": "fill-mask"}, "is not an embedding model's"),
        (_BERT, {"modality_config": {"message": {"method": "forward", "method_output_name": "pooler_output"}}}, ""),
        (_BERT, {"config_kwargs": {"is_causal": False}}, "config_kwargs"),
        (_BERT, {"config_args": {"num_hidden_layers": 2}}, "config_args"),
        (_BERT, {"modality_config": {"text": {"method": "get_text_features"}}}, ""),
        (_BERT, {"processing_kwargs": {"text": {"padding": True, "max_length": 8}}}, "processing_kwargs"),
        (_BERT, {"query_expansion": {"strategy": "fixed", "length": 32}}, "query_expansion"),
        (_BERT, {"processing_kwargs": {"common": {"add_special_tokens": False}}}, "processing_kwargs"),
    ],
)
def test_a_setting_that_cannot_be_served(folder: Folder, name: str, changes: dict[str, Any], why: str) -> None:
    folder.change(name, **changes)
    folder.assert_refused(name, why)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"in_features": 64}, "in_features is 64, but the vector has 32"),
        ({"use_residual": True}, "use_residual"),
        ({"activation_function": "my_package.Swish"}, "my_package.Swish"),
        ({"module_input_name": "token_embeddings"}, "module_input_name"),
    ],
)
def test_a_dense_layer_that_cannot_be_served(folder: Folder, changes: dict[str, Any], why: str) -> None:
    folder.add_dense(**changes)
    folder.assert_refused("2_Dense/config.json", why)


@pytest.mark.parametrize("name", ["config.json", "1_Pooling/config.json"])
@pytest.mark.parametrize("content", ["", "\ud800", "1" * 5000, "[" * 100_000])
def test_broken_json(folder: Folder, name: str, content: str) -> None:
    folder.write(name, "")
    (folder.path / name).write_bytes(content.encode(errors="surrogatepass"))
    assert folder.refusal().startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({**QWEN2, "is_causal": True}, "is_causal is True"),
        ({**QWEN2, "use_sliding_window": True}, "use_sliding_window is True"),
        # Without a word of it, this class of other code may hide later tokens or not.
        ({**QWEN2_UNSTATED, "auto_map": {"AutoModel": "modeling.Qwen2Model"}}, "is_causal is True"),
        ({**QWEN2, "model_type": "mistral", "auto_map": {"AutoModel": "m.MistralModel"}}, "an argument of this code"),
        ({**NEMOTRON, "pooling": "last"}, "pooling is 'last'"),
        ({**VOYAGE, "num_labels": None}, "num_labels is missing"),
        ({**VOYAGE, "use_sliding_window": True}, "use_sliding_window is True"),
        ({**PPLX, "use_bidirectional_attention": False}, "use_bidirectional_attention is False"),
        ({**EUROBERT, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling is"),
        ({**EUROBERT, "pretraining_tp": 2}, "pretraining_tp is 2"),
        ({**CONFIG, "model_type": "nvembed", "auto_map": {"AutoModel": "m.NVEmbedModel"}}, "latent attention"),
        ({**CONFIG, "auto_map": {"AutoModel": "modeling.BertModel"}}, "no architecture that is known to be the same"),
        ({**CONFIG, "auto_map": {"AutoConfig": "configuration.BertConfig"}}, "auto_map: configuration.BertConfig"),
        # The right class by name, of another family.
        ({**CONFIG, "auto_map": {"AutoModel": "x--y.NewModel"}}, "no architecture"),
        ({**NOMIC_MOE, "activation_function": "swiglu"}, "activation_function is 'swiglu'"),
        ({**NOMIC_MOE, "moe_top_k": 9}, "moe_top_k is 9, and there are 8 experts"),
        ({**NOMIC_MOE, "moe_every_n_layers": 1}, "moe_every_n_layers is 1, and must be 2 or more"),
        ({**NOMIC_MOE, "moe_normalize_expert_weights": True}, "moe_normalize_expert_weights is True"),
        ({**NOMIC_MOE, "num_shared_experts": 1}, "num_shared_experts is 1"),
        ({**NOMIC_MOE, "mlp_fc1_bias": False}, "mlp_fc1_bias is False"),
        ({**JINA_BERT, "position_embedding_type": "absolute"}, "position_embedding_type is 'absolute'"),
        ({key: value for key, value in JINA_BERT.items() if key != "position_embedding_type"}, "'absolute', and the"),
        ({**JINA_BERT, "feed_forward_type": "original"}, "feed_forward_type is 'original'; known: geglu, reglu"),
        ({**JINA_BERT, "num_attention_heads": 5}, "hidden_size 32 is no multiple of 5 heads"),
        ({**JINA_BERT, "num_attention_heads": 0}, "hidden_size 32 is no multiple of 0 heads"),
        ({**JINA_BERT, "is_decoder": True}, "is_decoder is True"),
        ({**FLASH, "position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'; known: rotary, absolute"),
        ({**FLASH, "position_embedding_type": None}, "position_embedding_type is None"),
        ({**FLASH, "hidden_act": "relu"}, "hidden_act is 'relu'; known: gelu, gelu_new"),
        ({**FLASH, "num_attention_heads": 3}, "no multiple of 3 heads"),
        ({**FLASH, "pad_vocab_size_multiple": 8}, "pad_vocab_size_multiple is 8"),
        ({**FLASH, "rotary_emb_base": "10000"}, "rotary_emb_base is missing or not a number"),
        ({**FLASH, "rotary_emb_base": 10**400}, "rotary_emb_base is missing or not a number"),
        ({**FLASH, "rotary_emb_dim": 4}, "rotary_emb_dim is 4, and a head has"),
        ({**FLASH, "rotary_emb_interleaved": True}, "rotary_emb_interleaved is True"),
        ({**FLASH, "rotary_emb_scale_base": 512}, "rotary_emb_scale_base is 512"),
        ({**NOMIC, "activation_function": "gelu"}, "activation_function is 'gelu'"),
        ({key: value for key, value in NOMIC.items() if key != "qkv_proj_bias"}, "qkv_proj_bias is True"),
        ({key: value for key, value in NOMIC.items() if key != "rotary_emb_fraction"}, "rotary_emb_fraction is 0.0"),
        ({**NOMIC, "rotary_scaling_factor": 2}, "rotary_scaling_factor is 2"),
        ({key: value for key, value in NOMIC.items() if key != "layer_norm_epsilon"}, "layer_norm_epsilon is missing"),
        ({key: value for key, value in NOMIC.items() if key != "auto_map"} | {"prenorm": True}, "prenorm is True"),
        ({**NOMIC, "num_hidden_layers": 12}, "num_hidden_layers is 12 under this name and 2 under"),
        ({**NOMIC, "rope_parameters": {"rope_theta": 10_000.0}}, "rotary_emb_base 1000.0"),
        ({**GTE, "position_embedding_type": "absolute"}, "position_embedding_type is 'absolute'"),
        ({**GTE, "logn_attention_scale": True}, "logn_attention_scale"),
        ({**GTE, "layer_norm_type": "rms_norm"}, "layer_norm_type"),
        ({**GTE, "rope_scaling": {"type": "ntk", "factor": 1}}, "greater than 1"),
        ({**GTE, "rope_scaling": "ntk"}, "rope_scaling 'ntk' is not known"),
        ({**GTE, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling"),
        ({**GTE, "rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}}, "mixed_b"),
    ],
)
def test_code_that_transformers_has_not_taken_in(folder: Folder, config: dict[str, Any], why: str) -> None:
    folder.write("config.json", config)
    folder.assert_refused("config.json", why)


def test_a_projection_of_the_model_is_the_first_step(folder: Folder) -> None:
    folder.write("config.json", VOYAGE)
    card = folder.read()
    assert card.steps[0] == Step("dense", tensor="linear", in_dim=32, out_dim=48, bias=False)
    assert card.dim == 48
    assert Output.TOKENS not in card.outputs  # which would be without it
    folder.write("1_Pooling/config.json", {"pooling_mode_max_tokens": True})
    folder.assert_refused("config.json", "mean pooling")


def test_a_quantizer_is_the_last_step(folder: Folder) -> None:
    modules = json.loads((folder.path / "modules.json").read_text())[:2]
    quantizer = {"idx": 2, "name": "2", "path": "", "type": "st_quantize.FlexibleQuantizer", "kwargs": ["quantization"]}
    folder.write("modules.json", [*modules, quantizer])
    card = folder.read()
    assert [step.kind for step in card.steps] == ["tanh_127"]
    assert (card.is_whole, card.is_normalized) == (True, False)
    normalize = {"idx": 3, "path": "3_Normalize", "type": "sentence_transformers.models.Normalize"}
    folder.write("modules.json", [*modules, quantizer, normalize])
    folder.assert_refused("modules.json", "behind FlexibleQuantizer")
    folder.write("modules.json", [*modules, {**quantizer, "type": "quantize.FlexibleQuantizer"}])
    folder.assert_refused("modules.json", "is not sentence-transformers' own")


_QWEN_CLASSES = ["tokenization_qwen.Qwen2Tokenizer", "tokenization_qwen.Qwen2TokenizerFast"]


@pytest.mark.parametrize(
    ("config", "end"),
    [
        ({"add_eos_token": True}, ""),
        ({"add_eos_token": True, "auto_map": {"AutoTokenizer": ["a.B", "a.C"]}}, ""),
        ({"add_eos_token": True, "auto_map": {"AutoTokenizer": _QWEN_CLASSES}}, "<e>"),
        # As transformers saves a model that it loaded from a hub.
        ({"auto_map": {"AutoTokenizer": [None, f"Alibaba-NLP/gte--{_QWEN_CLASSES[1]}"]}}, "<e>"),
        ({"eos_token": {"content": "<f>"}, "auto_map": {"AutoTokenizer": _QWEN_CLASSES}}, "<f>"),
        ({"add_eos_token": False, "auto_map": {"AutoTokenizer": _QWEN_CLASSES}}, ""),
    ],
)
def test_an_end_that_a_class_of_tokenizers_adds(folder: Folder, config: dict[str, Any], end: str) -> None:
    folder.write("tokenizer_config.json", {"eos_token": "<e>", **config})
    assert folder.read().end == end


@pytest.mark.parametrize("token", [None, 7, "", {}])
def test_an_end_without_a_name(folder: Folder, token: Any) -> None:
    folder.write("tokenizer_config.json", {"eos_token": token, "auto_map": {"AutoTokenizer": _QWEN_CLASSES}})
    folder.assert_refused("tokenizer_config.json", "eos_token is")


@pytest.mark.parametrize(
    "index", [{}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}, {"weight_map": {"a": "model-1-of-1.bin"}}]
)
def test_an_index_that_names_no_safetensors(folder: Folder, index: Any) -> None:
    (folder.path / "model.safetensors").unlink()
    folder.write("model-1-of-1.bin", "")
    folder.write("model.safetensors.index.json", index)
    assert folder.refusal().startswith("model.safetensors.index.json: ")


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
        ("zerank-9-small", "", True),
        ("models--a--some-rerank-v3/snapshots/0a1b", "", True),
        ("a", _TAGS, True),
        ("a", "---\npipeline_tag: text-ranking\n---\n", True),
        ("a", _OF_AN_EMBEDDER, False),
    ],
)
def test_a_causal_model_that_is_named_a_reranker(tmp_path: Path, place: str, readme: str, is_refused: bool) -> None:
    folder = Folder(tmp_path / place)
    (folder.path / "modules.json").unlink()
    folder.change("config.json", model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    folder.write("README.md", readme)
    assert read_card(folder.path, "dense").pooling == ("lasttoken",)
    if is_refused:
        assert (
            "name or tags say that it is a reranker that is not known: yes, no and template in a table"
            in folder.refusal()
        )
    else:
        assert "lasttoken pooling without normalisation is assumed" in folder.read().assumption


@pytest.mark.parametrize("has_config", [False, True])
def test_weights_in_gguf(folder: Folder, has_config: bool) -> None:
    (folder.path / "model.safetensors").rename(folder.path / "q8.gguf")
    if not has_config:
        (folder.path / "config.json").unlink()
    assert folder.refusal() == ": is in the GGUF format, and has no file in F32, F16, BF16 or Q8_0"
    folder.write("model.safetensors", "")  # beside others
    assert not has_config or folder.read().dim == 32


@pytest.mark.parametrize(
    ("chain", "why"),
    [
        (modules(POOLING, TRANSFORMER), "must begin with"),
        (modules(TRANSFORMER, ("Dense", "2_Dense"), POOLING), "must begin with"),
        (modules(TRANSFORMER, POOLING, ("Pooling", "2_Pooling")), "one Pooling"),
        (modules(TRANSFORMER, POOLING, ("WordWeights", "2")), "WordWeights is not supported"),
        (modules(("CLIPModel", "0_CLIPModel")), "module CLIPModel has images; vecd serves text"),
        (modules(("Transformer", "../other"), POOLING), "leads out"),
        (modules(("Transformer", "/etc"), POOLING), "leads out"),
        ([{"type": "custom_st.Transformer", "path": ""}, *modules(POOLING)], "custom_st.Transformer"),
        ([{"type": OLD + "Transformer"}], "type and a path"),
    ],
)
def test_a_chain_of_modules_that_cannot_be_served(folder: Folder, chain: Any, why: str) -> None:
    folder.write("modules.json", chain)
    folder.assert_refused("modules.json", why)


def test_a_prompt_that_is_to_be_left_out_of_the_pooling(folder: Folder) -> None:
    folder.change("1_Pooling/config.json", include_prompt=False)
    assert folder.read().prompt == ""
    folder.write("config_sentence_transformers.json", {"prompts": {"a": "b"}, "default_prompt_name": "a"})
    assert "include_prompt=false" in folder.refusal()


@pytest.mark.parametrize(
    ("settings", "config", "dims", "truncate_dim"),
    [
        ({"truncate_dim": 32}, {}, (), 0),  # all of them
        ({"truncate_dim": 16, "matryoshka_dims": [16, 8]}, {}, (8, 16), 16),
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


def test_a_dense_layer_without_safe_weights(folder: Folder) -> None:
    folder.add_dense(weights="pytorch_model.bin")
    assert "2_Dense: weights only as pickle" in folder.refusal()
    (folder.path / "2_Dense/pytorch_model.bin").unlink()
    assert folder.refusal().startswith("2_Dense/model.safetensors: file missing")
