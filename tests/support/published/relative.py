"""Encoders whose attention depends on the distance of two tokens, and EmbeddingGemma 2 with its towers."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers import (
    AutoModel,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    EmbeddingGemma2Config,
    EmbeddingGemma2Model,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from tests.support import tiny_tokenizers
from tests.support.checkpoints import save_random
from tests.support.published import Layout, RowsOf
from tests.support.published.usual import (
    MAX_TOKENS,
    WIDTH,
    change_json,
    dense_reference,
    save_modules,
    scores_reference,
)


def _unigram(special: Sequence[str], unknown: str, single: str, pair: str) -> Tokenizer:
    """As sentencepiece makes them. `special`: those with the first ids; those in the templates are among them."""
    tokenizer = tiny_tokenizers.trained(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=200, special_tokens=list(special), unk_token=unknown, show_progress=False),
        normalizers.NFKC(),
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
    )
    used = [(token, index) for index, token in enumerate(special) if token in single]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=used)
    return tokenizer


def _save_tokenizer(folder: Path, tokenizer: Tokenizer, max_tokens: int = MAX_TOKENS, **settings: Any) -> None:
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_tokens, **settings)
    fast.save_pretrained(folder)


# --- T5 -----------------------------------------------------------------------------------------------------------


def _save_t5(folder: Path, max_tokens: int, **settings: Any) -> None:
    """The encoder alone, whose config.json is that of the whole model."""
    tokenizer = _unigram(["<pad>", "</s>", "<unk>"], "<unk>", "$A </s>", "$A </s> $B </s>")
    tokenizer.add_special_tokens([AddedToken(f"<extra_id_{index}>") for index in range(4)])
    _save_tokenizer(folder, tokenizer, 512, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    config = T5Config(
        vocab_size=tokenizer.get_vocab_size() + 28,
        d_model=WIDTH,
        d_kv=16,
        d_ff=128,
        num_layers=3,
        num_decoder_layers=3,
        num_heads=4,
        **settings,
    )
    save_random(T5EncoderModel, config, folder)
    save_modules(folder, "mean_tokens", dense="torch.nn.modules.linear.Identity", max_tokens=max_tokens)
    dense = folder / "2_Dense"
    change_json(dense / "config.json", bias=False)
    weights = load_file(dense / "model.safetensors")
    save_file({"linear.weight": weights["linear.weight"]}, dense / "model.safetensors")
    change_json(folder / "config_sentence_transformers.json", prompts={}, default_prompt_name=None)


def _save_instructor(folder: Path) -> None:
    """All weights are pickles."""
    _save_t5(folder, 60)
    for path in (folder, folder / "2_Dense"):
        torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
        (path / "model.safetensors").unlink()


# --- DeBERTa ------------------------------------------------------------------------------------------------------

_DEBERTA_V3: dict[str, Any] = {
    "relative_attention": True,
    "position_buckets": 16,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "layer_norm_eps": 1e-7,
    "max_relative_positions": -1,
    "position_biased_input": False,
    "type_vocab_size": 0,
    "pooler_hidden_size": WIDTH,
    "pooler_hidden_act": "gelu",
    "pooler_dropout": 0,
}


def _save_deberta(folder: Path, labels: Sequence[str], stated: Mapping[str, Any] | None = None) -> None:
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    tokenizer = _unigram(special, "[UNK]", "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
    tokenizer.add_special_tokens(["[MASK]"])
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "pad", "cls", "sep", "mask")}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    _save_tokenizer(folder, tokenizer, 80, model_input_names=inputs, **names)
    config = DebertaV2Config(
        vocab_size=tokenizer.get_vocab_size() + 3,
        hidden_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=80,
        pad_token_id=0,
        id2label=dict(enumerate(labels)),
        label2id={label: index for index, label in enumerate(labels)},
        **_DEBERTA_V3,
    )
    save_random(DebertaV2ForSequenceClassification, config, folder)
    change_json(folder / "config.json", **(stated or {}))


# --- EmbeddingGemma 2 ---------------------------------------------------------------------------------------------

_PROMPTS = {
    "Document": "title: none | text: ",
    "Retrieval-query": "task: search result | query: ",
    "Retrieval-document": "title: none | text: ",
    "STS": "task: sentence similarity | query: ",
}
_TEMPLATE = """\
{%- for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}
{%- for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}
{%- elif part['type'] == 'image' %}{{ '<|image|>' }}{% elif part['type'] == 'audio' %}{{ '<|audio|>' }}{% endif %}
{%- endfor %}{% endif %}{% endfor %}"""
"""Its own is not among the sources; the vectors of texts show that it adds nothing to them."""


def _save_embeddinggemma_2(folder: Path) -> None:
    tokenizer = tiny_tokenizers.gemma()
    tokenizer.add_special_tokens(["<|image|>", "<|audio|>", "<|video|>"])
    places = {name: int(tokenizer.token_to_id(f"<|{name}|>") or 0) for name in ("image", "audio", "video")}
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", pair="<bos> $A <eos> <bos>:1 $B:1 <eos>:1", special_tokens=[("<bos>", 2), ("<eos>", 1)]
    )
    names = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "bos", "unk")}
    _save_tokenizer(folder, tokenizer, int(1e30), chat_template=_TEMPLATE, **names)
    text = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 48,
        "embedding_dim": WIDTH,
        "hidden_size_per_layer_input": 24,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "sliding_window_pattern": 2,
        "sliding_window": 5,
        "max_position_embeddings": 120,
    }
    vision: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision |= {"num_key_value_heads": 2, "head_dim": 8, "model_type": "gemma4_vision", "patch_size": 4}
    audio: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "model_type": "gemma4_audio",
    }
    audio |= {"output_proj_dims": 24, "subsampling_conv_channels": [8, 4]}
    placeholders: dict[str, Any] = {f"{name}_token_id": place for name, place in places.items()}
    config = EmbeddingGemma2Config(
        text_config=text,
        vision_config=vision,
        audio_config=audio,
        **placeholders,
    )
    save_random(_with_scalars, config, folder, "bfloat16")
    kinds = ("Transformer", "sentence_transformer.modules.pooling.Pooling", "base.modules.normalize.Normalize")
    paths = ("", "1_Pooling", "2_Normalize")
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.{kind}"}
        for index, (path, kind) in enumerate(
            zip(paths, ("base.modules.transformer.Transformer", *kinds[1:]), strict=True)
        )
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path in paths[1:]:
        (folder / path).mkdir()
    change_json(folder / "1_Pooling/config.json", embedding_dimension=WIDTH, pooling_mode="mean", include_prompt=True)
    change_json(folder / "2_Normalize/config.json")
    forward = {"method": "forward", "method_output_name": "last_hidden_state"}
    ways = dict.fromkeys(("text", "image", "audio", "video"), forward)
    change_json(
        folder / "sentence_bert_config.json",
        transformer_task="feature-extraction",
        modality_config={**ways, "message": {**forward, "format": "structured"}},
        module_output_name="token_embeddings",
    )
    change_json(folder / "processor_config.json", processor_class="EmbeddingGemma2Processor", image_seq_length=280)
    change_json(
        folder / "config_sentence_transformers.json",
        model_type="SentenceTransformer",
        prompts=_PROMPTS,
        default_prompt_name=None,
        similarity_fn_name="cosine",
    )


def _with_scalars(config: EmbeddingGemma2Config) -> EmbeddingGemma2Model:
    """Each layer has a factor of its own, which is no parameter; scores are divided by nothing, so the weights of the
    norms of queries and keys keep them small."""
    model = EmbeddingGemma2Model(config)
    for index, layer in enumerate(model.language_model.layers):
        layer.layer_scalar.fill_(0.5 + 0.25 * index)
        layer.self_attn.q_norm.weight.data.fill_(0.4)
        layer.self_attn.k_norm.weight.data.fill_(0.5)
    return model


def _embeddinggemma_2_reference(folder: Path) -> RowsOf:
    """The whole model, towers included, with the mean and the norm of its modules."""
    model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()

    def rows(ids: NDArray[np.int64], border: int) -> NDArray[np.float32]:
        token_ids = torch.from_numpy(np.asarray(ids, np.int64))[None]
        with torch.inference_mode():
            states = model(input_ids=token_ids, attention_mask=torch.ones_like(token_ids)).last_hidden_state
        vector: NDArray[np.float32] = functional.normalize(states[0].mean(dim=0), dim=-1).numpy()
        return vector

    return rows


_IDENTITY = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1.0"}}

LAYOUTS = (
    Layout("sentence-transformers/sentence-t5-base", partial(_save_t5, max_tokens=60), dense_reference, "t5"),
    Layout("sentence-transformers/gtr-t5-base", partial(_save_t5, max_tokens=150), dense_reference, "t5"),
    Layout("hkunlp/instructor-large", _save_instructor, dense_reference, "t5"),
    Layout(
        "mixedbread-ai/mxbai-rerank-base-v1",
        partial(_save_deberta, labels=["LABEL_0"]),
        scores_reference,
        "deberta scores",
        "rerank",
    ),
    Layout(
        "cross-encoder/nli-deberta-v3-base",
        partial(_save_deberta, labels=["contradiction", "entailment", "neutral"], stated=_IDENTITY),
        scores_reference,
        "deberta scores",
        "classify",
    ),
    Layout(
        "protectai/deberta-v3-base-prompt-injection-v2",
        partial(_save_deberta, labels=["SAFE", "INJECTION"]),
        scores_reference,
        "deberta scores",
        "classify",
    ),
    Layout(
        "google/embeddinggemma-2",
        _save_embeddinggemma_2,
        _embeddinggemma_2_reference,
        "embedding_gemma2",
    ),
)
