"""Encoders whose published code is in their own repositories: Jina's BERT, XLM-RoBERTa with merged weights, Nomic's
experts, and GTE's head for masked words.

Their references are written from the published formulas, one sequence at a time, and share nothing with the product;
where transformers has the class, it is that.
"""

import json
import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, normalize, relu
from transformers import (
    GteConfig,
    GteForMaskedLM,
    JinaEmbeddingsV3Config,
    JinaEmbeddingsV3Model,
    PreTrainedTokenizerFast,
)

from tests.support import tiny_tokenizers
from tests.support.published import Ids, IdsOf, Layout, RowsOf

JsonObject = dict[str, Any]
Weights = dict[str, Tensor]

_MAX_TOKENS = 600
"""Of models for 1,024 or 8,192, so that the comparison at load, of a text of that length, takes no minute."""

# --- tokenizers -------------------------------------------------------------------------------------------------


@cache
def _xlm_roberta() -> str:
    """With the ids of XLM-RoBERTa's special tokens, and jina-colbert-v2's markers behind the words."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer = tiny_tokenizers.trained(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False),
        normalizers.NFKC(),
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
    )
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True), "[QueryMarker]", "[DocumentMarker]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer.to_str()


_BERT_SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
_ROBERTA_SPECIAL = {
    "bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"
}  # fmt: skip
_XLM_SPECIAL = {**_ROBERTA_SPECIAL, "pad_token": "<pad>", "unk_token": "<unk>"}
_TOKENIZERS: Mapping[str, tuple[Callable[[], tokenizers.Tokenizer], JsonObject]] = {
    "bert": (tiny_tokenizers.bert, _BERT_SPECIAL),
    "roberta": (tiny_tokenizers.roberta, _ROBERTA_SPECIAL),
    "xlm_roberta": (lambda: tokenizers.Tokenizer.from_str(_xlm_roberta()), _XLM_SPECIAL),
}


def _save_tokenizer(folder: Path, kind: str, max_tokens: int) -> int:
    """Returns the size of its vocabulary."""
    make, special = _TOKENIZERS[kind]
    tokenizer = make()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_tokens, **special)
    fast.save_pretrained(folder)
    return tokenizer.get_vocab_size()


# --- files ------------------------------------------------------------------------------------------------------


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2))


def _save_modules(folder: Path, width: int, max_tokens: int, *others: str, **stated: Any) -> None:
    """As sentence-transformers 2 saves a transformer with mean pooling, and the modules `others`."""
    kinds = ("Transformer", "Pooling", *others)
    paths = ["" if index == 0 else f"{index}_{kind}" for index, kind in enumerate(kinds)]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    _write(folder / "modules.json", modules)
    modes = {f"pooling_mode_{mode}": mode == "mean_tokens" for mode in ("cls_token", "mean_tokens", "max_tokens")}
    _write(folder / "1_Pooling/config.json", {"word_embedding_dimension": width, **modes})
    _write(folder / "sentence_bert_config.json", {"max_seq_length": max_tokens, "do_lower_case": False})
    _write(folder / "config_sentence_transformers.json", {"__version__": {"sentence_transformers": "2.2.2"}, **stated})


def _save_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Random numbers, large enough that every part shows in the vectors."""
    torch.manual_seed(len(shapes))
    weights = {}
    for name, shape in shapes.items():
        weights[name] = torch.randn(shape) * (0.2 if len(shape) == 1 else 1.2 / shape[-1] ** 0.5)
        if len(shape) == 1 and name.endswith(".weight"):
            weights[name] += 1
        if "embeddings." in name:
            weights[name] = torch.randn(shape)
        elif ".router." in name:
            weights[name] *= 4  # a choice that is seldom close: a closer one turns with the rounding of bfloat16
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _linears(at: str, *names_and_shapes: tuple[str, int, int]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rows, columns in names_and_shapes:
        shapes |= {f"{at}{name}.weight": (rows, columns), f"{at}{name}.bias": (rows,)}
    return shapes


def _norms(at: str, width: int, *names: str) -> dict[str, tuple[int, ...]]:
    return {f"{at}{name}.{part}": (width,) for name in names for part in ("weight", "bias")}


# --- what references have in common -----------------------------------------------------------------------------


def _read(folder: Path) -> tuple[JsonObject, Weights]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def _heads(x: Tensor, num_heads: int) -> Tensor:
    """[T, heads · d] → [heads, T, d]"""
    return x.view(len(x), num_heads, -1).transpose(0, 1)


def _softmax_of(query: Tensor, key: Tensor, value: Tensor, added: Tensor | float = 0.0) -> Tensor:
    scores = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1]) + added
    return (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)


