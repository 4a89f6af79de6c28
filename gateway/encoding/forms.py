"""The forms in which rows are returned: what may be combined, the formulas of each conversion, the matrix of those
that are no JSON, and the reading of a file of ranges. Pure except for that file. A request of the model's own vectors
as float32 in JSON needs nothing of this."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from vecd.gateway.errors import BadRequest
from vecd.gateway.request import Dtype, EmbedRequest, Encoding, FloatRows, Form, Make
from vecd.model.card import ModelCard, ModelError
from vecd.shm.arena import original_of
from vecd.shm.output import ModelSizes, Output

Rows: TypeAlias = NDArray[Any]
Convert: TypeAlias = Callable[[Any], Rows]
"""Rows [n, D] to other rows, C-contiguous and new."""

WHOLE = frozenset({Dtype.INT8, Dtype.UINT8})
PACKED = frozenset({Dtype.BINARY, Dtype.UBINARY})
DIMS_PER_BYTE = 8
_SCORES = frozenset({Output.SCORES, Output.TOKEN_SCORES})


class Names(NamedTuple):
    """A dialect's names of the fields."""

    dtype: str = "encoding_format"
    encoding: str = "encoding_format"
    dimensions: str = "dimensions"


DEFAULT_NAMES = Names()


def check_forms(request: EmbedRequest, model: ModelCard, names: Names = DEFAULT_NAMES, *, has_ranges: bool) -> None:
    """Raise BadRequest, which names the field by `names`, for a form that the request's vectors cannot have.
    `has_ranges`: the server has ranges for integer types (`--quantization-ranges`)."""
    for form in request.forms:
        if fault := _fault_of(form, request, model, names, has_ranges):
            field, what = fault
            raise BadRequest(f"'{field}'{what}", param=field)


def _fault_of(
    form: Form, request: EmbedRequest, model: ModelCard, names: Names, has_ranges: bool
) -> tuple[str, str] | None:
    """The name of the wrong field, and what is said of it."""
    output, dimensions, dtype, encoding = request.output, request.dimensions, form.dtype.value, form.encoding.value
    is_json, width = form.encoding in (Encoding.FLOAT, Encoding.BASE64), output.width_of(model)
    if output.is_per_token and dimensions is not None and dimensions > width:
        return names.dimensions, f" must be 1 to {width} for vectors of tokens, is {dimensions}"
    if output in _SCORES and not is_json:
        return names.encoding, f" must be 'float' or 'base64' for scores, is '{encoding}'"
    if output in _SCORES and form.dtype in WHOLE | PACKED:
        return names.dtype, f": {dtype} is for vectors; scores are float32, float16 or bfloat16"
    if output.is_per_token and not is_json:
        why = "inputs have not the same number of them"
        return names.encoding, f" must be 'float' or 'base64' for vectors of tokens, is '{encoding}': {why}"
    if form.encoding is Encoding.NPY and form.dtype is Dtype.BFLOAT16:
        return names.encoding, " is 'npy', but NumPy has no bfloat16; ask for bytes, or for float16 or float32"
    if form.dtype in PACKED and (num_dims := width_of(request, model)) % DIMS_PER_BYTE:
        what = f": {dtype} needs a number of dimensions that is a multiple of {DIMS_PER_BYTE}; there are {num_dims}"
        return names.dtype if dimensions is None else names.dimensions, what
    if form.dtype not in WHOLE:
        return None
    if not has_ranges:
        if are_normalized(request, model) or model.is_whole:
            return None
        return names.dtype, (
            f": {dtype} is for vectors of length 1, and these are not, unless the request asks for it, or the server "
            "was started with --quantization-ranges"
        )
    if dimensions is not None:
        return names.dimensions, (
            f" is {dimensions}, but for {dtype} this server has ranges of whole vectors, which have {model.dim} "
            "(--quantization-ranges)"
        )
    if output.is_per_token or are_normalized(request, model) != model.is_normalized:
        return names.dtype, (
            f": for {dtype} this server has ranges of the model's own vectors, as sentence-transformers gives them, "
            "and others were asked for (--quantization-ranges)"
        )
    return None


def width_of(request: EmbedRequest, model: ModelSizes) -> int:
    """The dimensions of each returned row."""
    return request.output.width_of(model) if request.dimensions is None else request.dimensions


def are_normalized(request: EmbedRequest, model: ModelSizes) -> bool:
    """Whether the returned rows, as float32, have length 1."""
    return request.normalize or request.output.is_normalized_by(model)


# Conversions of float32 [n, D], finite, to a new array. docs/output-types.md describes the loss of accuracy of each.

_NUM_STEPS = 255
_FLOAT16_INFINITY, _BFLOAT16_INFINITY = 0x7C00, 0x7F80
_SHORTEST, _LONGEST = 1e-30, 1e30
"""Between these, a length is as exact as float32 as its elements are."""

_WIDEST = 32
"""Roots of the mean square at which the default ranges end. No element of a vector of length 1 is greater than
sqrt(D) of them, so that nothing at all is clipped up to 1,024 dimensions; all-MiniLM-L6-v2 has elements of 5.7; one
dimension that has half of the length in 1,536 has elements of 27. Half as many would halve the error, and clip those:
`benchmarks/quantization.py`."""


