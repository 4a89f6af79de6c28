"""Tiny multi-vector models with random weights in each layout, and what a reader of theirs computes.

Owns their making. Imports torch, transformers and sentence-transformers.
"""

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import CONFIG_MAPPING, MODEL_MAPPING, PreTrainedTokenizerFast

from tests.support.checkpoints import save_random

TOKEN_DIM = 8
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]", "[Q] ", "[D] ")
WORDS = ("the", "cat", "sat", "on", "a", "mat", "dog", "ran", "far", "away", "home", "sun", "moon", "sea")
VOCABULARY = {word: index for index, word in enumerate((*SPECIAL, *string.punctuation[:20], *WORDS))}
QUERIES = ["cat", "the dog ran far away", "the cat sat on a mat , home ! " * 4]
DOCUMENTS = ["the cat sat on a mat .", "dog ! , zebra [UNK] far", "sun moon sea " * 20, "!"]
_SIZES = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 300,
    "pad_token_id": 0,
    "sep_token_id": 3,
    "cls_token_id": 2,
}
_FAMILY_SIZES = {
    # A window of 17 tokens: a query has tokens that do not see each other.
    "modernbert": {"local_attention": 16, "global_attn_every_n_layers": 2},
    "xlm-roberta": {"type_vocab_size": 1},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
}


def save_body(folder: Path, family: str) -> None:
    """A transformer and its tokenizer."""
    settings: dict[str, Any] = {**_SIZES, **_FAMILY_SIZES.get(family, {})}
    config = CONFIG_MAPPING[family](**settings)
    save_random(MODEL_MAPPING[type(config)], config, folder)
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    named = {
        name: f"[{name[:-6].upper()}]" for name in ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    }
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=80, **named).save_pretrained(folder)


def change_json(path: Path, **changes: Any) -> None:
    stated: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**stated, **changes}))


def save_own(folder: Path, family: str, *steps: Any, **settings: Any) -> Path:
    """As sentence-transformers 6 saves it. `steps` stand between the transformer and the norm; `settings` are those of
    its Transformer module."""
    save_body(folder / "body", family)
    torch.manual_seed(1)
    modules = [
        Transformer(str(folder / "body"), **settings),
        *(steps or (projection(),)),
        MultiVectorMask(skiplist_words=[",", "!", "tiger"]),
        Normalize(module_input_name="token_embeddings"),
    ]
    prompts = {"query": "[Q] ", "document": "[D] "}
    encoder = MultiVectorEncoder(modules=modules, prompts=prompts, similarity_fn_name="meanmaxsim")
    # As models in this layout have it: the markers are tokens of their own.
    encoder.tokenizer.add_special_tokens({"additional_special_tokens": ["[Q] ", "[D] "]})
    encoder.save(str(folder))
    return folder


def projection(in_dim: int = 32, out_dim: int = TOKEN_DIM, **settings: Any) -> Dense:
    torch.manual_seed(in_dim + out_dim)
    return Dense(
        in_dim,
        out_dim,
        activation_function=settings.pop("activation", torch.nn.Identity()),
        module_input_name="token_embeddings",
        **{"bias": False, **settings},
    )


def save_pylate(folder: Path, family: str, *, token_dim: int = TOKEN_DIM, **settings: Any) -> Path:
    """As PyLate saves it: [Transformer, Dense], and the rest in the settings."""
    save_body(folder, family)
    (folder / "1_Dense").mkdir()
    torch.manual_seed(1)
    save_file({"linear.weight": torch.randn(token_dim, 32)}, folder / "1_Dense/model.safetensors")
    change_json(
        folder / "1_Dense/config.json",
        in_features=32,
        out_features=token_dim,
        bias=False,
        activation_function="torch.nn.modules.linear.Identity",
    )
    chain = [("sentence_transformers.models.Transformer", ""), ("pylate.models.Dense.Dense", "1_Dense")]
    modules = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path) in enumerate(chain)]
    (folder / "modules.json").write_text(json.dumps(modules))
    change_json(folder / "sentence_bert_config.json", max_seq_length=31, do_lower_case=False)
    stated: dict[str, Any] = {
        "model_type": "ColBERT",
        "prompts": {},
        "default_prompt_name": None,
        "similarity_fn_name": "MaxSim",
        "query_prefix": "[Q] ",
        "document_prefix": "[D] ",
        "query_length": 16,
        "document_length": 24,
        "attend_to_expansion_tokens": False,
        "do_query_expansion": True,
        "skiplist_words": list(string.punctuation),
    }
    change_json(folder / "config_sentence_transformers.json", **{**stated, **settings})
    return folder


def save_stanford(folder: Path, **metadata: Any) -> Path:
    """As Stanford's ColBERT saves it: the projection is a tensor of the model's own file."""
    save_body(folder, "bert")
    torch.manual_seed(1)
    weights = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    weights["linear.weight"] = torch.randn(TOKEN_DIM, 32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    change_json(folder / "config.json", architectures=["HF_ColBERT"])
    stated: dict[str, Any] = {
        "query_maxlen": 12,
        "doc_maxlen": 20,
        "mask_punctuation": True,
        "attend_to_mask_tokens": False,
    }
    (folder / "artifact.metadata").write_text(json.dumps({**stated, **metadata}))
    return folder


def save_bge_m3(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Dense modules, and two linear layers beside them."""
    save_body(folder / "body", "xlm-roberta")
    modules = [Transformer(str(folder / "body")), Pooling(32, pooling_mode="cls"), Normalize()]
    SentenceTransformer(modules=modules).save(str(folder))
    for name, width in (("sparse_linear", 1), ("colbert_linear", 32)):
        torch.manual_seed(width)
        state = torch.nn.Linear(32, width).to(dtype).state_dict()
        save_file(state, folder / f"{name}.safetensors")
    return folder


def features_of(
    encoder: MultiVectorEncoder, text: str, task: str
) -> tuple[NDArray[np.int32], int, NDArray[np.float32]]:
    """What sentence-transformers makes of a text alone: the ids of its tokens, how many of them are attended to, and
    the vector of each."""
    prompt = encoder.prompts.get(task)
    features = encoder.preprocess([text], prompt=prompt, task=task)
    token_ids = features["input_ids"][0].numpy().astype(np.int32)
    attended = int(features["attention_mask"].sum())
    with torch.inference_mode():
        made = encoder(features, task=task)["token_embeddings"][0].numpy()
    return token_ids, attended, made
