"""An embedding request as values: what is requested (`EmbedRequest`), its inputs as tokens (`TokenizedInput`), its
result (`Embedded`).

Owns the types alone. Knows no HTTP, no JSON and no worker. Dialects make `EmbedRequest`s and render `Embedded`s;
`vecd.gateway.pipeline` makes the one into the other.
"""

from array import array
from enum import Enum, IntEnum
from typing import NamedTuple, Protocol, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray

from vecd.shm.output import Output

TokenIds: TypeAlias = Union[list[int], "array[int]"]
"""Token ids as the client sent them; those of large bodies are an `array("i")`."""


class Pair(NamedTuple):
    """Two texts in one sequence: a query and a document, a premise and a hypothesis."""

    query: str
    document: str


Inputs: TypeAlias = list[str] | list[TokenIds] | list[Pair]
"""Of one request: all of one kind."""


class Encoding(Enum):
    """How a vector is written into a response."""

    __hash__ = object.__hash__  # Enum's own is a function in Python

    FLOAT = "float"
    """A JSON list of numbers, integers for integer types."""
    BASE64 = "base64"
    BYTES = "bytes"
    """The rows' bytes, no JSON around them."""
    NPY = "npy"
    """The rows' bytes behind the header of a NumPy file."""


class Dtype(Enum):
    """The type of a vector's elements in a response. `vecd.gateway.encoding.quantization` has the formulas."""

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
    """One form in which a request's vectors are returned."""

    encoding: Encoding = Encoding.FLOAT
    dtype: Dtype = Dtype.FLOAT32
    is_big_endian: bool = False
    """The byte order of BASE64, BYTES and NPY."""


class Overflow(Enum):
    """What happens to an input that is too long for the model."""

    ERROR = "error"
    TRUNCATE = "truncate"
    """Its beginning is kept."""
    TRUNCATE_LEFT = "truncate_left"
    """Its end is kept, behind the prompt."""
    CHUNK = "chunk"
    """Its chunks are embedded; its vector is the mean of theirs, weighted by tokens."""


MAX_PROMPT_CHARS = 4096
"""Of a prompt in a request. It is put before every input, and there may be thousands."""


class Role(Enum):
    """What an input is, for models that treat queries and documents differently."""

    __hash__ = object.__hash__  # Enum's own is a function in Python

    QUERY = "query"
    DOCUMENT = "document"


class Tokenizing(NamedTuple):
    """How a request's inputs become sequences."""

    prompt: str | None = None
    """Put before every text. None: the model's default, which most models do not have."""
    overflow: Overflow | None = None
    """None: the server's default."""
    max_tokens: int | None = None
    """Longest sequence, special tokens included, at most the server's; None: the server's."""
    add_special_tokens: bool = True
    """False: a text's own tokens alone."""
    are_ids_of_model: bool = False
    """Lists of ids are the model's own, with special tokens or without, unless `--token-ids` says otherwise: in APIs
    whose clients get ids from the same server, and use no other vocabulary."""
    role: Role | None = None
    """None: a document."""
    num_queries: int = 0
    """The first so many inputs are queries, whatever `role` says, which is that of the others."""
    max_document_tokens: int | None = None
    """Of a pair, or where `num_queries` is given: most tokens of a document; the rest is cut off."""
    max_query_tokens: int | None = None
    """The same of a query."""
    wants_offsets: bool = False
    """Where the tokens of texts are, too: `TokenizedInput.offsets`."""
    instruction: str | None = None
    """Of a pair, for models whose template has a place for it; None: the model's default."""


class SparseOptions(NamedTuple):
    """What is left of a sparse vector in the response."""

    top_k: int | None = None
    """Only so many of the largest weights; None: all."""
    min_weight: float = 0.0
    """Only weights greater than this."""


class LateChunking(NamedTuple):
    """Vectors of the chunks of each input, made of one pass over all of it. Either `ranges` or `max_tokens` is
    given."""

    ranges: tuple[list[tuple[int, int]], ...] | None = None
    """The chunks of each input: where each begins and ends, in characters. They may overlap, and leave some out."""
    max_tokens: int | None = None
    """Most tokens of the text in a chunk: the chunks have all of it, one behind the other."""
    are_inputs: bool = False
    """The chunks are what the client sent as inputs; here they are one."""


class Priority(IntEnum):
    """The priority class of a request. Lower goes first."""

    INTERACTIVE = 0
    NORMAL = 1
    BULK = 2


