"""A request as values: HTTP messages, what is requested, its tokens, its result, its timeline.

Owns the types alone, and the limits on requests. Parses nothing and holds no socket.
"""

import asyncio
import re
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, NamedTuple, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray

from vecd.shm.output import Output

FloatRows: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int32]
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
    """The type of a vector's elements in a response. `vecd.gateway.encoding.forms` has the formulas."""

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
    encoding: Encoding = Encoding.FLOAT
    dtype: Dtype = Dtype.FLOAT32
    is_big_endian: bool = False


class Overflow(Enum):
    """What happens to an input that is too long for the model."""

    __hash__ = object.__hash__  # Enum's own is a function in Python

    ERROR = "error"
    TRUNCATE = "truncate"
    """Its beginning is kept."""
    TRUNCATE_LEFT = "truncate_left"
    """Its end is kept, behind the prompt."""
    CHUNK = "chunk"
    """Its vector is the mean of its chunks' vectors, weighted by tokens."""


MAX_PROMPT_CHARS = 4096
"""Of a prompt in a request, which is put before every input, and there may be thousands."""


class Role(Enum):
    """What an input is, for models that treat queries and documents differently."""

    __hash__ = object.__hash__  # Enum's own is a function in Python

    QUERY = "query"
    DOCUMENT = "document"


ALL = sys.maxsize
"""A limit on tokens that is none."""


class Tokenizing(NamedTuple):
    """How a request's inputs become sequences."""

    prompt: str | None = None
    """Put before every text. None: the model's default."""
    overflow: Overflow = Overflow.TRUNCATE
    max_tokens: int = ALL
    """Longest sequence, special tokens included, where that is less than the model's."""
    add_special_tokens: bool = True
    are_ids_of_model: bool = False
    """Lists of ids are the model's own, with special tokens or without, unless `--token-ids` says otherwise."""
    role: Role | None = None
    """None: a document."""
    num_queries: int = 0
    """This number of inputs at the beginning are queries; `role` is that of the others."""
    max_document_tokens: int = ALL
    """Of a pair, or where `num_queries` is given; the rest is cut off."""
    max_query_tokens: int = ALL
    """The same of a query."""
    wants_offsets: bool = False
    """`TokenizedInput.offsets` are needed, too."""
    instruction: str | None = None
    """Of a pair, for models whose template has a place for it; None: the model's default."""


class SparseOptions(NamedTuple):
    """What is left of a sparse vector in the response."""

    top_k: int | None = None
    """The number of the largest weights that are kept; None: all."""
    min_weight: float = 0.0


class LateChunking(NamedTuple):
    """Vectors of the chunks of each input, made of one pass over all of it. Either `ranges` or `max_tokens` is
    given."""

    ranges: tuple[list[tuple[int, int]], ...] | None = None
    """Of each input, in characters. They may overlap, and leave some out."""
    max_tokens: int | None = None
    """Most tokens of the text in a chunk: the chunks have all of it."""
    are_inputs: bool = False
    """The chunks are what the client sent as inputs; here they are one."""


class Priority(IntEnum):
    """Lower goes first."""

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
    dimensions: int | None = None
    """Return only this number of first dimensions of each vector, brought to length 1 again; None: all. Only for models
    made for it."""
    wants_report: bool = False
    sparse: SparseOptions = SparseOptions()
    """For Output.SPARSE, LEXICAL and HYBRID."""
    late: LateChunking | None = None
    """Vectors of chunks in place of those of inputs; the tokens of texts have offsets."""
    is_max_sim: bool = False
    """For Output.TOKEN_VECTORS: scores of the documents behind `Tokenizing.num_queries` queries, in place of
    vectors."""


class Source(Enum):
    """How an input was read."""

    __hash__ = object.__hash__  # Enum's own is a function in Python

    TEXT = "text"
    MODEL = "model"
    """The model's own token ids."""
    CL100K = "cl100k"
    """Token ids of OpenAI's cl100k_base, decoded to text."""


