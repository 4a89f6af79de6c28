"""The result of a request: its rows, in the forms of its response, in whatever order its batches finish.

A row is borrowed from a slot during a `put`, and what is kept of it is a copy. Rows come in by one way:

    put_each(index, rows)           inputs index … index + n - 1 have one row each  ─┐
    put_chunk(index, row, weight)   a chunk's; with the last one the input has a row ┤
    put(index, rows, num_left)      the next rows of one input that has several     ─┴─► Make.put of each form ─► made

`_MAKE` has what is made of the rows of each output, and `Embedded.made` has it once all have come. Vectors become JSON,
or a matrix, in every form of the request. Other rows are kept as arrays, from which dialects write them: scores in one
matrix, sparse vectors in a list, those of tokens in a matrix for each input, once all rows of that have come. MaxSim
and late chunking use the rows of tokens as they come, and keep none.

A row that cannot be made fails its own request alone. A result that is over, for any reason, takes no more rows, and
what is still queued of its request never reaches a worker.

Measured for 128 × 1024 floats (`benchmarks/answers.py`): raw 0.02 ms, base64 0.13 ms, float JSON 3.1 ms. That is why
base64, the default of OpenAI's SDKs, matters, and why rows are encoded a few at a time.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import orjson
from numpy.typing import NDArray
from pybase64 import b64encode

from vecd.gateway.encoding.forms import (
    WHOLE_NUMBERS,
    Convert,
    Matrix,
    Rows,
    check_forms,
    conversion,
    preparation,
    read_ranges,
    width_of,
)
from vecd.gateway.encoding.labels import TOKENS_PER_STEP
from vecd.gateway.encoding.sparse import SparseRows
from vecd.gateway.encoding.streams import DroppedTokens, Hybrid, LateChunkRows, MaxSimRows, Whole
from vecd.gateway.errors import ApiError, ServerError
from vecd.gateway.request import (
    Dtype,
    Embedded,
    EmbedRequest,
    Encoding,
    FloatRows,
    Form,
    InputReport,
    Ints,
    Make,
    TokenizedInput,
)
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.model.card import ModelCard
from vecd.model.steps import TokenHead
from vecd.shm.output import Output

log = logging.getLogger("vecd.dispatch")

Pieces: TypeAlias = list[bytes | memoryview]

_FLOAT32, _VECTORS = Dtype.FLOAT32, Output.VECTORS  # Python 3.11 takes 0.1 µs to find a member of an enumeration
_FLOAT, _JSON = Encoding.FLOAT, (Encoding.FLOAT, Encoding.BASE64)
_BYTES_OF_A_FLOAT, _BYTES_OF_4 = 13, 6
"""In a response: as a JSON number with its comma, and as base64."""


class Result(Embedded):
    """`finished` resolves when every row has come, or raises the ApiError of the first failure."""

    __slots__ = ("_makes", "_means", "are_normalized", "finished", "num_missing")

    def __init__(self, num_inputs: int, makes: Sequence[Make], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(tuple([make.made for make in makes]))
        self.finished: asyncio.Future[None] = loop.create_future()
        self.num_missing = num_inputs
        """Inputs whose rows have not all come."""
        self.are_normalized = False
        self._makes = makes
        self._means: dict[int, _Mean] = {}
        """By input, of those whose chunks' rows have not all come."""

    @property
    def is_over(self) -> bool:
        """Whether it is complete, has failed, or was abandoned."""
        return self.finished.done()

    def put_each(self, index: int, rows: FloatRows) -> None:
        """Take the rows (float32 [n, D], borrowed until this returns) of inputs `index` … `index + n - 1`."""
        self._put(len(rows), index, rows, 0)

    def put(self, index: int, rows: FloatRows, num_left: int) -> None:
        """Take the next rows (float32 [n, width], C-contiguous, borrowed) of input `index`; `num_left` more follow."""
        self._put(0 if num_left else 1, index, rows, num_left)

    def _put(self, num_complete: int, index: int, rows: FloatRows, num_left: int) -> None:
        if self.finished.done():
            return
        try:
            for make in self._makes:
                make.put(index, rows, num_left)
        except Exception as error:
            self._fail_alone(error)
        else:
            self.num_missing -= num_complete
            if self.num_missing == 0:
                self.finished.set_result(None)

    def count(self, start: int, tokenized: list[TokenizedInput], *, wants_report: bool) -> None:
        """Count the inputs from `start` on, before their rows come. One that is in chunks has a row once those of all
        of its chunks have come: their mean, brought to length 1 where the request's vectors are."""
        for index, (_, num, is_truncated, source, chunks, _, offsets, _) in enumerate(tokenized, start):
            self.num_tokens += num
            if offsets is not None:
                self.offsets.append(offsets)
            self.num_truncated += is_truncated
            if chunks:
                self.num_chunked += 1
                self._means[index] = _Mean(len(chunks), is_normalized=self.are_normalized)
            self.sources.add(source)
            if wants_report:
                self.reports.append(InputReport(num, is_truncated, max(1, len(chunks)), source))

    def put_chunk(self, index: int, row: FloatRows, weight: int) -> None:
        """Take the row (float32 [D], borrowed) of a chunk of input `index`."""
        if self.finished.done():
            return
        try:
            mean = self._means[index].with_row(row, weight)
        except Exception as error:
            self._fail_alone(error)
        else:
            if mean is not None:
                del self._means[index]  # the sum is twice as large as the row
                self.put_each(index, mean)

    def _fail_alone(self, error: Exception) -> None:
        """The rows cannot have this form, or there is a fault."""
        if isinstance(error, ApiError):
            self.fail(error.with_traceback(None))  # its frames hold the rows
        else:
            log.error("the rows of a request cannot be encoded: %s", type(error).__name__, exc_info=error)
            self.fail(ServerError("The server failed on this request"))

    def fail(self, error: ApiError) -> None:
        if not self.finished.done():
            self.finished.set_exception(error)

    def abandon(self) -> None:
        """The client has disconnected, or the deadline has passed."""
        self.finished.cancel()


