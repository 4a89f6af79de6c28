"""Models by the name of a shape: the bundled one, and random checkpoints of sizes that people serve.

Owns the shapes and their folders below `.bench/models`. The speed of a forward pass does not depend on the values of
the weights, so none is downloaded. Every checkpoint has the bundled model's tokenizer, and a vocabulary of its size.
Called by `benchmarks.engine`, `benchmarks.rerank` and `benchmarks.models`, and as `python -m benchmarks.checkpoints
SHAPE FOLDER` in a process of its own, because it imports torch.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from benchmarks.servers import bundled_model

BUNDLED = "minilm"
_FOLDER = Path(__file__).parents[1] / ".bench" / "models"
_SEED = 0
_MAX_TOKENS = 512
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
_TOKEN_IDS = {"pad_token_id": 0, "cls_token_id": 101, "bos_token_id": 101, "sep_token_id": 102, "eos_token_id": 102}
"""Those of the bundled model's tokenizer."""


@dataclass(frozen=True, slots=True)
class Shape:
    config: str
    """Name of the class of settings in transformers."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Those that are not the class's own defaults."""
    pooling: str = "mean"
    model: str = ""
    """Name of the class of the model, where the settings' own has more than an encoder."""


SHAPES: Mapping[str, Shape] = {
    "bert-base": Shape("BertConfig"),
    "bert-large": Shape(
        "BertConfig",
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
    ),
    "modernbert-base": Shape("ModernBertConfig", _TOKEN_IDS),
    "qwen3-0.6b": Shape(
        "Qwen3Config",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            **_TOKEN_IDS,
        },
        pooling="lasttoken",
    ),
    "t5-base": Shape(
        "T5Config", {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}, model="T5EncoderModel"
    ),
    "deberta-v3-base": Shape(
        "DebertaV2Config",
        {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "type_vocab_size": 0,
            "layer_norm_eps": 1e-7,
            "relative_attention": True,
            "position_buckets": 256,
            "position_biased_input": False,
            "pos_att_type": ["p2c", "c2p"],
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
        },
    ),
}


class NoSuchModel(Exception):
    """Raised for a name that is neither a shape nor a folder. One line."""


def model_folder(name: str, cache: Path = _FOLDER) -> Path:
    """The folder of a shape, which is made once, or `name` itself where it is a folder.

    Raises NoSuchModel, and CalledProcessError when a checkpoint cannot be made; it has said why on stderr.
    """
    if name == BUNDLED:
        return Path(bundled_model())
    if name not in SHAPES:
        if not (Path(name) / "config.json").is_file() and not (Path(name) / "modules.json").is_file():
            raise NoSuchModel(f"{name}: neither a model's folder nor one of {', '.join((BUNDLED, *SHAPES))}")
        return Path(name).resolve()
    folder = cache / name
    if not folder.is_dir():
        print(f"making a random checkpoint of {name} …", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "benchmarks.checkpoints", name, str(folder)]
        subprocess.run(command, check=True, cwd=Path(__file__).parents[1])
    return folder


def make_checkpoint(shape: Shape, folder: Path) -> None:
    """Write a model of random weights in sentence-transformers' layout. Side effect: `folder` appears when whole."""
    import torch
    import transformers

    torch.manual_seed(_SEED)
    bundled = Path(bundled_model())
    vocab_size = json.loads((bundled / "config.json").read_text())["vocab_size"]
    config = getattr(transformers, shape.config)(vocab_size=vocab_size, **shape.settings)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    auto_model: Any = transformers.AutoModel
    model = getattr(transformers, shape.model)(config) if shape.model else auto_model.from_config(config)
    model.float().save_pretrained(unfinished)
    for name in _TOKENIZER_FILES:
        shutil.copyfile(bundled / name, unfinished / name)
    for path, content in _layout(config.hidden_size, shape.pooling).items():
        (unfinished / path).parent.mkdir(exist_ok=True)
        (unfinished / path).write_text(json.dumps(content))
    unfinished.rename(folder)


def save_cross_encoder(folder: Path) -> Path:
    """A reranker in `folder`, which it returns: the bundled model's layers, under a head of one label whose weights are
    drawn at random. No package has the weights of a real one. Imports no torch."""
    bundled = Path(bundled_model())
    config = json.loads((bundled / "config.json").read_text())
    config |= {
        "architectures": ["BertForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(bundled / "model.safetensors").items()}
    tensors.pop("bert.embeddings.position_ids", None)
    head = np.random.default_rng(_SEED).standard_normal((1, config["hidden_size"]), np.float32)
    tensors |= {"classifier.weight": 0.1 * head, "classifier.bias": np.zeros(1, np.float32)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    for name in _TOKENIZER_FILES:
        shutil.copyfile(bundled / name, folder / name)
    return folder


def save_mirrored(folder: Path) -> Path:
    """The bundled model in `folder`, which it returns, but that each vector's elements are multiplied with `signs`: the
    last LayerNorm's are."""
    shutil.copytree(bundled_model(), folder)
    tensors = load_file(folder / "model.safetensors")
    for part in ("weight", "bias"):
        name = f"encoder.layer.5.output.LayerNorm.{part}"
        tensors[name] = tensors[name] * signs().astype(tensors[name].dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def signs() -> NDArray[np.float32]:
    """[384]: -1 in every third element, 1 in the others."""
    return np.where(np.arange(384) % 3, 1, -1).astype(np.float32)


def _layout(hidden_size: int, pooling: str) -> dict[str, Any]:
    """Files of sentence-transformers, by path."""
    modules = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    return {
        "modules.json": [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (path, kind) in enumerate(modules)
        ],
        "sentence_bert_config.json": {"max_seq_length": _MAX_TOKENS, "do_lower_case": False},
        "1_Pooling/config.json": {
            "word_embedding_dimension": hidden_size,
            **{f"pooling_mode_{mode}": mode.startswith(pooling) for mode in ("mean_tokens", "lasttoken", "cls_token")},
        },
    }


if __name__ == "__main__":
    make_checkpoint(SHAPES[sys.argv[1]], Path(sys.argv[2]))