class EmbedRequest(NamedTuple):
    """An embedding request, independent of its dialect."""

    inputs: Inputs
    """At least one; texts, or token ids, or pairs of texts."""
    forms: tuple[Form, ...] = (Form(),)
    """At least one. All vectors are returned in each form."""
    priority: Priority | None = None
    """None: the server's default."""
    timeout_s: float | None = None
    """From the request's arrival to its response; None: the server's default."""
    tokenizing: Tokenizing = Tokenizing()
    output: Output = Output.VECTORS
    normalize: bool = False
    """Bring the vectors to length 1; those of most models have it already."""
    dimensions: int | None = None
    """Return only the first so many dimensions of each vector, brought to length 1 again; None: all. Only for models
    made for it."""
    wants_report: bool = False
    """The client requests `Embedded.reports`."""
    sparse: SparseOptions = SparseOptions()
    """For Output.SPARSE, LEXICAL and HYBRID."""
    late: LateChunking | None = None
    """Vectors of chunks in place of those of inputs; the tokens of texts have offsets."""
    is_max_sim: bool = False
    """For Output.TOKEN_VECTORS: scores of documents, which stand behind `Tokenizing.num_queries` queries, in place of
    vectors."""


class Source(Enum):
    """How an input was read."""

    __hash__ = object.__hash__  # Enum's own is a function in Python

    TEXT = "text"
    MODEL = "model"
    """Token ids of the model's own vocabulary."""
    CL100K = "cl100k"
    """Token ids of OpenAI's cl100k_base, decoded to text."""


class TokenizedInput(NamedTuple):
    token_ids: bytes
    """int32, little-endian, shape [num_tokens], special tokens included. For an input in chunks: those of the first."""
    num_tokens: int
    """At least 1. For an input in chunks: of all of them."""
    is_truncated: bool
    source: Source = Source.TEXT
    chunks: "tuple[Chunk, ...]" = ()
    """At least two; empty where the input is one sequence."""
    border: int = 0
    """Where the second part of the sequence begins, as in `vecd.shm.wire.Batch.borders_bytes`; 0: it has none."""
    offsets: NDArray[np.int32] | None = None
    """Of a text, where they are wanted: [num_tokens, 2], where each token begins and ends, in characters of the text as
    sent; -1 for special tokens, and for those of a prompt. A token that joins the prompt's end with the text begins at
    0. For an input in chunks: of all of them, one after the other."""


class Chunk(NamedTuple):
    token_ids: bytes
    """As in `TokenizedInput`."""
    num_tokens: int
    weight: int
    """Tokens of the text itself."""


class Token(NamedTuple):
    id: int
    text: str
    """As in the vocabulary."""
    is_special: bool
    start: int | None
    """In UTF-8 bytes of the text with its prompt, or what the chat template has, before it; None for a special token
    that is added."""
    stop: int | None


class InputReport(NamedTuple):
    """How one input was processed."""

    num_tokens: int
    is_truncated: bool
    num_chunks: int
    """1 for an input that was not split."""
    source: Source


class Stages(NamedTuple):
    """How long each stage of a request took, in seconds."""

    total_s: float
    """From its arrival to its last row."""
    tokenize_s: float
    """From admission until all inputs were tokenized; of a large request, a part was computed meanwhile."""
    queue_s: float
    """From then, or when the first sequence was queued, until the first batch was sent to a worker."""
    compute_s: float
    """From then to the last row."""


class Collector(Protocol):
    """Keeps a request's rows in the form of its response, or as arrays of its own; made by
    `vecd.gateway.encoding.fragments`."""

    def put(self, index: int, rows: NDArray[np.float32]) -> None:
        """Take the rows (float32 [n, width], C-contiguous, borrowed until this returns) of inputs `index` …
        `index + n - 1`. The width is the output's; all floats of an input are one row, even where they span several of
        a slot."""

    def put_tokens(self, index: int, rows: NDArray[np.float32], num_left: int) -> None:
        """Take the next rows (float32 [n, width], C-contiguous, borrowed) of the tokens of input `index`; `num_left`
        more of it are to come."""


class TokenCollector(Protocol):
    """Keeps the tokens of texts in the form of the response; made by dialects."""

    def put(self, index: int, tokens: list[Token]) -> None:
        """Take the next tokens of text `index`: few enough to be written in a millisecond or two. Called in the order
        of texts, at least once for each, in a thread."""


class Embedded(NamedTuple):
    """The result of an embedding request."""

    collectors: "tuple[Collector, ...]"
    """The rows, in each of the request's forms; of an output that has no forms, one."""
    num_tokens: int
    num_truncated: int
    """Inputs that were too long for the model, and were truncated."""
    num_chunked: int
    """Inputs that were too long for the model, and were split."""
    sources: frozenset[Source]
    """How the inputs were read."""
    reports: tuple[InputReport, ...]
    """One for each input, if the request wants them."""
    num_chars: int
    """Of all texts, as received."""
    stages: Stages
    token_ids: tuple[NDArray[np.int32], ...] = ()
    """Those of each input, shape [T], special tokens included, where the output has a row for each token; else
    empty."""
    offsets: tuple[NDArray[np.int32], ...] = ()
    """`TokenizedInput.offsets` of each input, where the request wants them."""
