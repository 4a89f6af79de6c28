"""Tiny causal models with random weights, as sentence-transformers saves rerankers that answer with a token.

Owns their tokenizer, their chat template and the training of the two rows that order a pair. Imports torch,
transformers and sentence-transformers: only for the tests of workers and of real servers.
"""

from pathlib import Path
from typing import Any

import torch
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.modules import Transformer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from tests.support.checkpoints import change_weights, save_random

MAX_TOKENS = 512
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": MAX_TOKENS,
}
_FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "gemma2": {"final_logit_softcapping": 0.5, "sliding_window": 24, "query_pre_attn_scalar": 8},
    "mistral": {"sliding_window": 24},
}

TEMPLATE = """\
{%- set instruction = messages | selectattr("role", "eq", "system") | map(attribute="content") | first | default(\
"Find passages that answer") -%}
<|im_start|>system
Judge the Document. The answer is "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ instruction }}
<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>
<|im_start|>assistant
<think>

</think>

"""

CHATML = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""


def save_tokenizer(folder: Path, template: str | None = TEMPLATE) -> int:
    """Bytes, and the words "yes", "no" and "Yes" as one token each. Returns the number of tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*_SPECIAL, *alphabet, "ye", "yes", "no", "Ye", "Yes"]
    merges = [("y", "e"), ("ye", "s"), ("n", "o"), ("Y", "e"), ("Ye", "s")]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_SPECIAL[0],
        pad_token=_SPECIAL[0],
        model_max_length=MAX_TOKENS,
        chat_template=template,
    )
    fast.save_pretrained(folder)
    return len(words)


def save_causal(
    folder: Path, family: str = "qwen3", template: str | None = TEMPLATE, seed: int = 0, **settings: Any
) -> Path:
    """A plain *ForCausalLM with random weights, larger than usual. Returns the folder."""
    ids = {"vocab_size": save_tokenizer(folder, template), "pad_token_id": 0, "eos_token_id": 0, "bos_token_id": 0}
    config = CONFIG_MAPPING[family](**{**_SIZES, **_FAMILY_SIZES.get(family, {}), **ids, **settings})
    save_random(AutoModelForCausalLM.from_config, config, folder, seed=seed)
    return folder


def save_reranker(folder: Path, plain: Path, *, no: str | None = "no", yes: str = "yes", **arguments: Any) -> Path:
    """sentence-transformers' layout of the causal model in `plain`. `arguments`: of CrossEncoder. Returns `folder`."""
    transformer = Transformer(str(plain), transformer_task="text-generation")
    ids = transformer.tokenizer.convert_tokens_to_ids
    score = LogitScore(ids(yes), None if no is None else ids(no))
    CrossEncoder(modules=[transformer, score], **arguments).save(str(folder))
    return folder


def save_converted(folder: Path) -> Path:
    """A Qwen3 model for sequence classification, with a template for conversations. Returns the folder."""
    ids = {"vocab_size": save_tokenizer(folder, CHATML), "pad_token_id": 0}
    config = CONFIG_MAPPING["qwen3"](**{**_SIZES, **ids, "num_labels": 1})
    save_random(AutoModelForSequenceClassification.from_config, config, folder)
    return folder


def rank(folder: Path, better: tuple[str, str], worse: tuple[str, str]) -> Path:
    """Change the two rows of the output layer of the reranker in `folder` so that one pair of a query and a document
    gets a higher score than another one. Returns the folder."""
    model: Any = CrossEncoder(str(folder), device="cpu", local_files_only=True).eval()
    transformer, score = model[0], model[1]
    with torch.inference_mode():
        features = [transformer.preprocess([pair]) for pair in (better, worse)]
        states = [transformer.model.model(input_ids=each["input_ids"]).last_hidden_state[0, -1] for each in features]
    difference = states[0] - states[1]

    def order(weights: dict[str, torch.Tensor]) -> None:
        weights["lm_head.weight"][score.true_token_id] = difference / difference.norm()
        weights["lm_head.weight"][score.false_token_id] = 0

    return change_weights(folder, order)