class _Layers:
    """The tensors below a name."""

    def __init__(self, weights: Weights, at: str, epsilon: float) -> None:
        self._weights, self._at, self._epsilon = weights, at, epsilon

    def linear(self, name: str, x: Tensor) -> Tensor:
        weight = self._weights[f"{self._at}{name}.weight"]
        return linear(x, weight, self._weights.get(f"{self._at}{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = (self._weights[f"{self._at}{name}.{part}"] for part in ("weight", "bias"))
        return layer_norm(x, weight.shape, weight, bias, self._epsilon)

    def below(self, at: str) -> "_Layers":
        return _Layers(self._weights, self._at + at, self._epsilon)


def _mean(hidden: Callable[[Tensor], Tensor], *, is_normalized: bool) -> RowsOf:
    def rows_of(ids: NDArray[np.int64], border: int) -> NDArray[np.float32]:
        with torch.inference_mode():
            pooled = hidden(torch.from_numpy(ids)).mean(0)
            return (normalize(pooled, dim=0) if is_normalized else pooled).numpy()

    return rows_of


# --- Jina's BERT ------------------------------------------------------------------------------------------------


_OF_CODE = "jina-bert-v2-qk-post-norm"


def _save_jina_bert(folder: Path, *, kind: str, num_heads: int, width: int, gate: str, code: str) -> None:
    max_tokens = _MAX_TOKENS
    num_words, inner, num_layers = _save_tokenizer(folder, kind, max_tokens), 2 * width, 3
    is_code = code == _OF_CODE
    config = {
        "_name_or_path": f"jinaai/{code}",
        "model_max_length": max_tokens,
        "architectures": ["JinaBertForMaskedLM"],
        "attention_probs_dropout_prob": 0.0,
        "auto_map": {
            "AutoConfig": f"jinaai/{code}--configuration_bert.JinaBertConfig",
            "AutoModelForMaskedLM": f"jinaai/{code}--modeling_bert.JinaBertForMaskedLM",
            "AutoModel": f"jinaai/{code}--modeling_bert.JinaBertModel",
            "AutoModelForSequenceClassification": f"jinaai/{code}--modeling_bert.JinaBertForSequenceClassification",
        },
        "classifier_dropout": None,
        "gradient_checkpointing": False,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": width,
        "initializer_range": 0.02,
        "intermediate_size": inner,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": max_tokens,
        "model_type": "bert",
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "pad_token_id": 0,
        "position_embedding_type": "alibi",
        "torch_dtype": "float32",
        "transformers_version": "4.26.0",
        "type_vocab_size": 2,
        "use_cache": True,
        "vocab_size": num_words,
        "feed_forward_type": gate,
        "emb_pooler": "mean",
        "attn_implementation": "torch",
    }
    _write(folder / "config.json", config)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (num_words, width),
        "embeddings.token_type_embeddings.weight": (2, width),
        **_norms("embeddings.", width, "LayerNorm"),
        **_linears("pooler.", ("dense", width, width)),
    }
    for index in range(num_layers):
        at = f"encoder.layer.{index}."
        names = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
        shapes |= _linears(at, *((name, width, width) for name in names))
        shapes |= _norms(at, width, "attention.output.LayerNorm")
        if is_code:
            shapes[f"{at}mlp.up_gated_layer.weight"] = (2 * inner, width)
            shapes |= _linears(at, ("mlp.down_layer", width, inner))
            shapes |= _norms(at, width, "layer_norm_1", "layer_norm_2")
        else:
            shapes[f"{at}mlp.gated_layers.weight"] = (2 * inner, width)
            shapes |= _linears(at, ("mlp.wo", width, inner))
            shapes |= _norms(at, width, "mlp.layernorm")
        if "-qk-" in code:
            shapes |= _norms(f"{at}attention.self.", width, "layer_norm_q", "layer_norm_k")
    _save_weights(folder, shapes)
    _save_modules(folder, width, max_tokens, *(("Normalize",) if "-qk-" in code else ()))


def alibi_slopes_as_published(num_heads: int) -> list[float]:
    def of_power_of_two(number: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(number) - 3)))
        return [start * start**index for index in range(number)]

    if math.log2(num_heads).is_integer():
        return of_power_of_two(num_heads)
    below = 2 ** math.floor(math.log2(num_heads))
    return of_power_of_two(below) + alibi_slopes_as_published(2 * below)[0::2][: num_heads - below]


