"""Which files a model is made of, the reading of its JSON files, and the error that a broken one raises.

Knows no kind of model, and reads no tensor.
"""

import json
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from vecd.base.files import JsonMapping, JsonObject

MODEL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "artifact.metadata", "*.safetensors")
"""What a model is made of, by the names of files in its folder and in those of its modules: settings, vocabularies,
templates and weights. The hub is asked for these, and a reload looks at them, so no reader may open others but these:
"""
PICKLED_WEIGHTS = "pytorch_model*.bin"
PICKLED_HEADS = ("sparse_linear.pt", "colbert_linear.pt")
EXPORT = "onnx/model.onnx"
"""Its weights may be in files of any name in the same folder."""


def files_of(folder: Path) -> list[Path]:
    wanted = (*MODEL_FILES, PICKLED_WEIGHTS, *PICKLED_HEADS)
    found = (*folder.glob("*"), *folder.glob("*/*"), *folder.glob("*/onnx/*"))
    is_of_model = (path.parent.name == "onnx" or any(fnmatch(path.name, name) for name in wanted) for path in found)
    return [path for path, is_one in zip(found, is_of_model, strict=True) if is_one and path.is_file()]


def source_of(path: str) -> str:
    """The path that the user knows: a model whose pickles have been converted is read from a folder in the cache,
    `…/converted/<32 digits>` and then the path of the model's own folder."""
    return re.sub(r"^.*/converted/[0-9a-f]{32}(?=/)", "", path)


class ModelError(Exception):
    """The model cannot be served. The message is one line with the file and its fault."""

    def __init__(self, message: str) -> None:
        path, colon, fault = message.partition(": ")
        super().__init__(source_of(path) + colon + fault)


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0]


def read_json(path: Path) -> Any:
    """Like the other readers, raises ModelError when the file is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: file missing") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, a number too long
        raise ModelError(f"{path}: cannot be read: {error}") from None


_LARGEST = 2**31 - 1
"""Sizes and token ids travel between processes as int32."""
_TOO_LARGE = 1e30


class ModelSettings(dict[str, Any]):
    """The object in a JSON file, or one within it, and the path, which every error names. All methods raise ModelError
    for a value of another type."""

    def __init__(self, path: Path, content: JsonMapping) -> None:
        super().__init__(content)
        self.path = path

    def error(self, fault: str) -> ModelError:
        return ModelError(f"{self.path}: {fault}")

    def positive(self, *names: str) -> int:
        """The first of `names` that is there as a positive whole number."""
        for name in names:
            value = self.get(name)
            if type(value) is int and 0 < value <= _LARGEST:
                return value
        raise self.error(f"{names[0]} is missing or not a positive whole number")

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _TOO_LARGE:
            raise self.error(f"{name} is {value!r:.80}, and must be a number")
        return float(value)

    def inner(self, name: str) -> "ModelSettings":
        """The object under `name`; empty for none."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(f"{name} must be an object, not {value!r:.80}")
        return ModelSettings(self.path, value or {})


def read_object(path: Path) -> ModelSettings:
    content = read_json(path)
    if not isinstance(content, dict):
        raise ModelError(f"{path}: must be a JSON object")
    return ModelSettings(path, content)


def read_optional(path: Path) -> ModelSettings:
    return read_object(path) if path.exists() else ModelSettings(path, {})


def single_file(folder: Path) -> Path:
    """The weights of a model or module. Refuses any but safetensors."""
    single = folder / "model.safetensors"
    if single.is_file():
        return single
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.pkl") for path in folder.glob(pattern))
    if pickles:
        raise ModelError(
            f"{folder}: weights only as pickle ({pickles[0]}); of pickles, vecd converts pytorch_model.bin alone"
        )
    exports = sorted(path.name for path in folder.glob("onnx/*.onnx"))
    of_exports = f"; of exports onnx/model.onnx alone is served, not {exports[0]}" if exports else ""
    raise ModelError(f"{single}: file missing (the model's weights){of_exports}")


def tensor_shapes(path: Path) -> dict[str, list[int]]:
    """Raises as `tensor_facts`."""
    return {name: shape for name, (_, shape) in tensor_facts(path).items()}


def tensor_facts(path: Path) -> dict[str, tuple[str, list[int]]]:
    """The type, as F32, and the shape of each tensor of a safetensors file. Reads its header alone. Raises ModelError
    when it is broken."""
    try:
        header, _ = _header_of(path)
        return {
            name: (str(facts.get("dtype")), [int(length) for length in facts["shape"]])
            for name, facts in header.items()
        }
    except _BROKEN as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None


def is_whole(path: Path) -> bool:
    try:
        header, start = _header_of(path)
        end: int = max(facts["data_offsets"][1] for facts in header.values())
        return start + end == path.stat().st_size
    except _BROKEN:
        return False


def _header_of(path: Path) -> tuple[JsonObject, int]:
    """Source of the format: https://github.com/huggingface/safetensors, "Format"."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _MAX_HEADER_BYTES:
            raise ValueError(f"its header would have {size:,} bytes, and may have {_MAX_HEADER_BYTES:,}")
        header = json.loads(file.read(size))
    return {name: facts for name, facts in header.items() if name != "__metadata__"}, 8 + size


_BROKEN = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


_MAX_HEADER_BYTES = 100_000_000
"""The library's own limit."""


def token_ids(tokenizer: ModelSettings) -> dict[str, int]:
    try:
        vocab = tokenizer.inner("model").get("vocab") or {}
        # Unigram has a list of pieces, other models an object of ids.
        ids = {str(vocab[i][0]): i for i in range(len(vocab))} if isinstance(vocab, list) else dict(vocab.items())
        ids |= {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise tokenizer.error(f"not a tokenizer: {error}") from None
    for token, token_id in ids.items():
        if not isinstance(token, str) or type(token_id) is not int or not 0 <= token_id <= _LARGEST:
            raise tokenizer.error(f"not a tokenizer: the id of {token!r:.80} is {token_id!r:.80}")
    return ids
