"""Tiny models whose texts sentence-transformers renders by their chat template, with random weights.

Owns their templates and their making. Imports torch, transformers and sentence-transformers.
"""

from pathlib import Path
from typing import Any

from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import MODEL_FOR_MASKED_LM_MAPPING, MODEL_MAPPING, PreTrainedTokenizerFast

from tests.support import tiny_tokenizers
from tests.support.checkpoints import save_random, tiny_config
from tests.support.multi_vector_checkpoints import projection

MAX_TOKENS = 60

# As Qwen3-VL-Embedding's: contents in parts, an instruction that there is always, and the assistant's turn.
PARTS = """\
{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nRepresent the input.<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}{% else %}
{%- for part in message.content %}{% if part.type == 'text' %}{{- part.text }}{% endif %}{% endfor %}{% endif %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

# As Gemma's: the prompt is the beginning of the first turn, and texts are stripped.
STRIPPED = """\
{{- bos_token }}{% if messages[0]['role'] == 'system' %}
{%- set prefix = messages[0]['content'] + '\\n\\n' %}{% set turns = messages[1:] %}
{%- else %}{% set prefix = '' %}{% set turns = messages %}{% endif %}
{%- for message in turns %}{{ '<start_of_turn>' + message['role'] + '\\n' + (prefix if loop.first else '') }}
{{- message['content'] | trim }}{{ '<end_of_turn>\\n' }}{% endfor %}"""

# For encoders: a prompt stands behind the text.
BEHIND = """\
{{- '[CLS]' }}{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}{{ '[SEP]' }}
{%- for message in messages if message.role == 'system' %}{{ 'for ' + message.content + '[SEP]' }}{% endfor %}"""
BY_TASK = BEHIND + """{% if task == 'query' %}{{ '[MASK][MASK]' }}{% endif %}"""

_TOKENIZERS = {
    "qwen3": (tiny_tokenizers.qwen, PARTS, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}),
    "gemma3_text": (tiny_tokenizers.gemma, STRIPPED, {"bos_token": "<bos>", "pad_token": "<pad>"}),
    "bert": (tiny_tokenizers.bert, BEHIND, {"pad_token": "[PAD]", "mask_token": "[MASK]"}),
}


def save_body(folder: Path, family: str, *, has_words: bool = False) -> Path:
    """A transformer with its tokenizer and a chat template. `has_words`: a model for masked words."""
    make, template, named = _TOKENIZERS[family]
    tokenizer = make()
    if family == "gemma3_text":
        tokenizer.add_special_tokens(["<start_of_turn>", "<end_of_turn>"])
    config = tiny_config(family, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=2 * MAX_TOKENS)
    save_random((MODEL_FOR_MASKED_LM_MAPPING if has_words else MODEL_MAPPING)[type(config)], config, folder)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=MAX_TOKENS, chat_template=template, **named
    )
    fast.save_pretrained(folder)
    return folder


def save_dense(folder: Path, family: str, *, pooling: str = "lasttoken", **settings: Any) -> Path:
    """`settings`: of the Transformer module."""
    transformer = Transformer(str(save_body(folder / "body", family)), **settings)
    modules = [transformer, Pooling(32, pooling_mode=pooling), Normalize()]
    prompts = {"query": "Find texts", "document": ""}
    SentenceTransformer(modules=modules, prompts=prompts).save(str(folder / "dense"))
    return folder / "dense"


def save_multi_vector(folder: Path, family: str, **settings: Any) -> Path:
    modules = [
        Transformer(str(save_body(folder / "body", family)), **settings),
        projection(),
        MultiVectorMask(skiplist_words=[","]),
        Normalize(module_input_name="token_embeddings"),
    ]
    prompts = {"query": "Find texts", "document": ""}
    MultiVectorEncoder(modules=modules, prompts=prompts).save(str(folder / "multi-vector"))
    return folder / "multi-vector"