class TokenizedInput(NamedTuple):
    token_ids: bytes
    """int32, little-endian, shape [num_tokens], special tokens included. For an input in chunks: those of the first."""
    num_tokens: int
    """At least 1. For an input in chunks: of all of them."""
    is_truncated: bool
    source: Source = Source.TEXT
    chunks: "tuple[TokenizedInput, ...]" = ()
    """At least two; empty where the input is one sequence."""
    border: int = 0
    """Where the second part of the sequence begins, as in `vecd.shm.wire.Batch.borders_bytes`; 0: it has none."""
    offsets: NDArray[np.int32] | None = None
    """Of a text, where they are wanted: [num_tokens, 2], where each token begins and ends, in characters of the text as
    sent; -1 for special tokens, and for those of a prompt. A token that joins the prompt's end with the text begins at
    0. For an input in chunks: of all of them, one after the other."""
    weight: int = 0
    """Of a chunk: tokens of the text itself, by which its row counts in the mean; 0: it is a whole input."""


class Token(NamedTuple):
    id: int
    text: str
    is_special: bool
    start: int | None
    """In UTF-8 bytes of the text with its prompt, or what the chat template has, before it; None for a special token
    that is added."""
    stop: int | None


class InputReport(NamedTuple):
    num_tokens: int
    is_truncated: bool
    num_chunks: int
    source: Source


class Durations(NamedTuple):
    """The time of each stage of an embedding request, and of all. Each field has a member of
    `vecd.shm.shared_metrics.Histogram` with its name."""

    parse_s: float = 0.0
    tokenize_s: float = 0.0
    queue_s: float = 0.0
    compute_s: float = 0.0
    encode_s: float = 0.0
    total_s: float = 0.0


class Make:
    """What the rows of a request become in one of its forms; `vecd.gateway.encoding.result` has the table of all."""

    __slots__ = ()
    kind = "scores and sparse vectors are given"
    """What is made of whole inputs alone, for an error message."""
    inputs_per_turn = sys.maxsize
    """The most that `expect` takes in one turn of the event loop."""

    @property
    def made(self) -> Any:
        """What a dialect renders, once all rows have come."""
        return self

    def put(self, index: int, rows: FloatRows, num_left: int) -> None:
        """Take the next rows (float32 [n, width], C-contiguous, borrowed until this returns) of input `index`, of which
        `num_left` more are to come; or, where an input has one row, the rows of inputs `index` … `index + n - 1`."""
        raise NotImplementedError

    def expect(self, start: int, tokenized: "list[TokenizedInput]") -> int:
        """Note the inputs from `start` on, before they are queued. Returns the floats that their rows take until the
        response is there. Raises BadRequest for what has no room in one request."""
        return 0

    async def make_room(self, num_queued: int) -> None:
        """Wait until less is kept of the `num_queued` inputs, if it ever will be."""


Collect: TypeAlias = Callable[[int, list[Token]], None]
"""Takes the next tokens of text i, few enough to be written in a millisecond or two."""


@dataclass(slots=True, eq=False)
class Embedded:
    """The result of an embedding request, counted while its inputs are tokenized."""

    made: tuple[Any, ...] = ()
    """`Make.made` of each of the request's forms; of an output that has no forms, of one."""
    num_tokens: int = 0
    num_truncated: int = 0
    num_chunked: int = 0
    sources: set[Source] = field(default_factory=set)
    reports: list[InputReport] = field(default_factory=list)
    """Of each input, where the request wants them."""
    num_chars: int = 0
    durations: Callable[[], Durations] = Durations
    """Until its last row had come. Few dialects ask."""
    token_ids: list[NDArray[np.int32]] = field(default_factory=list)
    """Of each input, shape [T], special tokens included, where the output has a row for each token."""
    offsets: list[NDArray[np.int32]] = field(default_factory=list)
    """`TokenizedInput.offsets` of each input, where the request wants them."""
    model: str = ""
    """The served model, whatever name was sent."""
    request_id: str = ""


# The timeline of one HTTP request: its endpoint, its size, and when each stage of it was reached. It has nothing that
# the client sent, but numbers and the ids of its trace, and decides nothing. `vecd.gateway.telemetry.measures` reads it
# once the request is finished. Instants are by `time.monotonic`; 0.0 stands for one that was not reached.

IS_SAMPLED = 0x01
"""The only flag of `traceparent` with an effect here. Source: https://www.w3.org/TR/trace-context/."""


