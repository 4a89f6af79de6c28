"""Reads a model in a file of GGUF: its tensors under transformers' names, and the settings that its metadata gives.

Owns the table of architectures. Every length in the file is compared with what is left of it before it is used.
Sources: ggml's docs/gguf.md for the format, llama.cpp's conversion/ for what is changed on the way into a file.
"""

import math
import mmap
import operator
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vecd.base.files import JsonMapping, JsonObject
from vecd.model.files import ModelError, ModelSettings, one_line
from vecd.workers.families import FAMILIES, Family
from vecd.workers.torch.gguf_tokenizer import tokenizer_of
from vecd.workers.torch.making import Content, Planned

# --- the file ---------------------------------------------------------------------------------------------------

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_BLOCK = 32
"""Numbers in a block of Q8_0."""


class _Form(NamedTuple):
    """How numbers are stored: in blocks of `size` numbers and `nbytes` bytes. `made`: the type that they become."""

    size: int
    nbytes: int
    made: torch.dtype


_FORMS = {
    0: _Form(1, 4, torch.float32),
    1: _Form(1, 2, torch.float16),
    30: _Form(1, 2, torch.bfloat16),
    8: _Form(_BLOCK, 2 + _BLOCK, torch.float16),
}
_OTHER_FORMS = {
    2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
    20: "IQ4_NL", 23: "IQ4_XS",
}  # fmt: skip
"""The names of those that files have most, for messages."""


class _Stored(NamedTuple):
    form: _Form
    shape: tuple[int, ...]
    begin: int


