"""Decoders as embedders, rerankers and sparse models: Qwen2, Llama, Qwen3 and Gemma 2, most with a mask of the padding
alone; and EuroBERT, which is made of the same layers.

Source: the repositories' config.json, modules.json and code as quoted on public pages. The references are transformers'
own classes, given a mask that hides nothing; what the code adds behind them is written out here.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers, processors
from torch import Tensor
from torch.nn import functional
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from tests.support import tiny_tokenizers
from tests.support.published import IdsOf, Layout, RowsOf

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
_TOKENS = 160
"""Longest texts."""

_LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA: dict[str, Any] = {
    "head_dim": 16,
    "rope_theta": 500000.0,
    # Of 8,192 positions the scaling would not show in a short text.
    "rope_scaling": {**_LLAMA3, "original_max_position_embeddings": 64},
    "rms_norm_eps": 1e-5,
}
_QWEN3: dict[str, Any] = {"head_dim": 32, "rope_theta": 1000000, "rms_norm_eps": 1e-6, "sliding_window": None}
_QWEN3 |= {"use_sliding_window": False, "max_window_layers": 3}
_QWEN2: dict[str, Any] = {
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "use_sliding_window": False,
}
_QWEN2 |= {"max_window_layers": 3}
_GEMMA2: dict[str, Any] = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
_GEMMA2 |= {"hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def llama3() -> tokenizers.Tokenizer:
    """<|begin_of_text|> and the text."""
    begin = "<|begin_of_text|>"
    tokenizer = tiny_tokenizers.byte_pairs([begin, "<|end_of_text|>"], pre_tokenizers.ByteLevel(add_prefix_space=False))
    template = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin}:1 $B:1", special_tokens=[(begin, 0)]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
    return tokenizer


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def save(
    folder: Path,
    *,
    family: str,
    sizes: Mapping[str, Any],
    published: Mapping[str, Any],
    tokenizer: Callable[[], tokenizers.Tokenizer],
    tokenizer_config: Mapping[str, Any] | None = None,
    modules: Sequence[tuple[str, str, Mapping[str, Any] | None]] = (),
    first: str = "sentence_transformers.models.Transformer",
    prompts: Mapping[str, str] | None = None,
    prefix: str = "",
    others: Mapping[str, tuple[int, ...]] | None = None,
    change: Callable[[dict[str, Tensor]], None] = lambda weights: None,
) -> None:
    """`sizes`: settings of transformers' class of `family`, which config.json has too; `published`: what it has beside
    them. `modules`: type, folder and settings; those with weights are Dense. `prefix`: of the transformer's tensors;
    `others`: more tensors, by their shapes."""
    words = tokenizer()
    settings = {**_SIZES, "vocab_size": words.get_vocab_size() + 5, **sizes}
    torch.manual_seed(0)
    weights = {name: tensor.clone() for name, tensor in _model(family, settings).state_dict().items()}
    weights = {f"{prefix}{name}": tensor + torch.randn_like(tensor) * 0.1 for name, tensor in weights.items()}
    weights |= {name: torch.randn(*shape) * 0.2 for name, shape in (others or {}).items()}
    change(weights)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write(folder / "config.json", {**settings, "model_type": family, **published})
    words.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {"model_max_length": _TOKENS, **(tokenizer_config or {})})
    if not modules:
        return
    kinds = [(first, "", None), *modules]
    entries = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path, _) in enumerate(kinds)]
    _write(folder / "modules.json", entries)
    _write(folder / "sentence_bert_config.json", {"max_seq_length": _TOKENS, "do_lower_case": False})
    stated = {"prompts": dict(prompts or {}), "default_prompt_name": None, "similarity_fn_name": "cosine"}
    _write(folder / "config_sentence_transformers.json", stated)
    for kind, path, config in modules:
        if config is None:
            continue
        _write(folder / path / "config.json", config)
        if kind.endswith("Dense"):
            shape = config["out_features"], config["in_features"]
            dense = {"linear.weight": torch.randn(shape) * 0.2, "linear.bias": torch.randn(shape[0]) * 0.2}
            save_file(dense, folder / path / "model.safetensors", metadata={"format": "pt"})


def _model(family: str, settings: Mapping[str, Any], classes: Any = MODEL_MAPPING) -> Any:
    config = CONFIG_MAPPING[family](**settings)
    config._attn_implementation = "eager"
    return classes[type(config)](config).eval()


def _pooling(mode: str, width: int = 64) -> tuple[str, str, Mapping[str, Any]]:
    names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    modes = {f"pooling_mode_{name}": name == mode for name in names}
    return _SENTENCE + "Pooling", "1_Pooling", {"word_embedding_dimension": width, **modes, "include_prompt": True}


_SPARSE = "sentence_transformers.sparse_encoder.models."
_SENTENCE = "sentence_transformers.models."
_NORMALIZE = (_SENTENCE + "Normalize", "2_Normalize", None)


# --- references -------------------------------------------------------------------------------------------------


class _Original:
    """transformers' class with the weights of a folder, and its hidden states of a text whose tokens see all others."""

    def __init__(self, folder: Path, family: str, prefix: str = "", *, hides: bool = False) -> None:
        """`hides`: the tokens see what transformers' class lets them see."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        names = ("architectures", "auto_map", "model_type", "is_causal", "use_bidirectional_attention", "num_labels")
        self.weights = load_file(folder / "model.safetensors")
        self.model = _model(family, {name: value for name, value in config.items() if name not in names})
        own = {name.removeprefix(prefix): tensor for name, tensor in self.weights.items() if name.startswith(prefix)}
        missing, _ = self.model.load_state_dict(own, strict=False)
        assert not missing
        self.hides = hides

    def states(self, ids: NDArray[np.int64]) -> Tensor:
        """[T, H]"""
        mask = None if self.hides else torch.zeros(1, 1, len(ids), len(ids))
        with torch.inference_mode():
            made = self.model(input_ids=torch.from_numpy(ids)[None], attention_mask=mask)
        states: Tensor = made.last_hidden_state[0]
        return states


def _mean(states: Tensor) -> Tensor:
    return states.mean(0)


def _last(states: Tensor) -> Tensor:
    return states[-1]


def embedder(
    folder: Path,
    *,
    family: str,
    pool: Callable[[Tensor], Tensor] = _mean,
    prefix: str = "",
    steps: Callable[[Path, Tensor], Tensor] = lambda folder, pooled: functional.normalize(pooled, dim=0),
    project: str = "",
    hides: bool = False,
) -> RowsOf:
    original = _Original(folder, family, prefix, hides=hides)

    def row(ids: NDArray[np.int64], border: int) -> NDArray[np.float32]:
        states = original.states(ids)
        if project:
            states = states @ original.weights[project].T
        return steps(folder, pool(states)).numpy()

    return row


def _dense(folder: Path, pooled: Tensor) -> Tensor:
    weights = load_file(folder / "2_Dense_1024" / "model.safetensors")
    return functional.linear(pooled, weights["linear.weight"], weights["linear.bias"])


def _tanh_127(folder: Path, pooled: Tensor) -> Tensor:
    """Before it is rounded, which the gateway does."""
    return 127 * torch.tanh(pooled)


def reranker(folder: Path) -> RowsOf:
    original = _Original(folder, "llama", "model.")
    temperature = json.loads((folder / "config.json").read_text(encoding="utf-8"))["temperature"]

    def logits(ids: NDArray[np.int64], border: int) -> NDArray[np.float32]:
        return (original.weights["score.weight"] @ original.states(ids).mean(0) / temperature).numpy()

    return logits


def splade(folder: Path) -> RowsOf:
    """transformers' own class for the next word, with a mask that hides none."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for name in _SPLADE_CODE:
        config.pop(name)
    model = _model(config.pop("model_type"), config, MODEL_FOR_CAUSAL_LM_MAPPING)
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    model.tie_weights()

    def weights(ids: NDArray[np.int64], border: int) -> NDArray[np.float32]:
        with torch.inference_mode():
            mask = torch.zeros(1, 1, len(ids), len(ids))
            logits = model(input_ids=torch.from_numpy(ids)[None], attention_mask=mask).logits[0]
        return torch.log1p(torch.relu(logits)).amax(0).numpy()

    return weights