def jina_bert_hidden(folder: Path) -> Callable[[Tensor], Tensor]:
    """From token ids, int64 [T], all of type 0, to hidden states, [T, H]."""
    config, weights = _read(folder)
    num_heads, inner = config["num_attention_heads"], config["intermediate_size"]
    slopes = torch.tensor(alibi_slopes_as_published(num_heads))
    activations: dict[str, Callable[[Tensor], Tensor]] = {"geglu": gelu, "reglu": relu}
    activation = activations[config["feed_forward_type"]]
    model = _Layers(weights, "", config["layer_norm_eps"])

    def hidden(ids: Tensor) -> Tensor:
        types = weights["embeddings.token_type_embeddings.weight"][0]
        x = model.norm("embeddings.LayerNorm", weights["embeddings.word_embeddings.weight"][ids] + types)
        places = torch.arange(len(ids))
        bias = -slopes[:, None, None] * (places[None] - places[:, None]).abs()
        for index in range(config["num_hidden_layers"]):
            layer = model.below(f"encoder.layer.{index}.")
            own = layer.below("attention.self.")
            query, key, value = (own.linear(name, x) for name in ("query", "key", "value"))
            if "-qk-" in config["_name_or_path"]:
                query, key = own.norm("layer_norm_q", query), own.norm("layer_norm_k", key)
            attended = _softmax_of(_heads(query, num_heads), _heads(key, num_heads), _heads(value, num_heads), bias)
            attended = layer.norm("attention.output.LayerNorm", layer.linear("attention.output.dense", attended) + x)
            if "qk-post-norm" in config["_name_or_path"]:
                x = layer.norm("layer_norm_1", x + attended)
                made = layer.linear("mlp.up_gated_layer", x)
                made = layer.linear("mlp.down_layer", made[:, :inner] * activation(made[:, inner:]))
                x = layer.norm("layer_norm_2", x + made)
            else:
                made = layer.linear("mlp.gated_layers", attended)
                made = layer.linear("mlp.wo", activation(made[:, :inner]) * made[:, inner:])
                x = layer.norm("mlp.layernorm", made + attended)
        return x

    return hidden


def _jina(
    name: str, kind: str, num_heads: int, width: int, gate: str = "geglu", code: str = "jina-bert-implementation"
) -> Layout:
    save = partial(_save_jina_bert, kind=kind, num_heads=num_heads, width=width, gate=gate, code=code)
    family = "jina_bert_code" if code == _OF_CODE else "jina_bert"
    return Layout(name, save, lambda folder: _mean(jina_bert_hidden(folder), is_normalized="-qk-" in code), family)


# --- XLM-RoBERTa with merged weights ----------------------------------------------------------------------------


def _save_flash(
    folder: Path, *, positions: str, max_tokens: int, extra: Mapping[str, tuple[int, ...]], **stated: Any
) -> None:
    num_words, width, inner, num_layers = _save_tokenizer(folder, "xlm_roberta", max_tokens), 64, 128, 3
    config = {
        "attention_probs_dropout_prob": 0.1,
        "bos_token_id": 0,
        "classifier_dropout": None,
        "emb_pooler": None,
        "eos_token_id": 2,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": width,
        "initializer_range": 0.02,
        "intermediate_size": inner,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": max_tokens + 2,
        "num_attention_heads": 4,
        "num_hidden_layers": num_layers,
        "output_past": True,
        "pad_token_id": 1,
        "position_embedding_type": positions,
        "torch_dtype": "bfloat16",
        "type_vocab_size": 1,
        "use_flash_attn": True,
        "vocab_size": num_words,
        **stated,
    }
    _write(folder / "config.json", config)
    shapes: dict[str, tuple[int, ...]] = {
        "roberta.embeddings.word_embeddings.weight": (num_words, width),
        "roberta.embeddings.token_type_embeddings.weight": (1, width),
        **_norms("roberta.", width, "emb_ln"),
        **extra,
    }
    if positions == "absolute":
        shapes["roberta.embeddings.position_embeddings.weight"] = (max_tokens + 2, width)
    for index in range(num_layers):
        at = f"roberta.encoder.layers.{index}."
        shapes |= _linears(at, ("mixer.Wqkv", 3 * width, width), ("mixer.out_proj", width, width))
        shapes |= _linears(at, ("mlp.fc1", inner, width), ("mlp.fc2", width, inner))
        shapes |= _norms(at, width, "norm1", "norm2")
    _save_weights(folder, shapes)