class _Reader:
    """Raises struct.error or ValueError where the file ends before what it says."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.place = data, 0

    def take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self.data, self.place)
        self.place += struct.calcsize(f"<{form}")
        return found

    def text(self) -> str:
        (length,) = self.take("Q")
        self.place += self._fits(length)
        return self.data[self.place - length : self.place].decode()

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            return self.take(_SCALARS[kind])[0]
        kind, length = self.take("IQ")
        least = struct.calcsize(_SCALARS.get(kind, "Q"))  # a text or an array has a length
        self._fits(length * least)
        if kind in _SCALARS:
            return list(self.take(f"{length}{_SCALARS[kind]}"))
        return [self.value(kind) for _ in range(length)]

    def _fits(self, nbytes: int) -> int:
        if nbytes > len(self.data) - self.place:
            raise ValueError(f"something of {nbytes:,} bytes at {self.place:,}")
        return nbytes


def _read_file(path: Path) -> tuple[mmap.mmap, ModelSettings, dict[str, _Stored]]:
    with path.open("rb") as file:
        size = path.stat().st_size
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            reader = _Reader(data)
            magic, version, num_tensors, num_values = reader.take("4sIQQ")
            if magic != b"GGUF" or version not in (2, 3):
                raise ValueError(f"it begins with {magic!r}, version {version}")
            values = {}
            for _ in range(num_values):
                name = reader.text()
                values[name] = reader.value(*reader.take("I"))
            facts = {}
            for _ in range(num_tensors):
                name, (num_dims,) = reader.text(), reader.take("I")
                if name in facts:
                    raise ValueError(f"{name!r:.80} is there twice")
                facts[name] = reader.take(f"{num_dims}Q"), *reader.take("IQ")
            alignment = operator.index(values.get("general.alignment", 32))
            start = -(-reader.place // alignment) * alignment
        except (ValueError, TypeError, LookupError, ZeroDivisionError, struct.error, RecursionError) as error:
            fault = f"is no GGUF file, or damaged: it has {size:,} bytes ({one_line(error)})"
            raise ModelError(f"{path}: {fault}") from None
    found = {}
    for name, (dims, kind, offset) in facts.items():
        if kind not in _FORMS:
            other = _OTHER_FORMS.get(kind, f"number {kind}")
            raise ModelError(f"{path}: {name!r:.80} has the format {other}; vecd serves F32, F16, BF16 and Q8_0")
        form, shape = _FORMS[kind], tuple(reversed(dims))
        nbytes = math.prod(shape) // form.size * form.nbytes
        if not (shape and nbytes) or shape[-1] % form.size or start + offset + nbytes > size:
            raise ModelError(f"{path}: {name!r:.80} {list(shape)} does not lie in the file, which has {size:,} bytes")
        found[name] = _Stored(form, shape, start + offset)
    return data, ModelSettings(path, values), found


def _load(data: mmap.mmap, tensor: _Stored) -> Tensor:
    form, shape = tensor.form, tensor.shape
    num_blocks = math.prod(shape) // form.size
    stored = torch.frombuffer(data, dtype=torch.uint8, count=num_blocks * form.nbytes, offset=tensor.begin)
    if form.size == 1:
        return stored.clone().view(form.made).reshape(shape)
    blocks = stored.reshape(num_blocks, form.nbytes)
    scales = blocks[:, :2].contiguous().view(torch.float16).float()
    return (scales * blocks[:, 2:].contiguous().view(torch.int8)).reshape(shape)


# --- the architectures ------------------------------------------------------------------------------------------


def _names_of(family: Family) -> dict[str, str]:
    """transformers' names of a family's tensors by those of GGUF, both without ".weight" and ".bias"."""
    encoder, layer = family.encoder, family.layer
    whole = {
        "token_embd": encoder.words,
        "token_types": encoder.types,
        "position_embd": encoder.positions,
        "token_embd_norm": encoder.embedding_norm,
        "output_norm": encoder.final_norm,
        "output": "lm_head",
    }
    qkv = ("attn_q", "attn_k", "attn_v") if len(layer.qkv) == len("qkv") else ("attn_qkv",)
    norms = ("attn_output_norm", "layer_output_norm") if encoder.final_norm is None else ("attn_norm", "ffn_norm")
    parts = {
        **dict(zip(qkv, layer.qkv, strict=True)),
        "attn_q_norm": layer.query_norm,
        "attn_k_norm": layer.key_norm,
        "attn_output": layer.out,
        "ffn_gate": layer.up[0] if encoder.is_gated else None,
        "ffn_up": layer.up[-1],
        "ffn_down": layer.down,
        **dict(zip(norms, (layer.attention_norm, layer.norm), strict=True)),
    }
    inner = {f"blk.{{}}.{name}": f"{family.layer_prefix}{part}" for name, part in parts.items() if part}
    return inner | {name: part for name, part in whole.items() if part}


class _Facts:
    """Metadata by names without the architecture's, and the shapes of tensors."""

    def __init__(self, values: ModelSettings, architecture: str, tensors: Mapping[str, _Stored]) -> None:
        self.values, self.tensors, self._architecture = values, tensors, architecture

    def get(self, name: str) -> Any:
        return self.values.get(f"{self._architecture}.{name}")

    def whole(self, name: str, default: int | None = None) -> int:
        name = f"{self._architecture}.{name}"
        return self.values.positive(name) if default is None or name in self.values else default

    def number(self, name: str, default: float) -> float:
        return self.values.number(f"{self._architecture}.{name}", default)

    def num_rows(self, tensor: str) -> int:
        if tensor not in self.tensors:
            raise self.values.error(f"{tensor!r} is missing")
        return self.tensors[tensor].shape[0]

    @property
    def num_heads(self) -> int:
        return self.whole("attention.head_count")

    @property
    def rope(self) -> JsonObject:
        scaling = self.get("rope.scaling.type")
        if scaling not in (None, "none") or "rope_freqs.weight" in self.tensors:
            raise self.values.error(f"rope.scaling.type {scaling!r:.80} is not supported in GGUF")
        return {"rope_type": "default", "rope_theta": self.number("rope.freq_base", 10_000)}

    def of_all(self) -> JsonObject:
        return {
            "vocab_size": self.num_rows("token_embd.weight"),
            "hidden_size": self.whole("embedding_length"),
            "intermediate_size": self.whole("feed_forward_length"),
            "num_hidden_layers": self.whole("block_count"),
            "num_attention_heads": self.num_heads,
            "max_position_embeddings": self.whole("context_length"),
        }

    def of_bert(self) -> JsonObject:
        return {
            "max_position_embeddings": self.num_rows("position_embd.weight"),
            "hidden_act": "gelu",
            **self.of_types(),
        }

    def of_nomic(self) -> JsonObject:
        return {"hidden_act": "silu", "rope_parameters": self.rope, **self.of_types()}

    def of_types(self) -> JsonObject:
        epsilon = self.number("attention.layer_norm_epsilon", 1e-12)
        num_types = self.num_rows("token_types.weight") if "token_types.weight" in self.tensors else 1
        return {"type_vocab_size": num_types, "layer_norm_eps": epsilon}

    def of_decoder(self) -> JsonObject:
        if self.get("attention.causal") is False or self.get("attention.sliding_window"):
            raise self.values.error("attention.causal or attention.sliding_window is not supported in GGUF")
        return {
            "num_key_value_heads": self.whole("attention.head_count_kv", self.num_heads),
            "head_dim": self.whole("attention.key_length", self.whole("embedding_length") // self.num_heads),
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon", 1e-6),
            "hidden_act": "silu",
            "attention_bias": "blk.0.attn_q.bias" in self.tensors,
            "rope_parameters": self.rope,
            "tie_word_embeddings": "output.weight" not in self.tensors,
        }


class _Architecture(NamedTuple):
    model_type: str
    in_transformers: str
    settings: Callable[[_Facts], JsonObject]


_ARCHITECTURES = MappingProxyType(
    {
        "bert": _Architecture("bert", "BertModel", _Facts.of_bert),
        "nomic-bert": _Architecture("nomic_bert", "NomicBertModel", _Facts.of_nomic),
        "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM", _Facts.of_decoder),
        "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM", _Facts.of_decoder),
    }
)

