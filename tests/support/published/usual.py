"""Models of the architectures that transformers has, in the files of sentence-transformers' older versions and of its
present one, and what its own classes compute."""

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
)

from tests.support import tiny_tokenizers
from tests.support.checkpoints import VOCAB_SIZE, save_random
from tests.support.multi_vector_checkpoints import save_stanford
from tests.support.published import Ids, IdsOf, Layout, RowsOf
from tests.support.sparse_checkpoints import SparseReference, save_splade

WIDTH = 64
MAX_TOKENS = 64
"""So that a text over the limit is short."""
_LONGER: dict[str, Any] = {"max_tokens": 160, "max_position_embeddings": 200}
"""For long prompts."""

# --- tokenizers, with the special tokens where the models have them ----------------------------------------------


def _sequence_pair(tokens: list[str], kind: str) -> Tokenizer:
    """<s> a </s>, <s> a </s></s> b </s>, with these four at the ids 0 to 3."""
    if kind == "unigram":
        tokenizer = tiny_tokenizers.trained(
            models.Unigram(),
            trainers.UnigramTrainer(vocab_size=200, special_tokens=tokens, unk_token="<unk>", show_progress=False),
            normalizers.NFKC(),
            pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
        )
    else:
        tokenizer = tiny_tokenizers.byte_pairs(tokens, pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer


def _modernbert() -> Tokenizer:
    tokens = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    tokenizer = tiny_tokenizers.byte_pairs(tokens, pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


def _ends_with(tokenizer: Tokenizer, behind: str, before: str = "") -> Tokenizer:
    ids = {name: int(tokenizer.token_to_id(name) or 0) for name in (before, behind) if name}
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{before} $A {behind}".strip(),
        pair=f"{before} $A {behind} {before}:1 $B:1 {behind}:1".replace(" :1 ", " ").strip(),
        special_tokens=list(ids.items()),
    )
    return tokenizer


_ROBERTA = ["<s>", "<pad>", "</s>", "<unk>"]
_OF_BERT = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "pad", "cls", "sep", "mask")}
_OF_ROBERTA = {"bos_token": "<s>", "cls_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "sep_token": "</s>"}
_OF_ROBERTA |= {"unk_token": "<unk>", "mask_token": "<mask>"}
_OF_GEMMA = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
TOKENIZERS: Mapping[str, tuple[Any, dict[str, str]]] = {
    "bert": (tiny_tokenizers.bert, _OF_BERT),
    "roberta": (partial(_sequence_pair, _ROBERTA, "bytes"), _OF_ROBERTA),
    "xlm-roberta": (partial(_sequence_pair, _ROBERTA, "unigram"), _OF_ROBERTA),
    "modernbert": (_modernbert, _OF_BERT),
    "qwen": (
        lambda: _ends_with(tiny_tokenizers.qwen(), "<|endoftext|>"),
        {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"},
    ),
    "gemma": (lambda: _ends_with(tiny_tokenizers.gemma(), "<eos>", "<bos>"), _OF_GEMMA),
}


def save_tokenizer(folder: Path, kind: str, max_tokens: int = MAX_TOKENS, **settings: Any) -> dict[str, Any]:
    """Returns the settings of a model that follow from it."""
    make, special = TOKENIZERS[kind]
    if kind == "bert":  # as a BertTokenizer has them
        settings = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"], **settings}
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=make(), model_max_length=max_tokens, **special, **settings
    )
    tokenizer.save_pretrained(folder)
    ids = {"pad_token_id": tokenizer.pad_token_id}
    ids |= {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "bos", "eos")}
    return {"vocab_size": len(tokenizer), **{name: value for name, value in ids.items() if value is not None}}


# --- transformers, and the files of sentence-transformers ---------------------------------------------------------

SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 80,
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "distilbert": {"dim": WIDTH, "n_layers": 3, "n_heads": 4, "hidden_dim": 128},
    "xlm-roberta": {"type_vocab_size": 1},
    "roberta": {"type_vocab_size": 1},
    "modernbert": {"local_attention": 16, "global_attn_every_n_layers": 2},
    "qwen2": _GROUPED,
    "qwen3": {**_GROUPED, "tie_word_embeddings": True},
    "mistral": {**_GROUPED, "sliding_window": 24},
    "gemma3_text": {
        **_GROUPED,
        "sliding_window": 12,
        "use_bidirectional_attention": True,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


def save_transformer(
    folder: Path, family: str, tokenizer: str, classes: Any = MODEL_MAPPING, stored: str = "float32", **settings: Any
) -> None:
    of_tokenizer = save_tokenizer(folder, tokenizer)
    config = CONFIG_MAPPING[family](**{**SIZES, **FAMILY_SIZES.get(family, {}), **of_tokenizer, **settings})
    save_random(classes[type(config)], config, folder, stored)


def change_json(path: Path, **changes: Any) -> None:
    stated: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**stated, **changes}, indent=2))


_POOLINGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def save_modules(
    folder: Path, pooling: str, *, dense: str = "", is_normalized: bool = True, max_tokens: int | None = MAX_TOKENS
) -> None:
    """As sentence-transformers 2 to 5 save them. `pooling`: one of their names, as "mean_tokens". `dense`: the name of
    the class of the activation of a Dense module."""
    chain = [("Transformer", ""), ("Pooling", "1_Pooling")]
    chain += [("Dense", "2_Dense")] if dense else []
    chain += [("Normalize", f"{len(chain)}_Normalize")] if is_normalized else []
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(chain)
    ]
    (folder / "modules.json").write_text(json.dumps(modules, indent=2))
    if max_tokens is not None:
        change_json(folder / "sentence_bert_config.json", max_seq_length=max_tokens, do_lower_case=False)
    for _, path in chain[1:]:
        (folder / path).mkdir()
    modes = {f"pooling_mode_{name}": name == pooling for name in _POOLINGS}
    change_json(folder / "1_Pooling/config.json", word_embedding_dimension=WIDTH, **modes, include_prompt=True)
    if dense:
        sizes = {"in_features": WIDTH, "out_features": 48, "bias": True, "activation_function": dense}
        change_json(folder / "2_Dense/config.json", **sizes)
        torch.manual_seed(5)
        weights = {"linear.weight": torch.randn(48, WIDTH) * 0.2, "linear.bias": torch.randn(48) * 0.2}
        save_file(weights, folder / "2_Dense/model.safetensors")


def save_dense(
    folder: Path,
    family: str,
    tokenizer: str,
    pooling: str,
    *,
    prompts: Mapping[str, str] | None = None,
    default_prompt: str | None = None,
    classes: Any = MODEL_MAPPING,
    stored: str = "float32",
    dense: str = "",
    is_normalized: bool = True,
    max_tokens: int = MAX_TOKENS,
    **settings: Any,
) -> None:
    save_transformer(folder, family, tokenizer, classes, stored, **settings)
    save_modules(folder, pooling, dense=dense, is_normalized=is_normalized, max_tokens=max_tokens)
    stated = {"prompts": dict(prompts or {}), "default_prompt_name": default_prompt, "similarity_fn_name": "cosine"}
    change_json(folder / "config_sentence_transformers.json", **stated)


def _tensor(ids: NDArray[np.int64]) -> dict[str, torch.Tensor]:
    token_ids = torch.from_numpy(np.asarray(ids, np.int64))[None]
    return {"input_ids": token_ids, "attention_mask": torch.ones_like(token_ids)}


def dense_reference(folder: Path) -> RowsOf:
    """sentence-transformers' vector."""
    model: Any = SentenceTransformer(
        str(folder), device="cpu", local_files_only=True, model_kwargs={"dtype": torch.float32}
    ).eval()

    def rows(ids: NDArray[np.int64], border: int) -> NDArray[np.float32]:
        features: Any = _tensor(ids)
        with torch.inference_mode():
            for module in model:
                features = module(features)
        vector: NDArray[np.float32] = features["sentence_embedding"][0].numpy()
        return vector

    return rows


# --- heads --------------------------------------------------------------------------------------------------------


def save_scores(
    folder: Path,
    family: str,
    tokenizer: str,
    labels: list[str],
    *,
    is_of_tokens: bool = False,
    stated: Mapping[str, Any] | None = None,
    **settings: Any,
) -> None:
    names = dict(enumerate(labels))
    classes: Any = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING if is_of_tokens else MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    ids = {name: index for index, name in names.items()}
    save_transformer(folder, family, tokenizer, classes, id2label=names, label2id=ids, **settings)
    change_json(folder / "config.json", **(stated or {}))


def _save_pickled_scores(folder: Path) -> None:
    save_scores(folder, "roberta", "roberta", ["negative", "neutral", "positive"])
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def scores_reference(folder: Path) -> RowsOf:
    return _logits(AutoModelForSequenceClassification, folder)


def token_scores_reference(folder: Path) -> RowsOf:
    return _logits(AutoModelForTokenClassification, folder)