def _save_jina_reranker(folder: Path) -> None:
    code = "modeling_xlm_roberta"
    _save_flash(
        folder,
        positions="absolute",
        max_tokens=_MAX_TOKENS,
        extra={**_linears("classifier.", ("dense", 64, 64), ("out_proj", 1, 64))},
        _name_or_path="jina-reranker-v2-base-multilingual",
        architectures=["XLMRobertaForSequenceClassification"],
        auto_map={
            "AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig",
            "AutoModel": f"{code}.XLMRobertaModel",
            "AutoModelForSequenceClassification": f"{code}.XLMRobertaForSequenceClassification",
        },
        num_labels=1,
        id2label={"0": "LABEL_0"},
        label2id={"LABEL_0": 0},
        use_cache=False,
    )


def _jina_reranker(folder: Path) -> RowsOf:
    config, weights = _read(folder)
    model = _Layers(weights, "", config["layer_norm_eps"])

    def rows_of(ids: NDArray[np.int64], border: int) -> NDArray[np.float32]:
        with torch.inference_mode():
            tokens, body = torch.from_numpy(ids), model.below("roberta.")
            is_text = (tokens != 1).long()
            x = weights["roberta.embeddings.word_embeddings.weight"][tokens]
            x = x + weights["roberta.embeddings.position_embeddings.weight"][is_text.cumsum(0) * is_text + 1]
            x = body.norm("emb_ln", x + weights["roberta.embeddings.token_type_embeddings.weight"][0])
            for index in range(config["num_hidden_layers"]):
                layer = body.below(f"encoder.layers.{index}.")
                parts = (_heads(each, 4) for each in layer.linear("mixer.Wqkv", x).chunk(3, dim=-1))
                x = layer.norm("norm1", layer.linear("mixer.out_proj", _softmax_of(*parts)) + x)
                x = layer.norm("norm2", layer.linear("mlp.fc2", gelu(layer.linear("mlp.fc1", x))) + x)
            first = model.linear("classifier.dense", x[:1]).tanh()
            return model.linear("classifier.out_proj", first)[0].numpy()

    return rows_of


def _save_jina_colbert(folder: Path) -> None:
    code = "jinaai/xlm-roberta-flash-implementation--"
    _save_flash(
        folder,
        positions="rotary",
        max_tokens=_MAX_TOKENS,
        extra={"linear.weight": (16, 64), **_linears("roberta.pooler.", ("dense", 64, 64))},
        architectures=["HF_ColBERT"],
        auto_map={
            "AutoConfig": f"{code}configuration_xlm_roberta.XLMRobertaFlashConfig",
            "AutoModel": f"{code}modeling_xlm_roberta.XLMRobertaModel",
            "AutoModelForMaskedLM": f"{code}modeling_xlm_roberta.XLMRobertaForMaskedLM",
        },
        model_type="xlm-roberta",
        rotary_emb_base=10000.0,
    )
    stated = {"query_token_id": "[QueryMarker]", "doc_token_id": "[DocumentMarker]", "query_maxlen": 32}
    # Rows of punctuation stay, because a reference has those of all tokens.
    metadata = {**stated, "doc_maxlen": 300, "attend_to_mask_tokens": True, "mask_punctuation": False, "dim": 16}
    _write(folder / "artifact.metadata", metadata)