_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}


def read(sources: Sequence[Path], options: JsonMapping) -> Content:
    """The model in the first of `sources`. `options`: `own`, which settings the model's folder has itself. Raises
    ModelError, in one line, for a file that is damaged, an architecture or a format that is not known."""
    [path] = sources
    data, values, stored = _read_file(path)
    name = values.get("general.architecture")
    if (architecture := _ARCHITECTURES.get(str(name))) is None:
        raise values.error(f"a model of architecture {name!r:.80}; known in GGUF: {', '.join(_ARCHITECTURES)}")
    facts = _Facts(values, str(name), stored)
    config = {**facts.of_all(), **architecture.settings(facts)}
    config |= {"model_type": architecture.model_type, "architectures": [architecture.in_transformers]}
    if (padding := values.get("tokenizer.ggml.padding_token_id")) is not None:
        config["pad_token_id"] = padding
    tensors, names = {}, _names_of(FAMILIES[architecture.model_type])
    for each, tensor in stored.items():
        if not each.startswith("cls."):  # the head of a classifier
            made = Planned(tensor.form.made, tensor.shape, partial(_load, data, tensor))
            tensors[_renamed(values, names, each)] = made
    if architecture.model_type == "bert" and "token_types.weight" not in stored:  # of DistilBERT
        zeros = torch.zeros(1, config["hidden_size"])
        tensors["embeddings.token_type_embeddings.weight"] = Planned.of(zeros)
    files = {"config.json": config, **_modules(facts)}
    if "tokenizer.json" not in options["own"]:
        files["tokenizer.json"] = tokenizer_of(values)
    return Content(tensors, {each: content for each, content in files.items() if each not in options["own"]})


def _renamed(values: ModelSettings, names: Mapping[str, str], name: str) -> str:
    number = "".join(re.findall(r"^blk\.(\d+)\.", name))
    form, _, last = re.sub(r"^blk\.\d+\.", "blk.{}.", name).rpartition(".")
    if form not in names or last not in ("weight", "bias"):
        raise values.error(f"a tensor {name!r:.80}, which no such model has")
    return f"{names[form].format(number)}.{last}"


def _modules(facts: _Facts) -> JsonObject:
    """sentence-transformers', with vectors of length 1, as llama.cpp's server and Ollama give them; none where the file
    does not say how it pools."""
    pooling = facts.get("pooling_type")
    if pooling in (None, 0):
        return {}
    if pooling not in list(_POOLINGS):
        names = ", ".join(f"{number} ({name})" for number, name in _POOLINGS.items())
        raise facts.values.error(f"pooling_type is {pooling!r:.80}; known: {names}. 4 is a reranker's")
    types = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(types.items())
    ]
    size = facts.whole("embedding_length")
    return {
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": size, "pooling_mode": _POOLINGS[pooling]},
    }