def _logits(auto: Any, folder: Path) -> RowsOf:
    model: Any = auto.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()

    def rows(ids: NDArray[np.int64], border: int) -> NDArray[np.float32]:
        features = _tensor(ids)
        if border and getattr(model.config, "type_vocab_size", 0) > 1:
            features["token_type_ids"] = (torch.arange(len(ids)) >= border).long()[None]
        with torch.inference_mode():
            found: NDArray[np.float32] = model(**features).logits[0].numpy()
        return found

    return rows


def _save_splade(folder: Path, family: str, tokenizer: str) -> None:
    save_transformer(folder, family, tokenizer, MODEL_FOR_MASKED_LM_MAPPING)
    kinds = (
        ("sentence_transformers.sparse_encoder.models.MLMTransformer", ""),
        ("sentence_transformers.sparse_encoder.models.SpladePooling", "1_SpladePooling"),
    )
    modules = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path) in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    change_json(folder / "sentence_bert_config.json", max_seq_length=MAX_TOKENS, do_lower_case=False)
    (folder / "1_SpladePooling").mkdir()
    pooling = {"pooling_strategy": "max", "activation_function": "relu", "word_embedding_dimension": None}
    change_json(folder / "1_SpladePooling/config.json", **pooling)
    stated = {"model_type": "SparseEncoder", "prompts": {"query": "", "document": ""}, "similarity_fn_name": "dot"}
    change_json(folder / "config_sentence_transformers.json", **stated, default_prompt_name=None)


def _save_opensearch(folder: Path) -> None:
    """Queries have static weights."""
    with TemporaryDirectory() as place:
        weights = torch.rand(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
        saved = save_splade(Path(place), "distilbert", activation="log1p_relu", query_weights=weights)
        shutil.copytree(saved, folder, dirs_exist_ok=True)


def _splade_reference(folder: Path) -> RowsOf:
    reference = SparseReference(folder)
    return lambda ids, border: reference.of_ids(np.asarray(ids, np.int32))


def _save_bge_m3(folder: Path) -> None:
    """All weights are pickles."""
    save_dense(folder, "xlm-roberta", "xlm-roberta", "cls_token")
    for name, width in (("sparse_linear", 1), ("colbert_linear", WIDTH)):
        torch.manual_seed(width)
        torch.save(torch.nn.Linear(WIDTH, width).state_dict(), folder / f"{name}.pt")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _save_colbert(folder: Path) -> None:
    """As PyLate saves it."""
    save_transformer(folder, "modernbert", "modernbert")
    kinds = (("sentence_transformers.models.Transformer", ""), ("pylate.models.Dense.Dense", "1_Dense"))
    modules = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path) in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    change_json(folder / "sentence_bert_config.json", max_seq_length=31, do_lower_case=False)
    (folder / "1_Dense").mkdir()
    identity = "torch.nn.modules.linear.Identity"
    sizes = {"in_features": WIDTH, "out_features": 16, "bias": False, "activation_function": identity}
    change_json(folder / "1_Dense/config.json", **sizes)
    torch.manual_seed(1)
    save_file({"linear.weight": torch.randn(16, WIDTH)}, folder / "1_Dense/model.safetensors")
    change_json(
        folder / "config_sentence_transformers.json",
        model_type="ColBERT",
        prompts={},
        default_prompt_name=None,
        similarity_fn_name="MaxSim",
        query_prefix="[Q] ",
        document_prefix="[D] ",
        query_length=16,
        document_length=24,
        attend_to_expansion_tokens=False,
        do_query_expansion=False,
        skiplist_words=[],
    )


def _colbert_reference(folder: Path, prefix: str = "") -> RowsOf:
    """`prefix`: of the transformer's tensors, where the projection is in the same file."""
    weights = load_file(folder / ("model.safetensors" if prefix else "1_Dense/model.safetensors"))
    model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    if prefix:
        words = model.get_input_embeddings().weight
        assert torch.equal(words, weights[f"{prefix}embeddings.word_embeddings.weight"])

    def rows(ids: NDArray[np.int64], border: int) -> NDArray[np.float32]:
        features = _tensor(ids)
        features["attention_mask"][:, border or len(ids) :] = 0
        with torch.inference_mode():
            states = model(**features).last_hidden_state[0] @ weights["linear.weight"].T
        vectors: NDArray[np.float32] = functional.normalize(states, dim=-1).numpy()
        return vectors

    return rows


# --- tables without a transformer ---------------------------------------------------------------------------------