def _ids_of_colbert(folder: Path) -> IdsOf:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = {"query": "[QueryMarker]", "document": "[DocumentMarker]", "mask": "<mask>"}
    vocabulary = tokenizer.get_vocab()
    known = {name: vocabulary[token] for name, token in names.items()}

    def ids(text: str, role: str) -> Ids:
        """Queries are filled up with masks, which are attended to."""
        longest = 32 if role == "query" else 300
        words = tokenizer.encode(text, add_special_tokens=False).ids[: longest - 3]
        found = [0, known[role], *words, 2]
        return found + [known["mask"]] * (longest - len(found) if role == "query" else 0), 0

    return ids


def native_flash(folder: Path) -> JinaEmbeddingsV3Model:
    """transformers' class, of a checkpoint with rotary positions."""
    config, _ = _read(folder)
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    own = JinaEmbeddingsV3Config(
        **{name: config[name] for name in (*names, "max_position_embeddings", "layer_norm_eps", "type_vocab_size")},
        rope_parameters={"rope_type": "default", "rope_theta": config["rotary_emb_base"]},
    )
    model = JinaEmbeddingsV3Model.from_pretrained(folder, config=own, dtype=torch.float32, add_pooling_layer=False)
    return model.eval()


def _jina_colbert(folder: Path) -> RowsOf:
    model, weights = native_flash(folder), load_file(folder / "model.safetensors")

    def rows_of(ids: NDArray[np.int64], border: int) -> NDArray[np.float32]:
        tokens = torch.from_numpy(ids)[None]
        with torch.inference_mode():
            mask = torch.ones_like(tokens)
            mask[:, border or tokens.shape[1] :] = 0
            hidden = model(input_ids=tokens, attention_mask=mask).last_hidden_state[0]
            return normalize(hidden @ weights["linear.weight"].T, dim=-1).numpy()

    return rows_of


# --- Nomic's experts --------------------------------------------------------------------------------------------


def _save_nomic_moe(folder: Path) -> None:
    num_words, width, inner, num_experts = _save_tokenizer(folder, "xlm_roberta", 512), 64, 96, 8
    config = {
        "activation_function": "gelu",
        "architectures": ["NomicBertModel"],
        "attn_pdrop": 0.0,
        "auto_map": {
            "AutoConfig": "nomic-ai/nomic-bert-2048--configuration_hf_nomic_bert.NomicBertConfig",
            "AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel",
            "AutoModelForMaskedLM": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertForPreTraining",
        },
        "add_pooling_layer": False,
        "causal": False,
        "expert_choice_router": False,
        "ffn_div": 1,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "max_trained_positions": 2048,
        "mlp_fc1_bias": True,
        "mlp_fc2_bias": True,
        "model_type": "nomic_bert",
        "moe_every_n_layers": 2,
        "moe_impl": "megablocks",
        "moe_normalize_expert_weights": False,
        "moe_resid_pdrop": 0.0,
        "moe_top_k": 2,
        "n_embd": width,
        "n_head": 4,
        "n_inner": inner,
        "n_layer": 4,
        "n_positions": 2048,
        "num_experts": num_experts,
        "num_shared_experts": 0,
        "pad_token_id": 1,
        "pad_vocab_size_multiple": 1,
        "parallel_block": False,
        "prenorm": False,
        "qkv_proj_bias": True,
        "resid_pdrop": 0.0,
        "rotary_emb_base": 10000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "router_aux_loss_coef": 0.1,
        "torch_dtype": "float32",
        "type_vocab_size": 1,
        "use_rms_norm": False,
        "vocab_size": num_words,
    }
    _write(folder / "config.json", config)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (num_words, width),
        "embeddings.token_type_embeddings.weight": (1, width),
        **_norms("", width, "emb_ln"),
    }
    for index in range(4):
        at = f"encoder.layers.{index}."
        shapes |= _linears(at, ("attn.Wqkv", 3 * width, width), ("attn.out_proj", width, width))
        shapes |= _norms(at, width, "norm1", "norm2")
        if index % 2:
            shapes |= {f"{at}mlp.experts.mlp.{name}": (num_experts * inner, width) for name in ("w1", "w2")}
            shapes |= {f"{at}mlp.router.layer.weight": (num_experts, width), f"{at}mlp.experts.bias": (width,)}
        else:
            shapes |= _linears(at, ("mlp.fc1", inner, width), ("mlp.fc2", width, inner))
    _save_weights(folder, shapes)
    prompts = {"query": "search_query: ", "passage": "search_document: "}
    _save_modules(folder, width, 512, "Normalize", prompts=prompts, default_prompt_name=None)


