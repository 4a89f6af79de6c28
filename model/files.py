"""Which files a model is made of, the reading of its JSON files, and the error that a broken one raises.

Knows no kind of model, and reads no tensor.
"""

import glob
import json
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from vecd.base.failures import ModelError as ModelError
from vecd.base.failures import source_of as source_of
from vecd.base.files import JsonMapping, JsonObject, read_json

MODEL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "artifact.metadata", "*.safetensors")
"""What a model is made of, by the names of files in its folder and in those of its modules: settings, vocabularies,
templates and weights. The hub is asked for these, and a reload looks at them, so no reader may open others but these:
"""
PICKLED_WEIGHTS = "pytorch_model*.bin"
ADAPTER = "adapter_model.safetensors"
PICKLED_HEADS = ("sparse_linear.pt", "colbert_linear.pt")
EXPORT = "onnx/model.onnx"
"""The usual one. The weights of an export may be in files of any name in the folder `onnx`."""
_EXPORTS_ABOVE = ("*.onnx", "*.onnx[._]data*")
"""In a model's folder itself, as optimum and fastembed have them."""
_ORDER = (
    r"(onnx/)?model\.onnx",
    r"(onnx/)?model_(optimized|O[123])\.onnx",
    r"(onnx/)?model_(fp16|float16|O4)\.onnx",
    r"(onnx/)?[^/]*(quantized|q?u?int8)[^/]*\.onnx",
    r"(onnx/)?[^/]+\.onnx",
    r"(?i)[^/]+[-._]f32\.gguf",
    r"(?i)[^/]+[-._]f16\.gguf",
    r"(?i)[^/]+[-._]bf16\.gguf",
    r"(?i)[^/]+[-._]q8_0\.gguf",
    r"(?i)(?![^/]*[-._](i?q[1-6]|tq\d))[^/]+\.gguf",
)
"""Names of weights that are taken where there are neither safetensors nor pickles: the exact ones first. Those of GGUF
leave out formats that are not served."""


def in_order(names: Iterable[str]) -> list[str]:
    """Those of `names`, paths in a folder of weights, that are an ONNX export or GGUF, the first choice first."""
    ranks = {name: next((at for at, form in enumerate(_ORDER) if re.fullmatch(form, name)), None) for name in names}
    return [name for _, name in sorted((rank, name) for name, rank in ranks.items() if rank is not None)]


def weights_in(folder: Path, suffix: str) -> list[Path]:
    """The files `in_order` with `suffix`, ".onnx" or ".gguf", that are in a folder of weights."""
    found = (path for pattern in (f"*{suffix}", f"onnx/*{suffix}") for path in folder.glob(pattern) if path.is_file())
    return [folder / name for name in in_order(path.relative_to(folder).as_posix() for path in found)]


def check_named(folder: Path, file: str) -> None:
    """Raises ModelError unless `file`, which --file names, is weights in the model's folder; "": none is named."""
    path = PurePath(file)
    is_named_right = path.suffix in (".onnx", ".gguf") and not path.is_absolute() and ".." not in path.parts
    if file and not (is_named_right and (folder / file).is_file()):
        there = (path for pattern in ("*.onnx", "onnx/*.onnx", "*.gguf") for path in folder.glob(pattern))
        raise ModelError(f"{folder}: {why_not_named(file, [path.relative_to(folder).as_posix() for path in there])}")


def why_not_named(file: str, there: Iterable[str]) -> str:
    names = ", ".join(sorted(there)) or "there are none"
    return f"--file {file!r:.80} given, and must be one of the .onnx and .gguf files: {names}"


def files_of(folder: Path) -> list[Path]:
    wanted = (*MODEL_FILES, PICKLED_WEIGHTS, *PICKLED_HEADS, *_EXPORTS_ABOVE, "*.gguf")
    found = (*folder.glob("*"), *folder.glob("*/*"), *folder.glob("*/onnx/*"))
    named = (path for path in found if path.parent.name == "onnx" or any(fnmatch(path.name, name) for name in wanted))
    return [path for path in named if path.is_file()]


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0]


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
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


class Folder:
    """A folder of a model. Opens each JSON file once. All methods raise ModelError for a file that
    is not as it must be. The parts of a name are joined, so that the first may be a module's path, which may be ""."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parsed: dict[Path, Any] = {}

    def json(self, *name: str) -> Any:
        path = self.path.joinpath(*name)
        if path not in self._parsed:
            with _reading(path):
                self._parsed[path] = json.loads(path.read_text(encoding="utf-8"))
        return self._parsed[path]

    def settings(self, *name: str) -> ModelSettings:
        """A copy, which may be changed."""
        path, content = self.path.joinpath(*name), self.json(*name)
        if not isinstance(content, dict):
            raise ModelError(f"{path}: must be a JSON object")
        return ModelSettings(path, content)

    def optional(self, *name: str) -> ModelSettings:
        """Empty for a file that is missing."""
        path = self.path.joinpath(*name)
        return self.settings(*name) if path.exists() else ModelSettings(path, {})

    def has(self, *name: str) -> bool:
        return self.path.joinpath(*name).is_file()


def has_safetensors(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))


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
    raise ModelError(f"{single}: file missing (the model's weights)")


def vocabulary_files(folder: Path) -> list[Path]:
    """WordPiece, BPE, sentencepiece. The fast tokenizer's file can be made of them."""
    named = (folder / name for name in ("vocab.txt", "vocab.json", "merges.txt"))
    return sorted(path for path in (*named, *folder.glob("*.model")) if path.is_file())


