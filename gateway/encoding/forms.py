"""Check, before anything is computed, that a request's vectors can be returned in the forms it requests.

Owns those rules and their messages. Converts nothing. Called by dialects, and by `vecd.gateway.encoding.fragments`.
"""

from typing import NamedTuple

from vecd.gateway.types.errors import BadRequest
from vecd.gateway.types.request import Dtype, EmbedRequest, Encoding, Form
from vecd.shm.output import ModelSizes, Output

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


def check_forms(request: EmbedRequest, model: ModelSizes, names: Names = DEFAULT_NAMES, *, has_ranges: bool) -> None:
    """Raise BadRequest, which names the field by `names`, for a form that the request's vectors cannot have.

    `has_ranges`: the server has ranges for integer types (`--quantization-ranges`).
    """
    dimensions = request.dimensions
    width = request.output.width_of(model)
    if request.output.is_per_token and dimensions is not None and dimensions > width:
        raise BadRequest(
            f"'{names.dimensions}' must be 1 to {width} for vectors of tokens, is {dimensions}",
            param=names.dimensions,
        )
    for form in request.forms:
        _check_form(form, request, model, has_ranges, names)


def _check_form(form: Form, request: EmbedRequest, model: ModelSizes, has_ranges: bool, names: Names) -> None:
    if request.output in _SCORES:
        _check_scores(form, names)
    elif request.output.is_per_token and form.encoding in (Encoding.BYTES, Encoding.NPY):
        raise BadRequest(
            f"'{names.encoding}' must be 'float' or 'base64' for vectors of tokens, is '{form.encoding.value}': inputs "
            "have not the same number of them",
            param=names.encoding,
        )
    if form.encoding is Encoding.NPY and form.dtype is Dtype.BFLOAT16:
        raise BadRequest(
            f"'{names.encoding}' is 'npy', but NumPy has no bfloat16; ask for bytes, or for float16 or float32",
            param=names.encoding,
        )
    if form.dtype in PACKED and (num_dims := width_of(request, model)) % DIMS_PER_BYTE:
        param = names.dtype if request.dimensions is None else names.dimensions
        raise BadRequest(
            f"'{param}': {form.dtype.value} needs a number of dimensions that is a multiple of {DIMS_PER_BYTE}; there "
            f"are {num_dims}",
            param=param,
        )
    if form.dtype in WHOLE:
        _check_scale(form, request, model, has_ranges, names)


def _check_scores(form: Form, names: Names) -> None:
    if form.encoding not in (Encoding.FLOAT, Encoding.BASE64):
        raise BadRequest(
            f"'{names.encoding}' must be 'float' or 'base64' for scores, is '{form.encoding.value}'",
            param=names.encoding,
        )
    if form.dtype in WHOLE | PACKED:
        raise BadRequest(
            f"'{names.dtype}': {form.dtype.value} is for vectors; scores are float32, float16 or bfloat16",
            param=names.dtype,
        )


def _check_scale(form: Form, request: EmbedRequest, model: ModelSizes, has_ranges: bool, names: Names) -> None:
    """Check that the quantization ranges fit the vectors."""
    name = form.dtype.value
    if not has_ranges:
        if not are_normalized(request, model):
            raise BadRequest(
                f"'{names.dtype}': {name} is for vectors of length 1, and these are not, unless the request asks for "
                "it, or the server was started with --quantization-ranges",
                param=names.dtype,
            )
        return
    if request.dimensions is not None:
        raise BadRequest(
            f"'{names.dimensions}' is {request.dimensions}, but for {name} this server has ranges of whole vectors, "
            f"which have {model.dim} (--quantization-ranges)",
            param=names.dimensions,
        )
    if request.output.is_per_token or are_normalized(request, model) != model.is_normalized:
        raise BadRequest(
            f"'{names.dtype}': for {name} this server has ranges of the model's own vectors, as sentence-transformers "
            "gives them, and others were asked for (--quantization-ranges)",
            param=names.dtype,
        )


def width_of(request: EmbedRequest, model: ModelSizes) -> int:
    """The dimensions of each returned row."""
    if request.dimensions is not None:
        return request.dimensions
    return request.output.width_of(model)


def are_normalized(request: EmbedRequest, model: ModelSizes) -> bool:
    """Whether the returned rows, as float32, have length 1."""
    return request.normalize or request.output.is_normalized_by(model)
