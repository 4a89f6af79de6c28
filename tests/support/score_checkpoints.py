"""Tiny classifiers and cross-encoders with random weights, as transformers and sentence-transformers save them, and
the logits of transformers' classes for token ids.

Owns their making. Their tokenizers have a template for pairs: BERT's, with token types, or RoBERTa's. Imports torch and
transformers: only for tests of workers, golden tests, and tests of a whole server.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from tests.support.checkpoints import MAX_TOKENS, VOCAB_SIZE, save_random, sequences_of, tiny_config
from vecd.workers.batch import PackedBatch

_ROBERTAS = ("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl")
"""Their tokenizers give every token type 0."""
_SPECIAL = {"[UNK]": 0, "[PAD]": 1, "[CLS]": 2, "[SEP]": 3}
_BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
_BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
_BART |= {"bos_token_id": 2, "eos_token_id": 3, "forced_eos_token_id": 3, "decoder_start_token_id": 3}
_CLASSIFIER_SIZES: dict[str, dict[str, Any]] = {
    "deberta-v2": {"pos_att_type": ["p2c", "c2p"], "relative_attention": True, "type_vocab_size": 0},
    "albert": {"embedding_size": 16},
    "bart": _BART,
    "mbart": _BART,
}


def save_classifier(
    folder: Path,
    family: str = "bert",
    *,
    labels: int | Sequence[str] = 1,
    is_of_tokens: bool = False,
    stored: str = "float32",
    activation_fn: str | None = None,
    **settings: Any,
) -> Path:
    """A model for classification in `folder`, which it returns. `labels`: how many, or their names. `activation_fn`: of
    config_sentence_transformers.json, which then says that the model is a CrossEncoder. `settings` go into config.json.
    """
    names = [f"LABEL_{index}" for index in range(labels)] if isinstance(labels, int) else list(labels)
    id2label = dict(enumerate(names))
    config = tiny_config(
        family,
        **{
            **_CLASSIFIER_SIZES.get(family, {}),
            "id2label": id2label,
            "label2id": {name: index for index, name in id2label.items()},
            **settings,
        },
    )
    classes: Any = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING if is_of_tokens else MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    save_random(classes[type(config)], config, folder, stored)
    has_types = family not in _ROBERTAS and getattr(config, "type_vocab_size", 0) > 1
    if family == "mbart":  # a language in the place of [CLS]
        save_pair_tokenizer(folder, single="$A [SEP] [CLS]", pair="$A [SEP] [SEP] $B [SEP] [CLS]")
        return folder
    save_pair_tokenizer(folder, is_roberta=family in (*_ROBERTAS, "bart"), has_types=has_types)
    if activation_fn is not None:
        stated = {"model_type": "CrossEncoder", "activation_fn": activation_fn, "prompts": {}}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(stated))
    return folder


def save_pair_tokenizer(
    folder: Path,
    *,
    is_roberta: bool = False,
    has_types: bool = False,
    max_tokens: int = MAX_TOKENS,
    single: str = "[CLS] $A [SEP]",
    pair: str = "",
) -> None:
    """A tokenizer of the words w4, w5, … w119, with a template for pairs. `has_types`: it says that the model takes
    token types, as BERT's tokenizer does. `single` and `pair`: another template."""
    words = {**_SPECIAL, **{f"w{index}": index for index in range(len(_SPECIAL), VOCAB_SIZE)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pair = pair or "[CLS] $A [SEP] [SEP] $B [SEP]" if is_roberta else "[CLS] $A [SEP] $B:1 [SEP]:1"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(name, _SPECIAL[name]) for name in ("[CLS]", "[SEP]")]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=max_tokens,
        model_input_names=["input_ids", *(["token_type_ids"] if has_types else []), "attention_mask"],
    ).save_pretrained(folder)


def logits_of(folder: Path, batch: PackedBatch, *, is_of_tokens: bool = False) -> NDArray[np.float32]:
    """transformers' own logits in float32, each sequence by itself: [B, labels], or [T, labels]. The tokens from a
    border on have token type 1, if the model has types."""
    auto: Any = AutoModelForTokenClassification if is_of_tokens else AutoModelForSequenceClassification
    model = auto.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    borders = [0] * batch.lengths.size if batch.borders is None else batch.borders.tolist()
    rows = []
    with torch.inference_mode():
        for ids, border in zip(sequences_of(batch), borders, strict=True):
            features = {"input_ids": torch.from_numpy(ids.astype(np.int64))[None]}
            features["attention_mask"] = torch.ones_like(features["input_ids"])
            if model.config.model_type not in _ROBERTAS and getattr(model.config, "type_vocab_size", 0) > 1:
                types = [int(0 < border <= place) for place in range(ids.size)]
                features["token_type_ids"] = torch.tensor([types])
            rows.append(model(**features).logits.reshape(-1, model.config.num_labels))
    return torch.cat(rows).numpy()


def save_minilm_cross_encoder(folder: Path, minilm: Path) -> Path:
    """A cross-encoder with the body and the tokenizer of the bundled model, and a random head, in `folder`, which it
    returns."""
    torch.manual_seed(0)
    model: Any = AutoModelForSequenceClassification.from_pretrained(minilm, num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        model.classifier.weight.mul_(20)  # logits of about 1
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(minilm).save_pretrained(folder)
    return folder