class Trace(NamedTuple):
    trace_id: str
    """32 lower-case hexadecimal digits."""
    parent_id: str
    """The client's span, 16 digits; "" where the trace begins here."""
    flags: int
    state: str = ""
    """The header `tracestate`, as it was received."""

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & IS_SAMPLED)


class BatchShare(NamedTuple):
    """A batch with sequences of a request."""

    worker: int
    number: int
    sent_at: float
    """By `time.monotonic`, as the next."""
    done_at: float
    compute_us: int
    num_sequences: int
    """In the whole batch, as the next."""
    num_tokens: int


class RequestTimeline:
    """Made with its request, in 0.1 µs: what is not noted has the value here."""

    endpoint = 0
    """The index in `vecd.gateway.app.routes.ENDPOINTS`."""
    principal = ""
    """The name of the request's key."""
    model = ""
    """Where several are served and it is known."""
    error = ""
    """The code, or else the type, of the error in the response."""
    num_inputs = 0
    num_tokens = 0
    """Of the inputs that were tokenized."""
    started_at = 0.0
    """The request was complete, and the requests before it on its connection were answered."""
    arrived_at = 0.0
    """Its handler began."""
    parsed_at = 0.0
    entered_at = 0.0
    tokenized_at = 0.0
    """All its inputs were tokenized."""
    sent_at = 0.0
    """Its first batch was sent to a worker."""
    done_at = 0.0
    """The worker's reply to its last batch was received. Then all of the above are set."""
    batches: list[BatchShare] | None = None
    """If it is traced."""
    trace: Trace | None = None

    take_room: Callable[[int, int], asyncio.Future[None] | None] | None = None
    """Takes room for a response of a number of bytes, before it is made; returns what to await if there is none yet,
    which raises TooManyRequests if too many bytes of requests wait. The second number: bytes of the inputs."""

    @property
    def is_embedded(self) -> bool:
        """All its rows were received."""
        return self.done_at > 0.0

    def durations(self, finished_at: float) -> Durations:
        """The durations of a request that `is_embedded` and finished at `finished_at`."""
        admission_s = self.entered_at - self.parsed_at
        return Durations(
            self.parsed_at - self.arrived_at,
            self.tokenized_at - self.entered_at,
            admission_s + max(0.0, self.sent_at - self.tokenized_at),
            self.done_at - self.sent_at,
            finished_at - self.done_at,
            finished_at - self.arrived_at,
        )


# The identity of a model: what tells whether two servers put a text to the same vector. The hex comes from the
# supervisor (`vecd.shm.control.ModelIdentity`), the number format from the workers.

HEADER = "x-vecd-identity"
"""Of a response: the identity of the model that has answered."""


class Identity:
    def __init__(self, aliases: Iterable[str] = ()) -> None:
        """`aliases`: those with request defaults, which have identities of their own."""
        self.digest = ""
        """32 hexadecimal digits; "" while they are not known."""
        self.problem = ""
        """Why they are not, if it is no use waiting for them."""
        self.text: str | None = None
        """The digest and the number format; None until both are known, and once workers had different formats."""
        self.known = asyncio.Event()
        """Set while there is a digest or a problem."""
        self.has_format = asyncio.Event()
        self.by_alias = {alias: Identity() for alias in aliases}
        self._formats: tuple[str, ...] = ()

    @property
    def formats(self) -> str:
        """The number formats of the workers, with a + between them."""
        return "+".join(self._formats)

    def describe(self) -> str:
        """For an error message."""
        return f"{self.digest};dtype={self.formats}" if self._formats else self.digest

    def set(self, digest: str, by_alias: Mapping[str, str], problem: str = "") -> None:
        self.digest, self.problem = digest, problem
        self._renew()
        self.known.set()
        for alias, identity in self.by_alias.items():
            identity.set(by_alias.get(alias, ""), {}, problem)

    def add_format(self, number_format: str) -> None:
        if number_format in self._formats:
            return
        self._formats = tuple(sorted((*self._formats, number_format)))
        self._renew()
        self.has_format.set()
        for identity in self.by_alias.values():
            identity.add_format(number_format)

    def _renew(self) -> None:
        is_one = self.digest and len(self._formats) == 1
        self.text = f"{self.digest};dtype={self._formats[0]}" if is_one else None