def nomic_moe_hidden(folder: Path) -> Callable[[Tensor], Tensor]:
    config, weights = _read(folder)
    model = _Layers(weights, "", config["layer_norm_epsilon"])
    head_dim, num_experts, inner = config["n_embd"] // config["n_head"], config["num_experts"], config["n_inner"]

    def rotated(x: Tensor) -> Tensor:
        inverse = config["rotary_emb_base"] ** -(torch.arange(0, head_dim, 2).float() / head_dim)
        angles = torch.outer(torch.arange(x.shape[1]).float(), inverse).repeat(1, 2)
        half = head_dim // 2
        return x * angles.cos() + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * angles.sin()

    def experts_of(at: str, x: Tensor) -> Tensor:
        parts, chosen = linear(x, weights[f"{at}mlp.router.layer.weight"]).softmax(-1).topk(config["moe_top_k"])
        w1, w2 = (weights[f"{at}mlp.experts.mlp.{name}"].view(num_experts, inner, -1) for name in ("w1", "w2"))
        rows = [
            sum(part * (gelu(token @ w1[expert].T) @ w2[expert]) for part, expert in zip(*of_token, strict=True))
            for token, *of_token in zip(x, parts, chosen, strict=True)
        ]
        return torch.stack(rows) + weights[f"{at}mlp.experts.bias"]

    def hidden(ids: Tensor) -> Tensor:
        types = weights["embeddings.token_type_embeddings.weight"][0]
        x = model.norm("emb_ln", weights["embeddings.word_embeddings.weight"][ids] + types)
        for index in range(config["n_layer"]):
            at = f"encoder.layers.{index}."
            layer = model.below(at)
            query, key, value = (_heads(each, config["n_head"]) for each in layer.linear("attn.Wqkv", x).chunk(3, -1))
            attended = layer.linear("attn.out_proj", _softmax_of(rotated(query), rotated(key), value))
            x = layer.norm("norm1", attended + x)
            has_experts = index % config["moe_every_n_layers"] == 1
            fed = experts_of(at, x) if has_experts else layer.linear("mlp.fc2", gelu(layer.linear("mlp.fc1", x)))
            x = layer.norm("norm2", fed + x)
        return x

    return hidden


# --- GTE with a head for masked words ---------------------------------------------------------------------------

_GTE_SIZES: JsonObject = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
_NTK = {"type": "ntk", "factor": 2.0}


def _gte_config(num_words: int) -> GteConfig:
    head_dim = 16
    rope = {"rope_type": "linear", "rope_theta": 160_000.0 * 2.0, "factor": 2.0 ** (2 / head_dim)}
    return GteConfig(**_GTE_SIZES, vocab_size=num_words, type_vocab_size=0, hidden_act="gelu", rope_parameters=rope)


