"""Makes plain weights of checkpoints that are quantized: FP8, AWQ, GPTQ and compressed-tensors.

Owns the schemes, by config.json's `quantization_config`. A weight is made when it is written, so one is in memory at a
time. What a scheme says of activations is left out: these are computed exactly. Sources of the layouts: transformers'
integrations/finegrained_fp8.py, and the packing of AutoAWQ (gemm), AutoGPTQ and compressed-tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vecd.base.files import JsonMapping
from vecd.model.files import Folder, ModelSettings, one_line
from vecd.workers.torch.checkpoint import TYPES, Tensors
from vecd.workers.torch.making import Content, Planned

_BITS_OF_WORD = 32
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where the columns of eight are in a word, from its lowest bits on."""
_TYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}


class _Checkpoint(NamedTuple):
    config: ModelSettings
    scheme: ModelSettings
    tensors: Tensors

    def has(self, name: str, *shape: int) -> str:
        """Raises ModelError for a tensor that is missing or has another shape; returns its name."""
        found = self.tensors.shape(name) if name in self.tensors else None
        if found != shape:
            raise self.config.error(f"{name} has the shape {found}, and should have {shape}")
        return name

    def one_of(self, name: str, default: object, *known: object) -> Any:
        """Raises ModelError for a setting of the scheme that is not known."""
        value = self.scheme.get(name, default)
        if value not in known:
            names = ", ".join(map(str, known))
            raise self.config.error(f"quantization_config: {name} is {value!r:.40}; known: {names}")
        return value

    def group_size(self, columns: int) -> int:
        return columns if self.scheme.get("group_size") == -1 else min(columns, self.scheme.positive("group_size"))


class _Weight(NamedTuple):
    shape: tuple[int, ...]
    make: Callable[[], Tensor]
    """float32."""


_Scheme = Callable[[_Checkpoint, str], _Weight]
"""Of a module's name with a dot behind it."""