def _save_static(folder: Path) -> None:
    tokenizer = tiny_tokenizers.bert()
    table = torch.randn(tokenizer.get_vocab_size(), 64, generator=torch.Generator().manual_seed(0))
    SentenceTransformer(modules=[StaticEmbedding(tokenizer, table)], device="cpu").save(str(folder))


def _save_potion(folder: Path) -> None:
    """As Model2Vec saves it."""
    tokenizer = tiny_tokenizers.bert()
    tokenizer.save(str(folder / "tokenizer.json"))
    table = torch.randn(tokenizer.get_vocab_size(), 32, generator=torch.Generator().manual_seed(1))
    save_file({"embeddings": table}, folder / "model.safetensors")
    stated = {"model_type": "model2vec", "architectures": ["StaticModel"], "hidden_dim": 32, "normalize": True}
    change_json(folder / "config.json", **stated, seq_length=1_000_000)


def _known_words(folder: Path) -> IdsOf:
    """Model2Vec's ids: without unknown words, and then cut."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    unknown = tokenizer.token_to_id("[UNK]")

    def ids(first: str, second: str) -> Ids:
        encoding = tokenizer.encode(first, add_special_tokens=False)
        return [token for token in encoding.ids if token != unknown][:512], 0

    return ids


def _mean_of_rows(folder: Path, name: str, is_normalized: bool) -> RowsOf:
    [file] = folder.rglob("model.safetensors")
    table = load_file(file)[name]

    def rows(ids: NDArray[np.int64], border: int) -> NDArray[np.float32]:
        mean = table[torch.from_numpy(np.asarray(ids, np.int64))].double().sum(dim=0) / max(1, len(ids))
        length = float(mean.norm()) or 1.0  # of a text without words it is 0
        vector: NDArray[np.float32] = (mean / length if is_normalized else mean).float().numpy()
        return vector

    return rows


# --- code of their own, which transformers has under other names ---------------------------------------------------


def _save_original(
    folder: Path, native: partial[None], config: Mapping[str, Any], renamed: Mapping[str, str], prefix: str = ""
) -> None:
    """With the settings of the original code. `renamed`: those of transformers' configuration that have another name,
    by that."""
    native(folder)
    path = folder / "config.json"
    had = json.loads(path.read_text())
    path.write_text(json.dumps({**{name: had[key] for name, key in renamed.items()}, **config}))
    if prefix:
        weights = folder / "model.safetensors"
        tensors = {f"{prefix}{name}": tensor for name, tensor in load_file(weights).items()}
        save_file(tensors, weights, metadata={"format": "pt"})


def _native_reference(folder: Path, native: partial[None]) -> RowsOf:
    """Of the same weights, as transformers saves them."""
    with TemporaryDirectory() as place:
        native(Path(place))
        return dense_reference(Path(place))


_NOMIC_CODE = "nomic-ai/nomic-bert-2048--{}_hf_nomic_bert.NomicBert{}"
_NOMIC = {
    "model_type": "nomic_bert",
    "architectures": ["NomicBertModel"],
    "auto_map": {
        "AutoConfig": _NOMIC_CODE.format("configuration", "Config"),
        "AutoModel": _NOMIC_CODE.format("modeling", "Model"),
    },
    "activation_function": "swiglu",
    "n_positions": 8192,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "pad_vocab_size_multiple": 64,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "prenorm": False,
    "causal": False,
}
_NOMIC_NAMES = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_inner": "intermediate_size", "layer_norm_epsilon": "layer_norm_eps", "vocab_size": "vocab_size",
    "type_vocab_size": "type_vocab_size",
}  # fmt: skip
_NEW_NAMES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
    "layer_norm_eps", "type_vocab_size", "pad_token_id", "max_position_embeddings",
)  # fmt: skip


def _new(architecture: str, code: str = "Alibaba-NLP/new-impl--modeling.NewModel") -> dict[str, Any]:
    return {
        "model_type": "gte" if "GteModel" in code else "new",
        "architectures": [architecture],
        "auto_map": {"AutoModel": code},
        "position_embedding_type": "rope",
        "layer_norm_type": "layer_norm",
        "pack_qkv": True,
        "rope_theta": 20_000.0,
        "rope_scaling": None,
        "unpad_inputs": False,
        "use_memory_efficient_attention": False,
    }


def _original(
    name: str,
    family: str,
    tokenizer: str,
    pooling: str,
    config: Mapping[str, Any],
    renamed: Mapping[str, str],
    prefix: str = "",
    **settings: Any,
) -> Layout:
    native = partial(save_dense, family=family, tokenizer=tokenizer, pooling=pooling, **settings)
    save = partial(_save_original, native=native, config=config, renamed=renamed, prefix=prefix)
    return Layout(name, save, partial(_native_reference, native=native), family)


# --- the models ---------------------------------------------------------------------------------------------------


def _dense(name: str, family: str, tokenizer: str, pooling: str, path: str = "lean", **settings: Any) -> Layout:
    save = partial(save_dense, family=family, tokenizer=tokenizer, pooling=pooling, **settings)
    return Layout(name, save, dense_reference, family, path=path)


_ROPE = {"rope_type": "default", "rope_theta": 20_000.0}
_TANH = "torch.nn.modules.activation.Tanh"
_QUERY = "Represent this sentence for searching relevant passages: "
_E5 = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
_GEMMA = {"query": "task: search result | query: ", "document": "title: none | text: ", "Clustering": "task: cluster"}

LAYOUTS = (
    _dense("sentence-transformers/all-MiniLM-L6-v2", "bert", "bert", "mean_tokens"),
    _dense("BAAI/bge-small-en-v1.5", "bert", "bert", "cls_token"),
    _dense("thenlper/gte-base", "bert", "bert", "mean_tokens", stored="float16"),
    _dense(
        "mixedbread-ai/mxbai-embed-large-v1", "bert", "bert", "cls_token",
        prompts={"query": _QUERY, "passage": ""}, is_normalized=False, stored="float16",
    ),
    _dense("Snowflake/snowflake-arctic-embed-m", "bert", "bert", "cls_token", prompts={"query": _QUERY}),
    _dense("sentence-transformers/LaBSE", "bert", "bert", "cls_token", dense=_TANH),
    _dense("intfloat/multilingual-e5-base", "xlm-roberta", "xlm-roberta", "mean_tokens"),
    _dense(
        "Snowflake/snowflake-arctic-embed-l-v2.0", "xlm-roberta", "xlm-roberta", "cls_token",
        prompts={"query": "query: "},
    ),
    _dense("ibm-granite/granite-embedding-30m-english", "roberta", "roberta", "cls_token", stored="bfloat16"),
    _dense(
        "sentence-transformers/all-mpnet-base-v2", "mpnet", "roberta", "mean_tokens",
        classes=MODEL_FOR_MASKED_LM_MAPPING,
    ),
    _dense(
        "sentence-transformers/distiluse-base-multilingual-cased-v2", "distilbert", "bert", "mean_tokens",
        dense=_TANH, is_normalized=False,
    ),
    _original(
        "nomic-ai/nomic-embed-text-v1.5", "nomic_bert", "bert", "mean_tokens", _NOMIC, _NOMIC_NAMES,
        vocab_size=320, intermediate_size=256, type_vocab_size=2, max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    ),
    _original(
        "Alibaba-NLP/gte-base-en-v1.5", "gte", "bert", "cls_token", _new("NewModel"),
        {name: name for name in _NEW_NAMES}, is_normalized=False, type_vocab_size=0,
        rope_parameters=_ROPE,
    ),
    _original(
        "Alibaba-NLP/gte-multilingual-base", "gte", "xlm-roberta", "cls_token", _new("NewForTokenClassification"),
        {name: name for name in _NEW_NAMES}, "new.", type_vocab_size=1, rope_parameters=_ROPE,
    ),
    _original(
        "NovaSearch/stella_en_400M_v5", "gte", "bert", "mean_tokens", _new("NewModel"),
        {name: name for name in _NEW_NAMES}, dense="torch.nn.modules.linear.Identity", is_normalized=False,
        type_vocab_size=2, rope_parameters=_ROPE, **_LONGER,
        prompts={"s2p_query": _E5, "s2s_query": "Instruct: Retrieve semantically similar text.\nQuery: "},
    ),
    _original(
        "Snowflake/snowflake-arctic-embed-m-v2.0", "gte", "xlm-roberta", "cls_token",
        _new("GteModel", "modeling_hf_alibaba_nlp_gte.GteModel"), {name: name for name in _NEW_NAMES},
        type_vocab_size=1, rope_parameters=_ROPE, prompts={"query": "query: "},
    ),
    _dense(
        "sentence-transformers/msmarco-distilbert-base-tas-b", "distilbert", "bert", "cls_token", is_normalized=False,
    ),
    _dense(
        "sentence-transformers/all-distilroberta-v1", "roberta", "roberta", "mean_tokens",
        classes=MODEL_FOR_MASKED_LM_MAPPING,
    ),
    _dense(
        "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2", "bert", "xlm-roberta", "mean_tokens",
        is_normalized=False,
    ),
    _dense(
        "HIT-TMG/KaLM-embedding-multilingual-mini-instruct-v1.5", "qwen2", "qwen", "mean_tokens", stored="bfloat16",
    ),
    _dense("microsoft/harrier-oss-v1-0.6b", "qwen3", "qwen", "lasttoken", prompts={"sts_query": _E5}, **_LONGER),
    Layout(
        "sentence-transformers/static-retrieval-mrl-en-v1", _save_static,
        partial(_mean_of_rows, name="embedding.weight", is_normalized=False), "static", path="static",
    ),
    Layout(
        "minishlab/potion-base-8M", _save_potion,
        partial(_mean_of_rows, name="embeddings", is_normalized=True), "static", path="static", ids=_known_words,
    ),
    _dense("Alibaba-NLP/gte-modernbert-base", "modernbert", "modernbert", "cls_token", stored="float16"),
    _dense(
        "Qwen/Qwen3-Embedding-0.6B", "qwen3", "qwen", "lasttoken", prompts={"query": _E5, "document": ""}, **_LONGER,
    ),
    _dense(
        "intfloat/e5-mistral-7b-instruct", "mistral", "qwen", "lasttoken",
        prompts={"web_search_query": _E5}, **_LONGER,
    ),
    _dense("google/embeddinggemma-300m", "gemma3_text", "gemma", "mean_tokens", prompts=_GEMMA, stored="bfloat16"),
    Layout(
        "cross-encoder/ms-marco-MiniLM-L6-v2",
        partial(
            save_scores, family="bert", tokenizer="bert", labels=["LABEL_0"],
            stated={"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1.0"}},
        ),
        scores_reference, "bert scores", "rerank",
    ),
    Layout(
        "BAAI/bge-reranker-v2-m3",
        partial(save_scores, family="xlm-roberta", tokenizer="xlm-roberta", labels=["LABEL_0"]),
        scores_reference, "xlm-roberta scores", "rerank",
    ),
    Layout(
        "SamLowe/roberta-base-go_emotions",
        partial(
            save_scores, family="roberta", tokenizer="roberta", labels=["joy", "anger", "neutral"],
            problem_type="multi_label_classification",
        ),
        scores_reference, "roberta scores", "classify",
    ),
    Layout(
        "distilbert/distilbert-base-uncased-finetuned-sst-2-english",
        partial(save_scores, family="distilbert", tokenizer="bert", labels=["NEGATIVE", "POSITIVE"]),
        scores_reference, "distilbert scores", "classify",
    ),
    Layout(
        "cardiffnlp/twitter-roberta-base-sentiment-latest", _save_pickled_scores,
        scores_reference, "roberta scores", "classify",
    ),
    Layout(
        "Alibaba-NLP/gte-reranker-modernbert-base",
        partial(
            save_scores, family="modernbert", tokenizer="modernbert", labels=["LABEL_0"], classifier_pooling="mean",
            stored="float16",
        ),
        scores_reference, "modernbert scores", "rerank",
    ),
    Layout(
        "dslim/bert-base-NER",
        partial(save_scores, family="bert", tokenizer="bert", labels=["O", "B-PER", "I-PER"], is_of_tokens=True),
        token_scores_reference, "bert token scores", "token-classify",
    ),
    Layout(
        "naver/splade-v3", partial(_save_splade, family="bert", tokenizer="bert"),
        _splade_reference, "bert splade", "sparse",
    ),
    Layout(
        "ibm-granite/granite-embedding-30m-sparse", partial(_save_splade, family="roberta", tokenizer="roberta"),
        _splade_reference, "roberta splade", "sparse",
    ),
    Layout(
        "opensearch-project/opensearch-neural-sparse-encoding-doc-v3-distill", _save_opensearch,
        _splade_reference, "distilbert splade", "sparse",
    ),
    Layout(
        "colbert-ir/colbertv2.0", save_stanford, partial(_colbert_reference, prefix="bert."),
        "bert colbert", "multi-vector",
    ),
    Layout("lightonai/GTE-ModernColBERT-v1", _save_colbert, _colbert_reference, "modernbert colbert", "multi-vector"),
    Layout("BAAI/bge-m3", _save_bge_m3, dense_reference, "bge-m3"),
)  # fmt: skip
