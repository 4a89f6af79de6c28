"""A request on its way through the gateway: what was asked (`EmbedRequest`), what waits (`Flow`), what has come back
(`Gathering`), what is answered (`Embedded`).

Owns the life of one request's sequences. Knows no HTTP, no JSON and no worker. Dialects make `EmbedRequest`s,
`gateway.app` makes `Gathering`s and `Flow`s, `gateway.scheduler` queues, `gateway.dispatch` delivers.
"""

import asyncio
from array import array
from collections import deque
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray

from gateway.errors import ApiError
from gateway.suspects import Deaths
from shm.wire import Output

if TYPE_CHECKING:
    from gateway.record import BatchShare
    from gateway.shares import Lane

TokenIds: TypeAlias = Union[list[int], "array[int]"]
"""Token ids as a caller sent them; large bodies' come as `array("i")`."""


class Encoding(Enum):
    """How a vector is written into an answer."""

    FLOAT = "float"
    """A JSON list of numbers, whole ones for whole types."""
    BASE64 = "base64"
    BYTES = "bytes"
    """The rows' bytes, no JSON around them."""
    NPY = "npy"
    """The same behind the header of a NumPy file."""


class Dtype(Enum):
    """The type of a vector's elements in an answer. `gateway.quantization` has the formulas."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    UINT8 = "uint8"
    BINARY = "binary"
    """Signs, eight to an int8."""
    UBINARY = "ubinary"
    """Signs, eight to a uint8."""


class Form(NamedTuple):
    """One form in which a request's vectors are answered."""

    encoding: Encoding = Encoding.FLOAT
    dtype: Dtype = Dtype.FLOAT32
    is_big_endian: bool = False
    """Of BASE64, BYTES and NPY."""


class Overflow(Enum):
    """What becomes of an input that is longer than the model takes."""

    ERROR = "error"
    TRUNCATE = "truncate"
    """Its beginning is kept."""
    TRUNCATE_LEFT = "truncate_left"
    """Its end is kept, behind the prompt."""
    CHUNK = "chunk"
    """Its chunks are embedded, and their vectors' mean, weighted by tokens, is answered."""


MAX_PROMPT_CHARS = 4096
"""Of a prompt that comes with a request. It is put before every input, of which there may be thousands."""


class Tokenizing(NamedTuple):
    """How a request's inputs become sequences."""

    prompt: str | None = None
    """Put before every text. None: the model's own default, which most have none of."""
    overflow: Overflow | None = None
    """None: the server's default."""
    max_tokens: int | None = None
    """Longest sequence, special tokens included, at most the server's; None: the server's."""
    add_special_tokens: bool = True
    """False: a text's own tokens alone, without the model's frame."""
    are_ids_of_model: bool = False
    """Lists of ids are the model's own, framed or not, unless the server has been told otherwise: in APIs whose callers
    have them from the same server, and know of no other vocabulary."""


class Priority(IntEnum):
    """How soon a request wants its answer, beside others. Lower goes first."""

    INTERACTIVE = 0
    NORMAL = 1
    BULK = 2


class EmbedRequest(NamedTuple):
    """What a caller asks, whatever the dialect it was asked in."""

    inputs: list[str] | list[TokenIds]
    """At least one; texts, or token ids."""
    forms: tuple[Form, ...] = (Form(),)
    """At least one: each is answered with all vectors."""
    priority: Priority | None = None
    """None: the server's default."""
    timeout_s: float | None = None
    """From the request's arrival to its answer; None: the server's default."""
    tokenizing: Tokenizing = Tokenizing()
    output: Output = Output.VECTORS
    normalize: bool = False
    """Bring the vectors to length 1, which most models' are already."""
    dimensions: int | None = None
    """So many of each vector's first, brought to length 1 again; None: all. Only of models made for it."""
    wants_report: bool = False
    """`Embedded.reports` are wanted."""


class Source(Enum):
    """What an input was taken for."""

    TEXT = "text"
    MODEL = "model"
    """Token ids of the model's own vocabulary."""
    CL100K = "cl100k"
    """Token ids of OpenAI's cl100k_base, decoded to text."""


class TokenizedInput(NamedTuple):
    token_ids: bytes
    """int32, little-endian, shape [num_tokens], special tokens included. Of an input in chunks: the first one's."""
    num_tokens: int
    """At least 1. Of an input in chunks: of all."""
    is_truncated: bool
    source: Source = Source.TEXT
    chunks: "tuple[Chunk, ...]" = ()
    """All of them, at least two; none where the input is one sequence."""