def _save_gte_sparse(folder: Path) -> None:
    """A Router: queries have static weights, documents go through the model."""
    documents, queries = folder / "document_0_MLMTransformer", folder / "query_0_SparseStaticEmbedding"
    num_words = _save_tokenizer(documents, "bert", 512)
    _save_tokenizer(queries, "bert", 512)
    torch.manual_seed(0)
    model = GteForMaskedLM(_gte_config(num_words))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(documents)  # under the names of the original, but for its prefix
    weights = load_file(documents / "model.safetensors")
    weights = {name if name.startswith(("new.", "lm_head.")) else f"new.{name}": each for name, each in weights.items()}
    weights = {name.replace("new.gte.", "new."): each for name, each in weights.items()}
    save_file(weights, documents / "model.safetensors", metadata={"format": "pt"})
    (documents / "generation_config.json").unlink(missing_ok=True)
    code = "Alibaba-NLP/new-impl--"
    config = {
        "architectures": ["NewForMaskedLM"],
        "attention_probs_dropout_prob": 0.0,
        "auto_map": {
            "AutoConfig": f"{code}configuration.NewConfig",
            "AutoModel": f"{code}modeling.NewModel",
            "AutoModelForMaskedLM": f"{code}modeling.NewForMaskedLM",
        },
        "classifier_dropout": None,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "layer_norm_type": "layer_norm",
        "logn_attention_scale": False,
        "model_type": "new",
        "pack_qkv": True,
        "position_embedding_type": "rope",
        "rope_scaling": _NTK,
        "rope_theta": 160_000,
        "torch_dtype": "float32",
        "type_vocab_size": 0,
        "unpad_inputs": False,
        "use_memory_efficient_attention": False,
        "vocab_size": num_words,
        **_GTE_SIZES,
    }
    _write(documents / "config.json", config)
    task = {"transformer_task": "fill-mask", "max_seq_length": 512, "do_lower_case": False}
    _write(documents / "sentence_bert_config.json", task)
    pooling = {"pooling_strategy": "max", "activation_function": "log1p_relu", "word_embedding_dimension": num_words}
    _write(folder / "document_1_SpladePooling/config.json", pooling)
    _write(queries / "config.json", {"frozen": False})
    save_file({"weight": torch.rand(num_words) * 3}, queries / "model.safetensors")
    types = {
        "query_0_SparseStaticEmbedding": "sentence_transformers.sparse_encoder.models.SparseStaticEmbedding",
        "document_0_MLMTransformer": "sentence_transformers.sparse_encoder.models.MLMTransformer",
        "document_1_SpladePooling": "sentence_transformers.sparse_encoder.models.SpladePooling",
    }
    structure = {
        "query": ["query_0_SparseStaticEmbedding"],
        "document": ["document_0_MLMTransformer", "document_1_SpladePooling"],
    }
    parameters = {"default_route": "document", "allow_empty_key": True}
    _write(folder / "router_config.json", {"types": types, "structure": structure, "parameters": parameters})
    module = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Router"}
    _write(folder / "modules.json", [module])
    stated = {"model_type": "SparseEncoder", "prompts": {"query": "", "document": ""}, "similarity_fn_name": "dot"}
    _write(folder / "config_sentence_transformers.json", stated)


def _gte_sparse(folder: Path) -> RowsOf:
    documents = folder / "document_0_MLMTransformer"
    config = _gte_config(json.loads((documents / "config.json").read_text())["vocab_size"])
    model = GteForMaskedLM.from_pretrained(documents, config=config, dtype=torch.float32).eval()

    def rows_of(ids: NDArray[np.int64], border: int) -> NDArray[np.float32]:
        tokens = torch.from_numpy(ids)[None]
        with torch.inference_mode():
            logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits[0]
            return relu(logits).log1p().log1p().amax(0).numpy()

    return rows_of


LAYOUTS = (
    _jina("jinaai/jina-embeddings-v2-base-en", "bert", 6, 72),
    _jina("jinaai/jina-embeddings-v2-small-en", "bert", 4, 64),
    _jina("jinaai/jina-embeddings-v2-base-de", "roberta", 12, 96),
    _jina("jinaai/jina-embeddings-v2-base-es", "roberta", 6, 72, code="jina-bert-v2-qk-devlin-norm-1e-2"),
    _jina("jinaai/jina-embeddings-v2-base-zh", "roberta", 4, 64, "reglu"),
    _jina("jinaai/jina-embeddings-v2-base-code", "roberta", 6, 72, code=_OF_CODE),
    Layout(
        "nomic-ai/nomic-embed-text-v2-moe",
        _save_nomic_moe,
        lambda folder: _mean(nomic_moe_hidden(folder), is_normalized=True),
        "nomic_bert_moe",
    ),
    Layout(
        "jinaai/jina-reranker-v2-base-multilingual", _save_jina_reranker, _jina_reranker, "xlm_roberta_flash", "rerank"
    ),
    Layout(
        "jinaai/jina-colbert-v2",
        _save_jina_colbert,
        _jina_colbert,
        "jina_embeddings_v3",
        "multi-vector",
        ids=_ids_of_colbert,
    ),
    Layout(
        "opensearch-project/opensearch-neural-sparse-encoding-doc-v3-gte",
        _save_gte_sparse,
        _gte_sparse,
        "gte_masked_words",
        "sparse",
    ),
)