OWN = "vecd"
"""The dialect of the server's own routes."""

_PROBED = {
    "/", "/health", "/live", "/ping", "/metrics", "/stats",
    "/v2/health/live", "/v2/health/ready",
}  # fmt: skip


class Endpoint(NamedTuple):
    """What a request is counted under. `vecd.gateway.app.routes` has the list of all."""

    route: str
    """A path of the table of routes, never as the client wrote it."""
    dialect: str

    @property
    def is_probe(self) -> bool:
        """Machines request it again and again."""
        return self.dialect == OWN and self.route in _PROBED


NO_ROUTE = Endpoint("other", "none")
"""Requests at paths that do not exist."""


@dataclass(slots=True)
class ModelChoice:
    """Which model a request is for, where several are served. `vecd.gateway.app.app` reads the path and the header; for
    a request that names no model there, `App` chooses by the body."""

    named: str
    """By the path or the header, as the client wrote it; "" if neither names a model."""
    found: Any = None
    """The `vecd.gateway.api.served.ModelInfo` of the model that it means; None if the body is still to choose."""
    is_by_path: bool = False
    """The path has named it: the request is about the model, and about nothing of the operator's."""


REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""An id that a client may give its request: it is a header of the response, and in the log."""


class Coding(Enum):
    GZIP = "gzip"
    DEFLATE = "deflate"
    ZSTD = "zstd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that is read of one request, and of connections. A request at a limit is accepted; one byte or header
    more is refused."""

    max_body_bytes: int
    max_target_bytes: int = 8 * 1024
    """Path and query, as sent."""
    max_head_bytes: int = 32 * 1024
    """With line ends. Trailers of a chunked body have the same limit again."""
    max_headers: int = 100
    max_connections: int = 256
    """To the public listener. This many are enough until the configuration is known."""
    max_connections_per_address: int | None = None
    """Of these, from one `vecd.gateway.http.forwarded.client_of`; None: as many."""


@dataclass(slots=True)
class HttpRequest:
    """Its repr has neither headers nor body, because both may contain what must not be logged."""

    method: str
    path: str
    """Percent-decoded, without the query; "*" for `OPTIONS *`."""
    query: bytes
    """As sent, without the question mark."""
    headers: dict[str, str] = field(repr=False)
    """Names in lower case, values as latin-1; the values of a repeated header are joined with ", "."""
    http_minor: int
    """0 for HTTP/1.0, 1 for HTTP/1.1."""
    keep_alive: bool
    request_id: str = field(compare=False)
    """The client's own, or one made here."""
    expects_continue: bool = False
    """The client sends its body only after an interim response."""
    coding: Coding | None = None
    """Of the body, which is kept compressed: see `vecd.gateway.http.framing`."""
    body: bytes = field(default=b"", repr=False)
    """Empty until the whole body was received."""
    client: str = field(default="", repr=False)
    """The caller's address, of the connection or as trusted proxies say: an IPv4 address, the /64 of an IPv6 address,
    "" on a unix socket."""
    scheme: str = field(default="", repr=False)
    """"http" or "https", which the caller speaks to a trusted proxy; "": that of the listener."""
    is_admin: bool = False
    timeline: RequestTimeline = field(default_factory=RequestTimeline, compare=False, repr=False)
    choice: ModelChoice | None = field(default=None, compare=False, repr=False)
    """None where one model is served."""
    identity: Identity | None = field(default=None, compare=False, repr=False)
    """That of the model that answers, once it is known which that is."""

    @property
    def may_choose(self) -> bool:
        """Several models are served, and neither the path nor the header has named one of them."""
        return self.choice is not None and self.choice.found is None


@dataclass(slots=True)
class Response:
    """The connection adds content-type, content-length, x-request-id and connection to the headers."""

    status: int
    body: bytes | list[bytes | memoryview] | Iterator[bytes | memoryview] = field(default=b"", repr=False)
    """One piece or several, which are sent without a copy; a memoryview is one-dimensional and of bytes. A dialect may
    give an iterator, which is run to its end before the response is sent."""
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/json"