def shorten(rows: FloatRows, dimensions: int) -> FloatRows:
    return rows[:, :dimensions].copy()


def normalize(rows: FloatRows) -> FloatRows:
    """Each row divided by its length; a row of zeros stays unchanged. Lengths are float64, because squares of small
    float32s would vanish, and those of large ones would be infinite."""
    exact = rows.astype(np.float64)
    lengths: NDArray[np.float64] = np.sqrt(np.vecdot(exact, exact))[:, None]
    lengths[lengths == 0] = 1
    if lengths.min() > _SHORTEST and lengths.max() < _LONGEST:
        return np.divide(rows, lengths.astype(np.float32))
    return np.divide(rows, lengths).astype(np.float32)


def to_float16(rows: FloatRows) -> NDArray[np.float16]:
    """The nearest float16s. Raises BadRequest for an element beyond the range, whose nearest would be infinity."""
    with np.errstate(over="ignore", under="ignore"):
        halves = rows.astype(np.float16)
    # By its bits: an eighth of the time of np.isinf.
    if (halves.view(np.uint16) & _FLOAT16_INFINITY).max() == _FLOAT16_INFINITY:
        raise BadRequest("float16 ends at 65504, and a vector has an element beyond that; ask for float32 or bfloat16")
    return halves


def to_bfloat16(rows: FloatRows) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16s, and of the even one where two are equally near: the upper half of a float32,
    to which just less than half of the last bit is added before, and one more where that bit is set. Raises BadRequest
    for an element whose nearest would be infinity."""
    bits = rows.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    if (rounded & _BFLOAT16_INFINITY).max() == _BFLOAT16_INFINITY:
        raise BadRequest("a vector has an element that is greater than any bfloat16; ask for float32")
    return rounded


def from_bfloat16(bits: NDArray[np.uint16]) -> FloatRows:
    """The float32s with the same values."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Ranges(NamedTuple):
    """For each element, where its 256 steps begin, and their width: float32 [D] each. Source of the formula:
    sentence-transformers' `quantize_embeddings`, to the bit."""

    starts: FloatRows
    widths: FloatRows

    @classmethod
    def between(cls, least: FloatRows, greatest: FloatRows) -> "Ranges":
        return cls(least, (greatest - least) / np.float32(_NUM_STEPS))

    def to_uint8(self, rows: FloatRows) -> NDArray[np.uint8]:
        steps = np.subtract(rows, self.starts)
        with np.errstate(over="ignore"):  # infinity is clipped
            steps /= self.widths
        np.floor(steps, out=steps)
        return np.clip(steps, 0, _NUM_STEPS, out=steps).astype(np.uint8)

    def to_int8(self, rows: FloatRows) -> NDArray[np.int8]:
        return _less_128(self.to_uint8(rows))


WHOLE_NUMBERS = Ranges.between(np.full(1, -128, np.float32), np.full(1, 127, np.float32))
"""Of any number of them: an int8 is the number itself."""


@lru_cache(maxsize=8)
def default_ranges(dim: int) -> Ranges:
    """Of vectors of length 1, whatever the model: -c to c, c = min(1, 32 / sqrt(dim)). An int8 is its element times
    127 / c, rounded, and zero is zero. sentence-transformers gives the same codes with them: it rounds down, so the
    steps begin half a step lower."""
    width = np.float32(min(1.0, _WIDEST / dim**0.5) / 127)
    least = np.full(dim, np.float32(-128.5) * width, dtype=np.float32)
    greatest = np.full(dim, np.float32(126.5) * width, dtype=np.float32)
    return Ranges.between(least, greatest)


class RangesError(ModelError):
    """The file of --quantization-ranges cannot be used. The message is one line."""

    def __init__(self, path: str, fault: str) -> None:
        super().__init__(f"--quantization-ranges: {original_of(path)}: {fault}")


def read_ranges(path: str, dim: int) -> Ranges:
    """The ranges in a NumPy file: float32 or float64 [2, dim], the least of each element and the greatest. Raises
    RangesError. Source of the layout: sentence-transformers' `ranges`."""
    if not Path(path).is_file():
        raise RangesError(path, "no such file")
    try:
        # Mapped, so that only the header is read of a file that has no ranges.
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, SyntaxError):
        raise RangesError(path, "is no NumPy file (.npy), or is cut off") from None
    if not isinstance(array, np.ndarray):
        array.close()
        raise RangesError(path, "must be a .npy file with one array, is an .npz")
    if array.dtype.newbyteorder("=") not in (np.float32, np.float64):
        raise RangesError(path, f"must be float32, is {array.dtype}")
    if array.shape != (2, dim):
        raise RangesError(path, f"must have the shape (2, {dim}), has {array.shape}")
    with np.errstate(over="ignore"):
        least, greatest = np.array(array, dtype=np.float32, order="C")
        ranges = Ranges.between(least, greatest)
    if not np.isfinite(least).all() or not np.isfinite(greatest).all():
        raise RangesError(path, "has values that are not finite")
    # Two numbers that are too near to each other, or too far apart, cannot be divided into 255 steps.
    bad = np.flatnonzero(~((least < greatest) & (ranges.widths > 0) & np.isfinite(ranges.widths)))
    if bad.size:
        fault = f"the least value must be below the greatest, is not at {bad.size} of {dim} dimensions"
        raise RangesError(path, f"{fault}, first at {bad[0]}")
    return ranges