class Chunk(NamedTuple):
    token_ids: bytes
    """As those of a TokenizedInput."""
    num_tokens: int
    weight: int
    """Tokens of the text itself."""


class Token(NamedTuple):
    id: int
    text: str
    """As the vocabulary has it."""
    is_special: bool
    start: int | None
    """In UTF-8 bytes of the text, its prompt before it included; None for a token that is in no text."""
    stop: int | None


class Report(NamedTuple):
    """What became of one input."""

    num_tokens: int
    is_truncated: bool
    num_chunks: int
    """1 for an input that was not split."""
    source: Source


class Stages(NamedTuple):
    """How long a request took, in seconds, and where."""

    total_s: float
    """From its arrival to its last row."""
    tokenize_s: float
    """Until all was tokenized, beginning at the door; of a large request, a part of it was computed meanwhile."""
    queue_s: float
    """From then, or the first sequence's queueing, until the first of it went to a worker."""
    compute_s: float
    """From then to the last row."""


class Embedded(NamedTuple):
    """What came of a request."""

    collectors: "tuple[Collector, ...]"
    """The rows, in each of the request's forms."""
    num_tokens: int
    num_truncated: int
    """Inputs that were longer than the model takes, and were cut."""
    num_chunked: int
    """Inputs that were longer than the model takes, and were split."""
    sources: frozenset[Source]
    """What the inputs were taken for."""
    reports: tuple[Report, ...]
    """One for each input, if they were wanted."""
    num_chars: int
    """Of all texts, as they came."""
    stages: Stages


class Collector(Protocol):
    """Keeps a request's rows in the form in which they will be answered; made by `gateway.encoding`."""

    def put(self, index: int, rows: NDArray[np.float32]) -> None:
        """Take the rows (float32 [n, D], borrowed until this returns) of inputs `index` … `index + n - 1`."""

    def put_tokens(self, index: int, rows: NDArray[np.float32], num_left: int) -> None:
        """Take the next rows (float32 [n, H], C-contiguous, borrowed) of the tokens of input `index`; `num_left` more
        of it are to come."""


class TokenCollector(Protocol):
    """Keeps the tokens of texts in the form in which they will be answered; made by dialects."""

    def put(self, index: int, tokens: list[Token]) -> None:
        """Take the next tokens of text `index`: few enough to be written in a millisecond or two, in the order of
        texts, each of which comes up at least once. In a thread."""


class ChunkedInput:
    """The vectors of one input's chunks as they come, which become one.

    Source of the mean, and of its weights: LangChain's `OpenAIEmbeddings`, which does the same before a server that
    takes no long texts.
    """

    __slots__ = ("_num_missing", "_sum", "_total_weight", "is_normalized")

    def __init__(self, num_chunks: int, *, is_normalized: bool) -> None:
        """`is_normalized`: the mean is brought to length 1 again."""
        self._num_missing = num_chunks
        self._sum: NDArray[np.float64] | None = None
        self._total_weight = 0
        self.is_normalized = is_normalized

    def add(self, row: NDArray[np.float32], weight: int) -> NDArray[np.float32] | None:
        """Take a chunk's row (float32 [D], borrowed). With the last one, the input's: float32 [1, D]."""
        weighted = row.astype(np.float64) * weight
        self._sum = weighted if self._sum is None else self._sum + weighted
        self._total_weight += weight
        self._num_missing -= 1
        if self._num_missing:
            return None
        mean = self._sum / max(1, self._total_weight)
        if self.is_normalized and (norm := float(np.linalg.norm(mean))) > 0:
            mean /= norm
        return mean.astype(np.float32)[None]