def _by_scale(checkpoint: _Checkpoint, module: str) -> _Weight:
    """One scale for all, for a row, or for a block of rows and columns."""
    tensors = checkpoint.tensors
    rows, columns = shape = tensors.shape(f"{module}weight")
    scale = next(name for name in (f"{module}weight_scale_inv", f"{module}weight_scale") if name in tensors)
    size = checkpoint.scheme.get("weight_block_size")
    block = size if isinstance(size, list) and len(size) == 2 and min(size) > 0 else [rows, columns]
    is_of_rows = tensors.shape(scale) in ((), (1,), (rows,), (rows, 1))
    if not is_of_rows:
        checkpoint.has(scale, *(-(-length // part) for length, part in zip(shape, block, strict=True)))

    def make() -> Tensor:
        weight, factors = tensors[f"{module}weight"].float(), tensors[scale].float()
        if is_of_rows:
            return weight * factors.reshape(-1, 1)
        factors = factors.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
        return weight * factors

    return _Weight(shape, make)


def _awq(checkpoint: _Checkpoint, module: str) -> _Weight:
    bits, tensors = checkpoint.one_of("bits", None, 4), checkpoint.tensors
    checkpoint.one_of("version", "gemm", "gemm")
    checkpoint.one_of("zero_point", True, True)
    columns, packed = tensors.shape(f"{module}qweight")
    rows, size = packed * _BITS_OF_WORD // bits, checkpoint.group_size(columns)
    checkpoint.has(f"{module}scales", -(-columns // size), rows)
    checkpoint.has(f"{module}qzeros", -(-columns // size), packed)

    def make() -> Tensor:
        values, zeros = (
            _unpacked(tensors[f"{module}{name}"], bits)[..., _AWQ_ORDER].flatten(1) for name in ("qweight", "qzeros")
        )
        return _grouped(values, zeros, tensors[f"{module}scales"], torch.arange(columns) // size)

    return _Weight((rows, columns), make)


def _gptq(checkpoint: _Checkpoint, module: str) -> _Weight:
    """A zero is stored less 1, but in the second version of the format."""
    bits, tensors = checkpoint.one_of("bits", None, 4, 8), checkpoint.tensors
    version = checkpoint.one_of("checkpoint_format", "gptq", "gptq", "gptq_v2")
    packed, rows = tensors.shape(f"{module}qweight")
    columns = packed * _BITS_OF_WORD // bits
    size = checkpoint.group_size(columns)
    num_groups, order = -(-columns // size), f"{module}g_idx"
    checkpoint.has(f"{module}scales", num_groups, rows)
    checkpoint.has(f"{module}qzeros", num_groups, rows * bits // _BITS_OF_WORD)
    if order in tensors:
        checkpoint.has(order, columns)

    def make() -> Tensor:
        values = _unpacked(tensors[f"{module}qweight"].T, bits).flatten(1).T
        zeros = _unpacked(tensors[f"{module}qzeros"], bits).flatten(1) + (version == "gptq")
        groups = tensors[order].long() if order in tensors else torch.arange(columns) // size
        if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
            raise checkpoint.config.error(f"{order} has a group beyond the {num_groups} of {module}scales")
        return _grouped(values, zeros, tensors[f"{module}scales"], groups)

    return _Weight((rows, columns), make)


def _packed(checkpoint: _Checkpoint, module: str) -> _Weight:
    """compressed-tensors' whole numbers around 0, stored around half of their range."""
    tensors = checkpoint.tensors
    rows, packed = tensors.shape(f"{module}weight_packed")
    _, num_groups = tensors.shape(f"{module}weight_scale")
    _, columns = shape = tuple(map(int, tensors[f"{module}weight_shape"].tolist()))
    bits = packed * _BITS_OF_WORD // columns
    if bits not in (4, 8) or shape != (rows, packed * _BITS_OF_WORD // bits) or columns % num_groups:
        raise ValueError(f"weight_shape {shape}, {rows} × {packed} words, {num_groups} groups")
    checkpoint.has(f"{module}weight_scale", rows, num_groups)

    def make() -> Tensor:
        values = _unpacked(tensors[f"{module}weight_packed"], bits).flatten(1).T
        scales = tensors[f"{module}weight_scale"].T
        zeros = torch.full_like(scales, 2 ** (bits - 1))
        return _grouped(values, zeros, scales, torch.arange(columns) // (columns // num_groups))

    return _Weight((rows, columns), make)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """From [R, W] int32 to [R, W, numbers of a word], the lowest bits first."""
    shifts = torch.arange(0, _BITS_OF_WORD, bits, dtype=torch.int32)
    numbers: Tensor = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return numbers


def _grouped(values: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    """From values [columns, rows], zeros and scales of each group [groups, rows], and the group of each column, to
    [rows, columns]."""
    weight: Tensor = (values - zeros[groups]).float() * scales[groups].float()
    return weight.T


_SCHEMES: Mapping[tuple[str, str], tuple[_Scheme, tuple[str, ...]]] = {
    ("fp8", ""): (_by_scale, ("weight_scale_inv", "weight_scale")),
    ("awq", ""): (_awq, ("qweight",)),
    ("gptq", ""): (_gptq, ("qweight",)),
    ("compressed-tensors", "float-quantized"): (_by_scale, ("weight_scale",)),
    ("compressed-tensors", "int-quantized"): (_by_scale, ("weight_scale",)),
    ("compressed-tensors", "pack-quantized"): (_packed, ("weight_packed",)),
}
"""By `quant_method`, and of compressed-tensors `format`: how a weight is made, and which tensors show that it has to
be."""
_CONSUMED = (
    "weight_scale_inv", "weight_scale", "weight_packed", "weight_shape", "qweight", "qzeros", "scales", "g_idx",
    "input_scale", "input_zero_point", "activation_scale", "output_scale", "k_scale", "v_scale",
)  # fmt: skip
"""Of a module whose weight is made; any other but its bias would change the weight."""
_WORDS = ("qweight", "qzeros", "weight_packed")
"""Of these, those that are words of int32."""


def read(sources: Sequence[Path], options: JsonMapping) -> Content:
    """The weights in `sources`, of which the first is config.json, in its `dtype`. Raises ModelError, in one line, for
    a scheme that is not known, or a tensor of another shape than it has."""
    path, *files = sources
    config = Folder(path.parent).settings(path.name)
    scheme = config.inner("quantization_config")
    method = str(scheme.get("quant_method"))
    key = method, str(scheme.get("format")) if method == "compressed-tensors" else ""
    called = " ".join(key).strip()
    if key not in _SCHEMES:
        known = ", ".join(" ".join(each).strip() for each in _SCHEMES)
        raise config.error(f"quantization_config: {called:.80} is not known; known: {known}")
    make_weight, marks = _SCHEMES[key]
    checkpoint = _Checkpoint(config, scheme, Tensors(files))
    dtype = _TYPES.get(str(config.get("dtype", config.get("torch_dtype"))), torch.bfloat16)
    split = {name: name.rpartition(".") for name in checkpoint.tensors}
    quantized = dict.fromkeys(module for module, _, last in split.values() if last in marks)
    checkpoint.one_of("transform_config", None, None, {})
    tensors = {}
    for name, (kind, shape, *_) in checkpoint.tensors.stored.items():
        module, _, last = split[name]
        is_known = last in (*_CONSUMED, "weight", "bias") if module in quantized else not kind.startswith("F8")
        if not is_known or kind not in TYPES or (last in _WORDS and kind != "I32"):
            raise config.error(f"quantization_config: of {called}, {name} is not known as {kind}")
        if last not in _CONSUMED and (last != "weight" or module not in quantized):
            tensors[name] = Planned(TYPES[kind], shape, partial(checkpoint.tensors.__getitem__, name))
    for module in quantized:
        try:
            shape, make = make_weight(checkpoint, f"{module}.")
        except (ValueError, TypeError, LookupError, ZeroDivisionError) as error:
            raise config.error(f"{module} is not as {method} has it: {one_line(error)}") from None
        tensors[f"{module}.weight"] = Planned(dtype, shape, make)
    settings = {name: value for name, value in config.items() if name != "quantization_config"}
    return Content(tensors, {path.name: settings})