def to_ubinary(rows: FloatRows) -> NDArray[np.uint8]:
    """A bit for each element, set where it is above zero, eight to a byte, the first in the highest: [n, D / 8]."""
    return np.packbits(rows > 0, axis=1)


def to_binary(rows: FloatRows) -> NDArray[np.int8]:
    """The bytes of `to_ubinary` less 128. Source: sentence-transformers' `quantize_embeddings`, and Cohere's and
    Voyage's."""
    return _less_128(to_ubinary(rows))


def _less_128(codes: NDArray[np.uint8]) -> NDArray[np.int8]:
    return np.bitwise_xor(codes, np.uint8(128), out=codes).view(np.int8)


# --- the steps of a form ----------------------------------------------------------------------------------------

_STORED = {
    Dtype.FLOAT32: "f4",
    Dtype.FLOAT16: "f2",
    Dtype.BFLOAT16: "u2",
    Dtype.INT8: "i1",
    Dtype.UINT8: "u1",
    Dtype.BINARY: "i1",
    Dtype.UBINARY: "u1",
}
"""NumPy's type of the same bytes."""
_CONVERT: dict[Dtype, Convert] = {
    Dtype.FLOAT16: to_float16,
    Dtype.BFLOAT16: to_bfloat16,
    Dtype.BINARY: to_binary,
    Dtype.UBINARY: to_ubinary,
}


def stored_dtype(form: Form) -> np.dtype[Any]:
    """NumPy's type of a form's elements, in the requested byte order; bfloat16 is stored as uint16."""
    return np.dtype((">" if form.is_big_endian else "<") + _STORED[form.dtype])


def preparation(request: EmbedRequest, model: ModelCard, form: Form) -> list[Convert]:
    """The steps from the model's rows to the float32 rows that the form is made of. Signs are those of what is not
    rounded."""
    steps: list[Convert] = [np.rint] if model.is_whole and form.dtype not in PACKED else []
    if request.dimensions is not None:
        steps.append(partial(shorten, dimensions=request.dimensions))
    # The means of late chunks never have it.
    has_length_1 = request.output.is_normalized_by(model) and request.dimensions is None and request.late is None
    if are_normalized(request, model) and not has_length_1:
        steps.append(normalize)
    return steps


def conversion(form: Form, width: int, ranges: Ranges | None = None) -> list[Convert]:
    """The steps from float32 rows [n, width] to rows of the form. `ranges` None: those of vectors of length 1."""
    steps: list[Convert] = []
    if form.dtype in WHOLE:
        ranges = ranges or default_ranges(width)
        steps.append(ranges.to_int8 if form.dtype is Dtype.INT8 else ranges.to_uint8)
    elif form.dtype in _CONVERT:
        steps.append(_CONVERT[form.dtype])
    match form.encoding:
        case Encoding.FLOAT if form.dtype is Dtype.FLOAT16:
            steps.append(lambda rows: rows.astype(np.float32))  # orjson writes its shortest number
        case Encoding.FLOAT if form.dtype is Dtype.BFLOAT16:
            steps.append(from_bfloat16)
        case Encoding.BASE64 if form.is_big_endian:
            in_order = stored_dtype(form)
            steps.append(lambda rows: rows.astype(in_order).view(np.uint8))
    return steps


_FLOAT32_BYTES = Form(Encoding.BYTES)


class Matrix(Make):
    __slots__ = ("_steps", "dim", "form", "rows")

    def __init__(self, num_rows: int, dim: int, form: Form = _FLOAT32_BYTES, steps: Sequence[Convert] = ()) -> None:
        """`steps`: from float32 rows to rows of the form's type."""
        width = dim // DIMS_PER_BYTE if form.dtype in PACKED else dim
        self.rows: Rows = np.empty((num_rows, width), dtype=stored_dtype(form))
        """In input order, as they are returned; bfloat16 as its bits."""
        self.dim = dim
        """The dimensions of the vectors; binary types have eight in an element."""
        self.form = form
        self._steps = steps

    @property
    def row_bytes(self) -> int:
        return int(self.rows.shape[1]) * self.rows.itemsize

    def put(self, index: int, rows: FloatRows, num_left: int) -> None:
        for convert in self._steps:
            rows = convert(rows)
        self.rows[index : index + len(rows)] = rows

    def view(self) -> memoryview:
        """Borrowed."""
        return self.rows.view(np.uint8).data.cast("B")

    def npy_header(self) -> bytes:
        """The header of a NumPy file, version 1.0."""
        header = BytesIO()
        npy_format.write_array_header_1_0(header, npy_format.header_data_from_array_1_0(self.rows))
        return header.getvalue()
