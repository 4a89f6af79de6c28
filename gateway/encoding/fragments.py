"""Collect a request's rows in the forms of its response, and write rows that were collected as arrays.

A row is borrowed from the arena during a `put`, and what is kept does not refer to it. The dialect writes the rest of
the response. Measured for 128 × 1024 floats (`benchmarks/answers.py`): raw 0.02 ms, base64 0.13 ms, float JSON 3.1 ms.
That is why base64, the default of OpenAI's SDKs, matters, and why rows are encoded a few at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from io import BytesIO
from typing import Any, TypeAlias

import numpy as np
import orjson
from numpy.lib import format as npy_format
from numpy.typing import NDArray
from pybase64 import b64encode

from vecd.gateway.encoding.forms import (
    DIMS_PER_BYTE,
    PACKED,
    WHOLE,
    HybridRows,
    Ranges,
    are_normalized,
    check_forms,
    default_ranges,
    from_bfloat16,
    normalize,
    read_ranges,
    shorten,
    to_bfloat16,
    to_binary,
    to_float16,
    to_ubinary,
    width_of,
)
from vecd.gateway.encoding.labels import TOKENS_PER_STEP
from vecd.gateway.encoding.result import DroppedTokens, FloatRows, Ints, LateChunkRows, MaxSimRows, ScoreRows, TokenRows
from vecd.gateway.encoding.sparse import SparseRows
from vecd.gateway.request import Collector, Dtype, EmbedRequest, Encoding, Form
from vecd.gateway.tokenization.late_chunks import LateChunks
from vecd.model.card import ModelCard
from vecd.shm.output import Output

Rows: TypeAlias = NDArray[Any]
Pieces: TypeAlias = list[bytes | memoryview]
Convert: TypeAlias = Callable[[Any], Rows]
"""Rows [n, D] to other rows, C-contiguous and new."""

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
_FLOAT32, _VECTORS = Dtype.FLOAT32, Output.VECTORS  # Python 3.11 takes 0.1 µs to find a member of an enumeration
_FLOAT, _JSON = Encoding.FLOAT, (Encoding.FLOAT, Encoding.BASE64)

_CONVERT: dict[Dtype, Convert] = {
    Dtype.FLOAT16: to_float16,
    Dtype.BFLOAT16: to_bfloat16,
    Dtype.BINARY: to_binary,
    Dtype.UBINARY: to_ubinary,
}


def stored_dtype(form: Form) -> np.dtype[Any]:
    """NumPy's type of a form's elements, in the requested byte order; bfloat16 is stored as uint16."""
    return np.dtype((">" if form.is_big_endian else "<") + _STORED[form.dtype])


# --- writing ----------------------------------------------------------------------------------------------------


def encode_float(rows: Rows) -> list[bytes]:
    """JSON arrays of numbers, each the shortest that parses as the same float32, or an integer. `rows` are [n, D]."""
    # Copies, in 0.2 µs: orjson's own bytes leave holes behind them, which take two thirds as much again.
    return [bytes(memoryview(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY))) for row in rows]


def encode_base64(rows: Rows) -> list[bytes]:
    """JSON strings: standard base64, padded, of each row's bytes. `rows` are [n, D], C-contiguous."""
    return [b'"%b"' % b64encode(row) for row in rows]