class Gathering:
    """Collects the rows of one request, in whatever order its batches finish.

    `finished` resolves when every row is there, or raises the ApiError of the first that failed. Once it is done,
    for whatever reason, the sequences still queued are abandoned and never reach a worker.
    """

    __slots__ = ("_collectors", "finished", "num_missing")

    def __init__(self, num_inputs: int, collectors: tuple[Collector, ...], loop: asyncio.AbstractEventLoop) -> None:
        self.finished: asyncio.Future[None] = loop.create_future()
        self.num_missing = num_inputs
        """Inputs whose rows have not all been delivered."""
        self._collectors = collectors

    @property
    def is_over(self) -> bool:
        """Answered, failed, or given up by its caller."""
        return self.finished.done()

    def deliver(self, index: int, rows: NDArray[np.float32]) -> None:
        """Take the rows (float32 [n, D], borrowed until this returns) of inputs `index` … `index + n - 1`."""
        if self.is_over:
            return
        try:
            for collector in self._collectors:
                collector.put(index, rows)
        except ApiError as error:  # the rows cannot be had in this form
            self.fail(error.with_traceback(None))  # whose frames have the rows
        else:
            self._count(len(rows))

    def deliver_one(self, sequence: "Sequence", rows: NDArray[np.float32], num_left: int = 0) -> None:
        """Take the next rows (float32 [n, D], or [n, H] of tokens, C-contiguous, borrowed) of a sequence that is not
        `is_plain`; `num_left` more of it are to come."""
        if self.is_over:
            return
        if sequence.output is Output.TOKENS:
            try:
                for collector in self._collectors:
                    collector.put_tokens(sequence.index, rows, num_left)
            except ApiError as error:
                self.fail(error.with_traceback(None))
            else:
                if not num_left:
                    self._count(1)
        elif sequence.chunked is not None:
            mean = sequence.chunked.add(rows[0], sequence.weight)
            if mean is not None:
                self.deliver(sequence.index, mean)

    def _count(self, num_inputs: int) -> None:
        self.num_missing -= num_inputs
        if self.num_missing == 0:
            self.finished.set_result(None)

    def fail(self, error: ApiError) -> None:
        if not self.is_over:
            self.finished.set_exception(error)

    def abandon(self) -> None:
        """Its caller has gone, or its deadline has passed."""
        self.finished.cancel()


class Flow:
    """What of one request waits for a batch, in the order of its inputs. All but `gathering`, and what the dispatcher
    notes, is the scheduler's."""

    __slots__ = (
        "batches",
        "credit",
        "deadline",
        "first_sent_at",
        "gathering",
        "is_new",
        "lane",
        "last_done_at",
        "num_sent_tokens",
        "num_tokens",
        "priority",
        "queue",
        "tenant",
        "waits_since",
    )

    def __init__(self, gathering: Gathering, priority: Priority, deadline: float, tenant: str) -> None:
        self.gathering = gathering
        self.priority = priority
        self.tenant = tenant
        self.deadline = deadline
        """By the clock that the scheduler is told."""
        self.queue: deque[Sequence] = deque()
        self.num_tokens = 0
        """Of the sequences in `queue`."""
        self.num_sent_tokens = 0
        """Of those that workers have, or have embedded; of what they have lost none. `gateway.dispatch` counts them."""
        self.lane: Lane | None = None
        """Where it is listed; None while nothing of it waits."""
        self.credit = 0
        """Tokens that it may still send before the others of its lane have had their turn."""
        self.is_new = True
        """Nothing of it has been queued yet."""
        self.first_sent_at: float | None = None
        """When the first of it went to a worker; `gateway.dispatch` notes it."""
        self.last_done_at = 0.0
        """When the newest of its batches was answered; `gateway.dispatch` notes it, as the next."""
        self.batches: list[BatchShare] | None = None
        """Its batches, where somebody wants to know."""
        self.waits_since = 0.0
        """When something of it was queued that none of it waited before."""


class Sequence:
    """One tokenized input: the unit of scheduling. Owned by the scheduler while queued, then by one batch."""

    __slots__ = ("chunked", "deaths", "flow", "index", "num_tokens", "output", "token_ids", "weight")

    def __init__(
        self,
        flow: Flow,
        index: int,
        tokenized: TokenizedInput | Chunk,
        output: Output = Output.VECTORS,
        chunked: ChunkedInput | None = None,
    ) -> None:
        """`chunked`: what the sequence is a chunk of, if it is one."""
        self.flow = flow
        self.index = index
        """Position of its input among the request's."""
        self.token_ids = tokenized.token_ids
        self.num_tokens = tokenized.num_tokens
        self.output = output
        self.chunked = chunked
        self.weight = tokenized.weight if isinstance(tokenized, Chunk) else 0
        """Of its row in the mean of its input's."""
        self.deaths: Deaths | None = None
        """Of the workers that had it; None while there are none."""

    @property
    def num_rows(self) -> int:
        """What it takes of a slot."""
        return self.num_tokens if self.output is Output.TOKENS else 1

    @property
    def is_plain(self) -> bool:
        """Its one row is its input's."""
        return self.chunked is None and self.output is not Output.TOKENS

    @property
    def num_deaths(self) -> int:
        """How many batches it was in died with their worker."""
        return 0 if self.deaths is None else self.deaths.num

    @property
    def gathering(self) -> Gathering:
        return self.flow.gathering

    @property
    def is_abandoned(self) -> bool:
        return self.flow.gathering.is_over