class _Mean:
    """Of the rows of an input's chunks. Source of the mean, and of its weights: LangChain's `OpenAIEmbeddings`, which
    does the same for servers that accept no long texts."""

    __slots__ = ("_is_normalized", "_num_missing", "_sum", "_total_weight")

    def __init__(self, num_chunks: int, *, is_normalized: bool) -> None:
        self._num_missing = num_chunks
        self._sum: NDArray[np.float64] | None = None
        self._total_weight = 0
        self._is_normalized = is_normalized

    def with_row(self, row: FloatRows, weight: int) -> FloatRows | None:
        """With the last chunk's row, the mean: float32 [1, D]."""
        weighted = row.astype(np.float64) * weight
        self._sum = weighted if self._sum is None else self._sum + weighted
        self._total_weight += weight
        self._num_missing -= 1
        if self._num_missing:
            return None
        mean = self._sum / max(1, self._total_weight)
        if self._is_normalized and (norm := float(np.linalg.norm(mean))) > 0:
            mean /= norm
        return mean.astype(np.float32)[None]


# --- JSON -------------------------------------------------------------------------------------------------------


def encode_float(rows: Rows) -> list[bytes]:
    """JSON arrays of numbers, each the shortest that parses as the same float32, or an integer. `rows` are [n, D]."""
    # Copies, in 0.2 µs: orjson's own bytes leave holes behind them, which take two thirds as much again.
    return [bytes(memoryview(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY))) for row in rows]


def encode_base64(rows: Rows) -> list[bytes]:
    """JSON strings: standard base64, padded, of each row's bytes. `rows` are [n, D], C-contiguous."""
    return [b'"%b"' % b64encode(row) for row in rows]