class JsonRows(Collector):
    """A fragment of JSON for each input: of its vector; or for its tokens a list of lists, or base64 of their rows end
    to end."""

    __slots__ = ("_encode", "_parts", "_steps", "fragments")

    def __init__(self, num_inputs: int, encoding: Encoding = Encoding.FLOAT, steps: Sequence[Convert] = ()) -> None:
        """`encoding` is FLOAT or BASE64. `steps`: from float32 rows to the returned rows."""
        self.fragments: Pieces = [b""] * num_inputs
        """In input order."""
        self._encode = encode_float if encoding is _FLOAT else encode_base64
        self._steps = steps
        self._parts: dict[int, tuple[bytearray, bytes]] = {}
        """By input, for those with some of their tokens delivered: what is written, which is megabytes for a long text
        and never copied, and bytes that make no 4 characters of base64 yet."""

    def put(self, index: int, rows: FloatRows) -> None:
        """`rows` are C-contiguous."""
        for convert in self._steps:
            rows = convert(rows)
        self.fragments[index : index + len(rows)] = self._encode(rows)

    def put_tokens(self, index: int, rows: FloatRows, num_left: int) -> None:
        """`rows` are C-contiguous, and the next ones of input `index`; `num_left` more will follow."""
        for convert in self._steps:
            rows = convert(rows)
        written, rest = self._parts.pop(index, (bytearray(), b""))
        if self._encode is encode_float:
            written += (b"," if written else b"[") + b",".join(encode_float(rows)) + (b"" if num_left else b"]")
        else:
            rest += rows.tobytes()
            end = len(rest) // 3 * 3 if num_left else len(rest)
            written += (b"" if written else b'"') + b64encode(rest[:end]) + (b"" if num_left else b'"')
            rest = rest[end:]
        if num_left:
            self._parts[index] = written, rest
        else:
            self.fragments[index] = memoryview(written)


_FLOAT32_BYTES = Form(Encoding.BYTES)


class Matrix(Collector):
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

    def put(self, index: int, rows: FloatRows) -> None:
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


# --- making -----------------------------------------------------------------------------------------------------


class Encoder:
    """Makes the collectors of requests for one model."""

    def __init__(self, card: ModelCard, ranges_path: str | None = None) -> None:
        """`ranges_path`: see `vecd.gateway.config.GatewayConfig.ranges`. Raises RangesError for a
        file that has no ranges for this model."""
        self._card = card
        self._is_normalized = card.is_normalized
        self._ranges = None if ranges_path is None else read_ranges(ranges_path, card.dim)

    def make_collectors(
        self,
        request: EmbedRequest,
        token_ids: Sequence[Ints] = (),
        late_chunks: Sequence[LateChunks] = (),
    ) -> tuple[Collector, ...]:
        """A collector for each of the request's forms; of an output whose rows are kept as arrays, one. `token_ids`
        (shape [T]) and `late_chunks` of each input, where the output or the request needs them, are read when its rows
        have come. Raises BadRequest where `check_forms` would."""
        if self._card.truncate_dim and request.dimensions is None and request.output.is_plain:
            request = request._replace(dimensions=self._card.truncate_dim)
        if self._takes_rows_unchanged(request):  # most requests: the general case takes 7 µs
            return (_collector(request.forms[0], len(request.inputs), self._card.dim),)
        if (formless := self._make_formless(request, token_ids)) is not None:
            return (formless,)
        check_forms(request, self._card, has_ranges=self._ranges is not None)
        prepare, width = self._preparation(request), width_of(request, self._card)
        forms = [(form, (*prepare, *conversion(form, width, self._ranges))) for form in request.forms]
        if request.late is not None:
            [(form, steps)] = forms
            encode = partial(_fragments, encoding=form.encoding, steps=steps)
            return (LateChunkRows(late_chunks, self._card.hidden_size, encode),)
        return tuple(_collector(form, len(request.inputs), width, steps) for form, steps in forms)

    def _make_formless(self, request: EmbedRequest, token_ids: Sequence[Ints]) -> Collector | None:
        """The collector of an output whose rows are kept as arrays, from which dialects write them; None of others."""
        num_inputs, card, is_hybrid = len(request.inputs), self._card, request.output is Output.HYBRID
        match request.output:
            case Output.SCORES:
                return ScoreRows(num_inputs, card.num_labels)
            case Output.TOKEN_SCORES:
                return TokenRows(num_inputs, card.num_labels)
            case Output.SPARSE:
                return SparseRows(num_inputs, request.sparse)
            case Output.LEXICAL:
                return self._lexical_rows(request, token_ids)
            case Output.TOKEN_VECTORS | Output.HYBRID:
                assert card.tokens is not None
                dropped = DroppedTokens(card.tokens, request, token_ids, drops_first=is_hybrid)
                if request.is_max_sim and not is_hybrid:
                    num_queries = request.tokenizing.num_queries
                    return MaxSimRows(num_inputs, num_queries, dropped, is_mean=card.tokens.is_mean)
                tokens = TokenRows(num_inputs, card.token_dim, dropped)
                if not is_hybrid:
                    return tokens
                return HybridRows(num_inputs, card.dim, self._lexical_rows(request, token_ids), tokens)
            case _:
                return None

    def _lexical_rows(self, request: EmbedRequest, token_ids: Sequence[Ints]) -> SparseRows:
        assert self._card.sparse is not None
        return SparseRows(len(request.inputs), request.sparse, token_ids, self._card.sparse.ignored_ids)

    def _takes_rows_unchanged(self, request: EmbedRequest) -> bool:
        """Whether it requests one form of the model's own vectors, as float32."""
        return (
            len(request.forms) == 1
            and request.forms[0].dtype is _FLOAT32
            and not request.forms[0].is_big_endian
            and request.dimensions is None
            and request.output is _VECTORS
            and request.late is None
            and (self._is_normalized or not request.normalize)
        )

    def _preparation(self, request: EmbedRequest) -> list[Convert]:
        """The steps from the model's rows to the requested float32 rows."""
        steps: list[Convert] = []
        if request.dimensions is not None:
            steps.append(partial(shorten, dimensions=request.dimensions))
        # The means of late chunks never have it.
        has_length_1 = request.output.is_normalized_by(self._card) and not steps and request.late is None
        if are_normalized(request, self._card) and not has_length_1:
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


