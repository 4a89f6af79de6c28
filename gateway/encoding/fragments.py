"""Collect a request's rows in the forms of its response.

Owns the copies: a row is borrowed from the arena during a `put`, and what is kept does not refer to it. Knows no
dialect: the dialect writes the rest of the response. Made by `vecd.gateway.pipeline`, filled by
`vecd.gateway.encoding.pending.PendingResult` as batches finish. The formulas are
`vecd.gateway.encoding.quantization`'s.

Measured for 128 × 1024 floats (`benchmarks/answers.py`): raw 0.02 ms, base64 0.13 ms, float JSON 3.1 ms. That is why
base64, the default of OpenAI's SDKs, matters, and why rows are encoded a few at a time
(`vecd.gateway.dispatch.dispatcher`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from typing import Any, TypeAlias

import numpy as np
import orjson
from numpy.lib import format as npy_format
from numpy.typing import NDArray
from pybase64 import b64encode

from vecd.gateway.encoding.forms import DIMS_PER_BYTE, PACKED, are_normalized, check_forms, width_of
from vecd.gateway.encoding.hybrid import HybridRows
from vecd.gateway.encoding.late_rows import LateChunkRows
from vecd.gateway.encoding.max_sim import MaxSimRows
from vecd.gateway.encoding.quantization import (
    Ranges,
    default_ranges,
    from_bfloat16,
    normalize,
    read_ranges,
    shorten,
    to_bfloat16,
    to_binary,
    to_float16,
    to_ubinary,
)
from vecd.gateway.encoding.scores import ScoreRows
from vecd.gateway.encoding.sparse import SparseRows
from vecd.gateway.encoding.token_rows import DroppedTokens, TokenRows
from vecd.gateway.tokenization.late_chunks import LateChunks
from vecd.gateway.types.request import Collector, Dtype, EmbedRequest, Encoding, Form
from vecd.shm.card import ModelCard
from vecd.shm.output import Output

Rows: TypeAlias = NDArray[Any]
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

_FORMLESS = frozenset(
    (Output.SCORES, Output.TOKEN_SCORES, Output.SPARSE, Output.TOKEN_VECTORS, Output.LEXICAL, Output.HYBRID)
)
"""Outputs whose rows are kept as arrays, from which dialects write them."""


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


class JsonRows:
    """A fragment of JSON for each input: of its vector; or for its tokens a list of lists, or base64 of their rows end
    to end."""

    __slots__ = ("_encode", "_parts", "_steps", "fragments")

    def __init__(self, num_inputs: int, encoding: Encoding = Encoding.FLOAT, steps: Sequence[Convert] = ()) -> None:
        """`encoding` is FLOAT or BASE64. `steps`: from float32 rows to the returned rows."""
        self.fragments: list[bytes | memoryview] = [b""] * num_inputs
        """In input order."""
        self._encode = encode_float if encoding is _FLOAT else encode_base64
        self._steps = steps
        self._parts: dict[int, tuple[bytearray, bytes]] = {}
        """By input, for those with some of their tokens delivered: what is written, which is megabytes for a long text
        and never copied, and bytes that make no 4 characters of base64 yet."""

    def put(self, index: int, rows: NDArray[np.float32]) -> None:
        """`rows` are C-contiguous."""
        for convert in self._steps:
            rows = convert(rows)
        self.fragments[index : index + len(rows)] = self._encode(rows)

    def put_tokens(self, index: int, rows: NDArray[np.float32], num_left: int) -> None:
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


class Matrix:
    """The rows themselves."""

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

    def put(self, index: int, rows: NDArray[np.float32]) -> None:
        for convert in self._steps:
            rows = convert(rows)
        self.rows[index : index + len(rows)] = rows

    def put_tokens(self, index: int, rows: NDArray[np.float32], num_left: int) -> None:
        raise ValueError("rows of tokens make no matrix")  # check_forms has accepted it

    def view(self) -> memoryview:
        """The bytes of all rows, borrowed."""
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
        """`ranges_path`: see `vecd.gateway.types.config.GatewayConfig.quantization_ranges`. Raises RangesError for a
        file that has no ranges for this model."""
        self._card = card
        self._is_normalized = card.is_normalized
        self._ranges = None if ranges_path is None else read_ranges(ranges_path, card.dim)

    def make_collectors(
        self,
        request: EmbedRequest,
        token_ids: Sequence[NDArray[np.int32]] = (),
        late_chunks: Sequence[LateChunks] = (),
    ) -> tuple[Collector, ...]:
        """A collector for each of the request's forms; of an output whose rows are kept as arrays, one. `token_ids` of
        each input, shape [T], are read when its rows have come; only for outputs that have a row for each token. So are
        `late_chunks`, if the request is for them: then rows of TOKENS are collected, for vectors of its output. Raises
        BadRequest where `check_forms` would."""
        if self._card.truncate_dim and request.dimensions is None and request.output.is_plain:
            request = request._replace(dimensions=self._card.truncate_dim)
        if self._takes_rows_unchanged(request):  # most requests: the general case takes 7 µs
            return (_collector(request.forms[0], len(request.inputs), self._card.dim),)
        if request.output in _FORMLESS:
            return (self._make_formless(request, token_ids),)
        check_forms(request, self._card, has_ranges=self._ranges is not None)
        if request.late is not None:
            return (self._make_late(request, late_chunks),)
        prepare = self._preparation(request)
        width = width_of(request, self._card)
        return tuple(
            _collector(form, len(request.inputs), width, (*prepare, *conversion(form, width, self._ranges)))
            for form in request.forms
        )

    def _make_late(self, request: EmbedRequest, late_chunks: Sequence[LateChunks]) -> LateChunkRows:
        [form] = request.forms
        steps: list[Convert] = []
        if request.dimensions is not None:
            steps.append(partial(shorten, dimensions=request.dimensions))
        if are_normalized(request, self._card):
            steps.append(normalize)
        steps += conversion(form, width_of(request, self._card), self._ranges)

        def encode(vectors: NDArray[np.float32]) -> list[bytes]:
            rows = JsonRows(len(vectors), form.encoding, steps)
            rows.put(0, vectors)
            return list(map(bytes, rows.fragments))

        return LateChunkRows(late_chunks, self._card.hidden_size, encode)

    def _make_formless(self, request: EmbedRequest, token_ids: Sequence[NDArray[np.int32]]) -> Collector:
        num_inputs, card = len(request.inputs), self._card
        match request.output:
            case Output.SCORES:
                return ScoreRows(num_inputs, card.num_labels)
            case Output.TOKEN_SCORES:
                return TokenRows(num_inputs, card.num_labels)
            case Output.SPARSE:
                return SparseRows(num_inputs, request.sparse)
            case Output.LEXICAL:
                return self._lexical_rows(request, token_ids)
            case Output.TOKEN_VECTORS if request.is_max_sim:
                return self._max_sims(request, token_ids)
            case Output.TOKEN_VECTORS:
                return self._token_vectors(request, token_ids)
            case output:
                assert output is Output.HYBRID
                tokens = self._token_vectors(request, token_ids, drops_first=True)
                return HybridRows(num_inputs, card.dim, self._lexical_rows(request, token_ids), tokens)

    def _lexical_rows(self, request: EmbedRequest, token_ids: Sequence[NDArray[np.int32]]) -> SparseRows:
        assert self._card.sparse is not None
        return SparseRows(len(request.inputs), request.sparse, token_ids, self._card.sparse.ignored_ids)

    def _token_vectors(
        self, request: EmbedRequest, token_ids: Sequence[NDArray[np.int32]], *, drops_first: bool = False
    ) -> TokenRows:
        dropped = self._dropped_tokens(request, token_ids, drops_first=drops_first)
        return TokenRows(len(request.inputs), self._card.token_dim, dropped)

    def _max_sims(self, request: EmbedRequest, token_ids: Sequence[NDArray[np.int32]]) -> MaxSimRows:
        assert self._card.tokens is not None
        return MaxSimRows(
            len(request.inputs),
            request.tokenizing.num_queries,
            self._dropped_tokens(request, token_ids),
            is_mean=self._card.tokens.is_mean,
        )

    def _dropped_tokens(
        self, request: EmbedRequest, token_ids: Sequence[NDArray[np.int32]], *, drops_first: bool = False
    ) -> DroppedTokens:
        assert self._card.tokens is not None
        return DroppedTokens(self._card.tokens, request, token_ids, drops_first=drops_first)

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
        has_length_1 = request.output.is_normalized_by(self._card) and not steps
        if are_normalized(request, self._card) and not has_length_1:
            steps.append(normalize)
        return steps


def conversion(form: Form, width: int, ranges: Ranges | None = None) -> list[Convert]:
    """The steps from float32 rows [n, width] to rows of the form. `ranges` None: those of vectors of length 1."""
    steps: list[Convert] = []
    match form.dtype:
        case Dtype.FLOAT16:
            steps.append(to_float16)
        case Dtype.BFLOAT16:
            steps.append(to_bfloat16)
        case Dtype.INT8:
            steps.append((ranges or default_ranges(width)).to_int8)
        case Dtype.UINT8:
            steps.append((ranges or default_ranges(width)).to_uint8)
        case Dtype.BINARY:
            steps.append(to_binary)
        case Dtype.UBINARY:
            steps.append(to_ubinary)
    match form.encoding:
        case Encoding.FLOAT if form.dtype is Dtype.FLOAT16:
            steps.append(_as_float32)  # orjson writes its shortest number
        case Encoding.FLOAT if form.dtype is Dtype.BFLOAT16:
            steps.append(from_bfloat16)
        case Encoding.BASE64 if form.is_big_endian:
            steps.append(partial(_as_bytes, dtype=stored_dtype(form)))
    return steps


def _collector(form: Form, num_inputs: int, dim: int, steps: Sequence[Convert] = ()) -> JsonRows | Matrix:
    if form.encoding in _JSON:
        return JsonRows(num_inputs, form.encoding, steps)
    return Matrix(num_inputs, dim, form, steps)


def _as_bytes(rows: Rows, dtype: np.dtype[Any]) -> Rows:
    """The bytes of the rows, as uint8, in the byte order of `dtype`."""
    return rows.astype(dtype).view(np.uint8)


def _as_float32(rows: NDArray[np.float16]) -> Rows:
    return rows.astype(np.float32)