class JsonRows(Make):
    """A fragment of JSON for each vector."""

    __slots__ = ("_encode", "_steps", "made")

    def __init__(self, num_inputs: int, encoding: Encoding = Encoding.FLOAT, steps: Sequence[Convert] = ()) -> None:
        """`encoding` is FLOAT or BASE64. `steps`: from float32 rows to the returned rows."""
        self.made: list[bytes] = [b""] * num_inputs
        """In input order."""
        self._encode = encode_float if encoding is _FLOAT else encode_base64
        self._steps = steps

    def put(self, index: int, rows: FloatRows, num_left: int) -> None:
        for convert in self._steps:
            rows = convert(rows)
        self.made[index : index + len(rows)] = self._encode(rows)


# --- the table --------------------------------------------------------------------------------------------------


class _Order(NamedTuple):
    """What is to be made."""

    card: ModelCard
    request: EmbedRequest
    token_ids: list[Ints]
    keep: Callable[[int], None]

    @property
    def head(self) -> TokenHead:
        assert self.card.tokens is not None
        return self.card.tokens

    def whole(self, made: Any, take: Callable[[int, FloatRows], None]) -> Whole:
        return Whole(self.request.output.width_of(self.card), self.token_ids, made, take)

    def matrices(self, width: int) -> list[FloatRows]:
        """One for each input, without rows."""
        return [np.empty((0, width), dtype=np.float32)] * len(self.request.inputs)

    def sparse(self) -> SparseRows:
        ignored_ids = () if self.card.sparse is None else self.card.sparse.ignored_ids
        return SparseRows(len(self.request.inputs), self.request.sparse, self.token_ids, ignored_ids)


def _all_tokens(order: _Order) -> Make:
    matrices = order.matrices(order.request.output.width_of(order.card))
    return order.whole(matrices, matrices.__setitem__)


def _lexical(order: _Order) -> Make:
    sparse = order.sparse()
    return order.whole(sparse.made, sparse.put_whole)


def _token_vectors(order: _Order) -> Make:
    if order.request.is_max_sim:
        return MaxSimRows(order.request, order.head, order.card.token_dim, order.token_ids, order.keep)
    matrices = order.matrices(order.card.token_dim)
    dropped = DroppedTokens(order.head, order.request, order.token_ids)
    return order.whole(matrices, partial(dropped.keep, matrices))


def _hybrid(order: _Order) -> Make:
    dim, sparse = order.card.dim, order.sparse()
    dropped = DroppedTokens(order.head, order.request, order.token_ids, drops_first=True)
    made = Hybrid(np.empty((len(sparse.made), dim), np.float32), sparse.made, order.matrices(order.card.token_dim))

    def take(index: int, rows: FloatRows) -> None:
        """`rows` are [T, token_dim + 1], and the first one has the model's vector in its token's place."""
        made.dense[index] = rows[0, :dim]
        sparse.put_whole(index, rows[:, -1:])
        dropped.keep(made.tokens, index, rows[:, :-1])

    return order.whole(made, take)


_MAKE: Mapping[Output, Callable[[_Order], Make]] = {
    Output.SCORES: lambda order: Matrix(len(order.request.inputs), order.card.num_labels),
    Output.SPARSE: _Order.sparse,
    Output.LEXICAL: _lexical,
    Output.TOKENS: _all_tokens,
    Output.TOKEN_SCORES: _all_tokens,
    Output.TOKEN_VECTORS: _token_vectors,
    Output.HYBRID: _hybrid,
}
"""Of outputs that are kept as arrays. All others are vectors, made in the request's forms."""