def _collector(form: Form, num_inputs: int, dim: int, steps: Sequence[Convert] = ()) -> JsonRows | Matrix:
    if form.encoding in _JSON:
        return JsonRows(num_inputs, form.encoding, steps)
    return Matrix(num_inputs, dim, form, steps)


def _fragments(rows: FloatRows, encoding: Encoding, steps: Sequence[Convert]) -> list[bytes]:
    made = JsonRows(len(rows), encoding, steps)
    made.put(0, rows)
    return list(map(bytes, made.fragments))


# --- rows that were collected as arrays -------------------------------------------------------------------------

_FLOATS_PER_PIECE = 32 * 1024
"""Of rows, 0.7 ms as JSON numbers."""


def runs_of(values: Any, most: int = TOKENS_PER_STEP) -> Iterator[Any]:
    """The values of a list or an array, a limited number at a time."""
    return (values[at : at + most] for at in range(0, len(values), most))


def list_pieces(runs: Iterable[Any], empty: bytes = b"[]") -> Iterator[bytes]:
    """The JSON list of the elements of all runs, a piece for each run; with `empty` b"{}" an object of all entries. A
    run may be empty."""
    before = empty[:1]
    for run in runs:
        yield before + orjson.dumps(run, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1] if len(run) else b""
        before = b"," if len(run) else before
    yield empty[1:] if before == b"," else empty


def vector_json(vector: FloatRows, form: Form, steps: Sequence[Convert] = ()) -> bytes:
    """The JSON of a vector, float32 [D]: a list of numbers, or base64. `steps`: what is done to it before that, as one
    row."""
    row = np.ascontiguousarray(vector[None])
    return _fragments(row, form.encoding, (*steps, *conversion(form, len(vector))))[0]


def matrix_pieces(matrix: FloatRows, form: Form, steps: Sequence[Convert] = ()) -> Iterator[bytes]:
    """The JSON of a matrix, float32 [n, D], some rows at a time: a list of lists, or base64 of the rows end to end.
    `steps`: as in `vector_json`, for all rows."""
    before, between, end = (b"[", b",", b"]") if form.encoding is Encoding.FLOAT else (b'"', b"", b'"')
    width = matrix.shape[1]
    most = min(TOKENS_PER_STEP, _FLOATS_PER_PIECE // width)
    for some in runs_of(matrix, most // 3 * 3 or 3):  # base64 has no padding behind a multiple of 3 bytes
        rows = JsonRows(1, form.encoding, (*steps, *conversion(form, width)))
        rows.put_tokens(0, np.ascontiguousarray(some), 0)
        yield before + bytes(rows.fragments[0][1:-1])
        before = between
    yield end if len(matrix) else before + end