# --- token ids --------------------------------------------------------------------------------------------------


def _ids(folder: Path, text: str, num_tokens: int) -> list[int]:
    ids: list[int] = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return ids[:num_tokens]


def ended(folder: Path) -> IdsOf:
    """As gte-Qwen2's own class of tokenizers ends a text."""
    [end] = _ids(folder, "<|endoftext|>", 1)
    return lambda text, _: ([*_ids(folder, text, _TOKENS - 1), end], 0)


def as_question(folder: Path) -> IdsOf:
    return lambda query, document: (_ids(folder, f"question:{query} \n \n passage:{document}", _TOKENS), 0)


# --- layouts ----------------------------------------------------------------------------------------------------

_QWEN_CODE: dict[str, Any] = {
    "auto_map": {
        "AutoModel": "modeling_qwen.Qwen2Model",
        "AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM",
        "AutoModelForSequenceClassification": "modeling_qwen.Qwen2ForSequenceClassification",
    },
    "is_causal": False,
}
_QWEN_TOKENIZER = {
    "add_eos_token": True,
    "auto_map": {"AutoTokenizer": ["tokenization_qwen.Qwen2Tokenizer", "tokenization_qwen.Qwen2TokenizerFast"]},
    "eos_token": "<|endoftext|>",
    "pad_token": "<|endoftext|>",
    "tokenizer_class": "Qwen2Tokenizer",
}
_GTE_QWEN2: dict[str, Any] = {"family": "qwen2", "sizes": _QWEN2, "tokenizer": tiny_tokenizers.qwen}
_GTE_QWEN2 |= {"published": {"architectures": ["Qwen2ForCausalLM"], **_QWEN_CODE}, "tokenizer_config": _QWEN_TOKENIZER}
_GTE_QWEN2 |= {"prefix": "model.", "others": {"lm_head.weight": (8, 64)}}
_STELLA_CODE = {name: value for name, value in _GTE_QWEN2["published"].items() if name != "is_causal"}
_TASK = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
_INF: dict[str, Any] = {
    **_GTE_QWEN2,
    "published": {"architectures": ["Qwen2Model"], **_QWEN_CODE},
    "prefix": "",
    "others": {},
}
_KALM: dict[str, Any] = {
    **_INF,
    "tokenizer_config": {"eos_token": "<|endoftext|>", "tokenizer_class": "Qwen2Tokenizer"},
}