def export_files(export: Path) -> list[Path]:
    """An ONNX file and what its weights may be in: every file of its folder `onnx` but other exports and theirs; of
    one in the model's folder itself those that begin with its name."""
    if export.parent.name != "onnx":
        return sorted(path for path in export.parent.glob(f"{glob.escape(export.name)}*") if path.is_file())
    files = (path for path in export.parent.rglob("*") if path.is_file())
    return sorted(path for path in files if path.name.startswith(export.name) or ".onnx" not in path.name)


def weight_files(folder: Path) -> list[Path]:
    """As transformers chooses: the single file wins over an index. Raises ModelError for a file that is missing."""
    index = folder / "model.safetensors.index.json"
    has_shards = index.is_file() and not (folder / "model.safetensors").is_file()
    # By its name, because transformers unpickles every file that is not called .safetensors.
    return shards(index, ".safetensors") if has_shards else [single_file(folder)]


def shards(index: Path, suffix: str) -> list[Path]:
    """The files that an index names, all with this suffix."""
    content = Folder(index.parent).settings(index.name)
    places = content.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise content.error("weight_map must name a file for each tensor")
    names = sorted(set(places.values()))
    for name in names:
        if not name.endswith(suffix):
            raise content.error(f"{name} is not a {suffix} file")
        if not (index.parent / name).is_file():
            raise ModelError(f"{index.parent / name}: file missing (named in {index.name})")
    return [index.parent / name for name in names]


# --- the headers of safetensors ---------------------------------------------------------------------------------


class StoredTensor(NamedTuple):
    kind: str
    """As in the header: F32, BF16, …"""
    shape: tuple[int, ...]
    begin: int
    """In the file, in bytes."""
    nbytes: int


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, by their names. Reads its header alone. Raises ModelError for a file that is missing or
    not whole."""
    with _reading(path), path.open("rb") as file:
        return tensors_in(path, path.stat().st_size, lambda begin, count: os.pread(file.fileno(), count, begin))


def tensors_in(path: Path, size: int, read: Callable[[int, int], Any]) -> dict[str, StoredTensor]:
    """Like `stored_tensors`, of a file that is open. `read`: gives a number of bytes from a place on, as a buffer.

    Source of the format: https://github.com/huggingface/safetensors, "Format": the length of the header as eight bytes,
    a JSON object with dtype, shape and data_offsets of each tensor, the data without a gap."""
    has = f"it has {size:,} bytes"
    start = 8 + int.from_bytes(bytes(read(0, 8)), "little") if size >= 8 else 0
    if not 8 <= start <= _MAX_HEADER_BYTES:
        raise ModelError(f"{path}: is not a safetensors file: {has}")
    end, is_damaged = start, False
    found = {}
    try:
        header: JsonObject = json.loads(bytes(read(8, start - 8))) if start <= size else {}
        header.pop("__metadata__", None)
        for name, facts in sorted(header.items(), key=lambda each: each[1]["data_offsets"]):
            kind, shape = facts["dtype"], tuple(map(operator.index, facts["shape"]))
            begin, stop = map(operator.index, facts["data_offsets"])
            num_bits = 8 if kind == "BOOL" else int(re.split(r"[A-Z]+|_", kind)[1])
            is_damaged |= start + begin != end or min(shape, default=0) < 0
            is_damaged |= 8 * (stop - begin) != math.prod(shape) * num_bits
            end = start + stop
            found[name] = StoredTensor(kind, shape, start + begin, stop - begin)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path}: is not a safetensors file: {has} ({one_line(error)})") from None
    if is_damaged:
        raise ModelError(f"{path}: is damaged: {has}, and its header gives tensors wrong sizes or places")
    if end != size:
        raise ModelError(f"{path}: is cut off, or has something behind its tensors: {has}, and should have {end:,}")
    return found


def is_whole(path: Path) -> bool:
    try:
        stored_tensors(path)
    except ModelError:
        return False
    return True


def made_with(path: Path) -> JsonObject | None:
    """The settings that were made with a file of weights, by their paths beside it; None: one of both is not whole."""
    with suppress(OSError, ValueError, RecursionError):
        if is_whole(path) and isinstance(found := read_json(path.with_suffix(".json")), dict):
            return found
    return None


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
