"""A request on its way through the gateway: what was asked (`EmbedRequest`), what waits (`RequestQueue`), what has come
back (`PendingResult`), what is answered (`Embedded`).

Owns the life of one request's sequences. Knows no HTTP, no JSON and no worker. Dialects make `EmbedRequest`s,
`vecd.gateway.pipeline` makes `PendingResult`s and `RequestQueue`s, `vecd.gateway.scheduling.policy` queues,
`vecd.gateway.dispatch.dispatcher` delivers.
"""

from array import array
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray

from vecd.shm.output import Output

if TYPE_CHECKING:
    pass

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
    """The type of a vector's elements in an answer. `vecd.gateway.encoding.quantization` has the formulas."""

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


class InputReport(NamedTuple):
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


class Collector(Protocol):
    """Keeps a request's rows in the form in which they will be answered; made by `vecd.gateway.encoding.fragments`."""

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
    reports: tuple[InputReport, ...]
    """One for each input, if they were wanted."""
    num_chars: int
    """Of all texts, as they came."""
    stages: Stages