class Encoder:
    """Makes what the requests for one model are answered with."""

    def __init__(self, card: ModelCard, ranges_path: str | None = None, tokenizer: Tokenizer | None = None) -> None:
        """`ranges_path`: see `vecd.gateway.config.GatewayConfig.ranges`. `tokenizer`: for late chunks. Raises
        RangesError for a file that has no ranges for this model."""
        self._card = card
        self._is_normalized = card.is_normalized
        self._ranges = None if ranges_path is None else read_ranges(ranges_path, card.dim)
        self.tokenizer = tokenizer

    def makes(
        self,
        request: EmbedRequest,
        token_ids: list[Ints],
        keep: Callable[[int], None] = lambda num_floats: None,
    ) -> tuple[Make, ...]:
        """One for each of the request's forms; of an output whose rows are kept as arrays, one. `token_ids` gets those
        of each input, shape [T], where an input has several rows. `keep`: as in `MaxSimRows`. Raises BadRequest where
        `check_forms` would."""
        card = self._card
        if card.truncate_dim and request.dimensions is None and request.output.is_plain:
            request = request._replace(dimensions=card.truncate_dim)
        if self._takes_rows_unchanged(request):  # most requests: the general case takes 7 µs
            return (_of_each(request.forms[0], len(request.inputs), card.dim),)
        if (make := _MAKE.get(request.output)) is not None:
            return (make(_Order(card, request, token_ids, keep)),)
        check_forms(request, card, has_ranges=self._ranges is not None)
        width = width_of(request, card)
        ranges = self._ranges or (WHOLE_NUMBERS if card.is_whole and not request.normalize else None)
        forms = [
            (each, (*preparation(request, card, each), *conversion(each, width, ranges))) for each in request.forms
        ]
        if request.late is None:
            return tuple(_of_each(form, len(request.inputs), width, steps) for form, steps in forms)
        [(form, steps)] = forms
        assert self.tokenizer is not None
        encode = partial(_fragments, encoding=form.encoding, steps=steps)
        return (LateChunkRows(request, self.tokenizer, card.hidden_size, encode),)

    def response_bytes(self, request: EmbedRequest, num_tokens: int) -> int:
        """The most bytes that a response of vectors has; 0 for one of anything else, which is counted when it is made.
        `num_tokens`: of all inputs."""
        if request.output.is_plain and request.late is None:
            num_rows = len(request.inputs)
        elif request.output is Output.TOKEN_VECTORS and not request.is_max_sim:
            num_rows = num_tokens
        else:
            return 0
        per_float = sum(_BYTES_OF_A_FLOAT if form.encoding is _FLOAT else _BYTES_OF_4 for form in request.forms)
        return num_rows * (request.dimensions or request.output.width_of(self._card)) * per_float

    def _takes_rows_unchanged(self, request: EmbedRequest) -> bool:
        """Whether it requests one form of the model's own vectors, as float32."""
        form = request.forms[0]
        return (
            len(request.forms) == 1
            and form.dtype is _FLOAT32
            and not form.is_big_endian
            and request.dimensions is None
            and request.output is _VECTORS
            and request.late is None
            and (self._is_normalized or not (request.normalize or self._card.is_whole))
        )


def _of_each(form: Form, num_inputs: int, dim: int, steps: Sequence[Convert] = ()) -> Make:
    if form.encoding in _JSON:
        return JsonRows(num_inputs, form.encoding, steps)
    return Matrix(num_inputs, dim, form, steps)


def _fragments(rows: FloatRows, encoding: Encoding, steps: Sequence[Convert]) -> list[bytes]:
    make = JsonRows(len(rows), encoding, steps)
    make.put(0, rows, 0)
    return make.made


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
    before, between, end = (b"[", b",", b"]") if form.encoding is _FLOAT else (b'"', b"", b'"')
    width = matrix.shape[1]
    most = min(TOKENS_PER_STEP, _FLOATS_PER_PIECE // width)
    steps = (*steps, *conversion(form, width))
    for some in runs_of(matrix, most // 3 * 3 or 3):  # base64 has no padding behind a multiple of 3 bytes
        rows = np.ascontiguousarray(some)
        for convert in steps:
            rows = convert(rows)
        yield before + (b",".join(encode_float(rows)) if form.encoding is _FLOAT else b64encode(rows.tobytes()))
        before = between
    yield end if len(matrix) else before + end