_NEMOTRON_CODE: dict[str, Any] = {
    "architectures": ["LlamaBidirectionalModel"],
    "auto_map": {
        "AutoConfig": "llama_bidirectional_model.LlamaBidirectionalConfig",
        "AutoModel": "llama_bidirectional_model.LlamaBidirectionalModel",
    },
    "model_type": "llama_bidirec",
    "pooling": "avg",
    "temperature": 0.02,
}
_NEMOTRON: dict[str, Any] = {"family": "llama", "sizes": _LLAMA, "published": _NEMOTRON_CODE, "tokenizer": llama3}
_NEMOTRON |= {"modules": [_pooling("mean_tokens"), _NORMALIZE]}
_RERANK_CODE = {
    **_NEMOTRON_CODE,
    "architectures": ["LlamaBidirectionalForSequenceClassification"],
    "auto_map": {
        "AutoConfig": "llama_bidirectional_model.LlamaBidirectionalConfig",
        "AutoModelForSequenceClassification": "llama_bidirectional_model.LlamaBidirectionalForSequenceClassification",
    },
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
    "temperature": 0.5,
}
_SPLADE_CODE = {
    "architectures": ["Qwen3ForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "splade.Splade", "AutoModelForMaskedLM": "splade.Qwen3ForCausalLM"},
    "is_causal": False,
}
_VOYAGE_CODE = {
    "architectures": ["Qwen3BidirectionalModel"],
    "auto_map": {"AutoModel": "modeling_qwen3_bidirectional.Qwen3BidirectionalModel"},
    "num_labels": 128,
    "use_bidirectional_attention": True,
}
_PPLX_CODE = {
    "architectures": ["PPLXQwen3Model"],
    "auto_map": {"AutoConfig": "configuration.PPLXQwen3Config", "AutoModel": "modeling.PPLXQwen3Model"},
    "model_type": "bidirectional_pplx_qwen3",
    "use_bidirectional_attention": True,
    "use_cache": False,
}
_EUROBERT_CODE = {
    "architectures": ["EuroBertForMaskedLM"],
    "auto_map": {
        "AutoConfig": "configuration_eurobert.EuroBertConfig",
        "AutoModel": "modeling_eurobert.EuroBertModel",
        "AutoModelForMaskedLM": "modeling_eurobert.EuroBertForMaskedLM",
        "AutoModelForPreTraining": "modeling_eurobert.EuroBertPreTrainedModel",
        "AutoModelForSequenceClassification": "modeling_eurobert.EuroBertForSequenceClassification",
    },
    "clf_pooling": "late",
    "hidden_dropout": 0.0,
    "mask_token_id": 2,
    "pretraining_tp": 1,
    "rope_scaling": None,
}


def _saturate(weights: dict[str, Tensor]) -> None:
    weights["norm.weight"] *= 2


def _enlarge_scores(weights: dict[str, Tensor]) -> None:
    """So that the cap of scores shows."""
    for name in weights:
        if name.endswith("q_proj.weight"):
            weights[name] *= 6


LAYOUTS = (
    Layout(
        "Alibaba-NLP/gte-Qwen2-1.5B-instruct",
        partial(
            save, **_GTE_QWEN2, modules=[_pooling("lasttoken"), _NORMALIZE], prompts={"query": _TASK, "document": ""}
        ),
        partial(embedder, family="qwen2", pool=_last, prefix="model."),
        "qwen2-both-ways",
        ids=ended,
    ),
    Layout(
        "NovaSearch/stella_en_1.5B_v5",
        partial(
            save,
            **{**_GTE_QWEN2, "published": _STELLA_CODE},
            modules=[
                _pooling("mean_tokens"),
                (
                    _SENTENCE + "Dense",
                    "2_Dense_1024",
                    {
                        "in_features": 64,
                        "out_features": 48,
                        "bias": True,
                        "activation_function": "torch.nn.modules.linear.Identity",
                    },
                ),
            ],
            prompts={"s2p_query": _TASK, "s2s_query": "Instruct: Retrieve semantically similar text.\nQuery: "},
        ),
        partial(embedder, family="qwen2", prefix="model.", steps=_dense),
        "qwen2-both-ways",
        ids=ended,
    ),
    Layout(
        "infly/inf-retriever-v1-1.5b",
        partial(save, **_INF, modules=[_pooling("lasttoken"), _NORMALIZE], prompts={"query": _TASK}),
        partial(embedder, family="qwen2", pool=_last),
        "qwen2-both-ways",
        ids=ended,
    ),
    Layout(
        "HIT-TMG/KaLM-embedding-multilingual-mini-instruct-v2",
        partial(save, **_KALM, modules=[_pooling("mean_tokens"), _NORMALIZE], prompts={"query": _TASK}),
        partial(embedder, family="qwen2"),
        "qwen2-both-ways",
    ),
    Layout(
        "nvidia/llama-embed-nemotron-8b",
        partial(save, **_NEMOTRON, prompts={"query": _TASK, "document": ""}),
        partial(embedder, family="llama"),
        "llama-both-ways",
    ),
    Layout(
        "nvidia/llama-nemotron-embed-1b-v2",
        partial(save, **_NEMOTRON, prompts={"query": "query: ", "document": "passage: "}),
        partial(embedder, family="llama"),
        "llama-both-ways",
    ),
    Layout(
        "nvidia/llama-nemotron-rerank-1b-v2",
        partial(
            save,
            family="llama",
            sizes=_LLAMA,
            published=_RERANK_CODE,
            tokenizer=llama3,
            prefix="model.",
            others={"score.weight": (1, 64)},
        ),
        reranker,
        "llama-both-ways-rerank",
        "rerank",
        ids=as_question,
    ),
    Layout(
        "voyageai/voyage-4-nano",
        partial(
            save,
            family="qwen3",
            sizes=_QWEN3,
            published=_VOYAGE_CODE,
            tokenizer=tiny_tokenizers.qwen,
            modules=[_pooling("mean_tokens", 128), _NORMALIZE],
            prompts={
                "query": "Represent the query for retrieving supporting documents: ",
                "document": "Represent the document for retrieval: ",
            },
            prefix="model.",
            others={"linear.weight": (128, 64)},
        ),
        partial(embedder, family="qwen3", prefix="model.", project="linear.weight"),
        "qwen3-both-ways",
    ),
    Layout(
        "perplexity-ai/pplx-embed-v1-0.6b",
        partial(
            save,
            family="qwen3",
            sizes=_QWEN3,
            published=_PPLX_CODE,
            tokenizer=tiny_tokenizers.qwen,
            modules=[_pooling("mean_tokens"), ("st_quantize.FlexibleQuantizer", "", None)],
            change=_saturate,
        ),
        partial(embedder, family="qwen3", steps=_tanh_127),
        "qwen3-both-ways-whole",
    ),
    Layout(
        "BAAI/bge-multilingual-gemma2",
        partial(
            save,
            family="gemma2",
            sizes=_GEMMA2,
            published={"architectures": ["Gemma2Model"]},
            tokenizer=tiny_tokenizers.gemma,
            modules=[_pooling("lasttoken"), _NORMALIZE],
            change=_enlarge_scores,
        ),
        partial(embedder, family="gemma2", pool=_last, hides=True),
        "gemma2",
        path="packed",
    ),
    Layout(
        "EuroBERT/EuroBERT-210m",
        partial(
            save,
            family="eurobert",
            sizes={"head_dim": 16, "rope_theta": 250000, "rms_norm_eps": 1e-5, "num_key_value_heads": 4},
            published=_EUROBERT_CODE,
            tokenizer=llama3,
            prefix="model.",
            others={"lm_head.weight": (8, 64)},
        ),
        partial(embedder, family="eurobert", prefix="model.", steps=lambda folder, pooled: pooled),
        "eurobert",
        settings={"kind": "dense"},
    ),
    Layout(
        "naver/splade-code-06B",
        partial(
            save,
            family="qwen3",
            sizes={**_QWEN3, "tie_word_embeddings": True},
            published=_SPLADE_CODE,
            tokenizer=tiny_tokenizers.qwen,
            first=_SPARSE + "MLMTransformer",
            modules=[
                (
                    _SPARSE + "SpladePooling",
                    "1_SpladePooling",
                    {"pooling_strategy": "max", "activation_function": "relu"},
                )
            ],
            prefix="model.",
        ),
        splade,
        "qwen3-sparse",
        "sparse",
    ),
)
