"""What clients can ask for, as data: each attribute of a request, the words that each dialect has for it, and what
their values mean. `test_attributes` runs every rule for every row."""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from vecd.gateway.request import MAX_PROMPT_CHARS, Dtype, Encoding, Form, LateChunking, Overflow, Pair, Priority, Role
from vecd.shm.output import Output

# --- routes -----------------------------------------------------------------------------------------------------


class Route(NamedTuple):
    path: str
    dialect: str
    """Whose shape the errors have."""
    model: str
    """A key of `MODELS`."""
    body: Mapping[str, Any]
    """The least that is accepted."""
    also: tuple[str, ...] = ()
    """Other paths of the same operation."""


_OPENAI_S = tuple(
    f"{prefix}/embeddings"
    for prefix in (
        "", "/openai/v1", "/openai/deployments/m", "/v1/openai/deployments/m", "/v1/deployments/m", "/v1/engines/m",
        "/engines/m",
    )
)  # fmt: skip
_HUB_S = tuple(
    path.format(task=task)
    for task in ("feature-extraction", "text-classification", "token-classification")
    for path in ("/models/m/pipeline/{task}", "/pipeline/{task}/m", "/hf-inference/models/m/pipeline/{task}")
)
_COMPARED = {"source_sentence": "a", "sentences": ["b", "c"]}
_RANKED = {"query": "q", "documents": ["a", "b"]}
_TALK = [{"role": "user", "content": "b"}]
_MESSAGES = {"messages": _TALK}
_SCORED = {"text_1": "q", "text_2": ["a", "b"]}


_RERANK_S = ("/rerank", "/openai/v1/rerank", "/v2/rerank", "/api/rerank")
_SCORE_S = ("/v1/score", "/openai/v1/score", "/invocations")


def _content(*texts: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text} for text in texts]}


ROUTES = {
    "openai": Route("/v1/embeddings", "openai", "dense", {"input": "a"}, _OPENAI_S),
    "openai hybrid": Route("/v1/embeddings", "openai", "hybrid", {"input": "a"}, _OPENAI_S),
    "openai sparse": Route("/v1/embeddings", "openai", "sparse", {"input": "a", "output": "sparse"}, _OPENAI_S),
    "multi-vector": Route("/v1/multi-vector", "openai", "multi", {"input": "a"}, ("/openai/v1/multi-vector",)),
    "zero-shot": Route(
        "/v1/classify", "openai", "dense", {"input": "a", "labels": ["b", "c"]}, ("/classify", "/openai/v1/classify")
    ),
    "openai messages": Route("/v1/embeddings", "openai", "dense", _MESSAGES, _OPENAI_S),
    "pooling messages": Route("/pooling", "vllm", "dense", _MESSAGES),
    "classify messages": Route("/classify", "vllm", "classifier", _MESSAGES, ("/v1/classify", "/openai/v1/classify")),
    "invocations messages": Route("/invocations", "vllm", "dense", _MESSAGES),
    "tokenize messages": Route("/tokenize", "vllm", "dense", _MESSAGES),
    "pooling": Route("/pooling", "vllm", "dense", {"input": "a"}),
    "pooling tokens": Route("/pooling", "vllm", "dense", {"input": "a", "task": "token_embed"}),
    "pooling multi": Route("/pooling", "vllm", "multi", {"input": "a"}),
    "pooling scores": Route("/pooling", "vllm", "classifier", {"input": "a"}),
    "invocations vllm": Route("/invocations", "vllm", "dense", {"input": "a"}),
    "ollama": Route("/api/embed", "ollama", "dense", {"input": "a"}),
    "ollama old": Route("/api/embeddings", "ollama", "dense", {"prompt": "a"}),
    "show by name": Route("/api/show", "ollama", "dense", {"name": "m"}),
    "pull by name": Route("/api/pull", "ollama", "dense", {"name": "m"}),
    "show": Route("/api/show", "ollama", "dense", {"model": "m"}),
    "pull": Route("/api/pull", "ollama", "dense", {"model": "m"}),
    "tei": Route("/embed", "tei", "dense", {"inputs": "a"}),
    "hub": Route("/models/m", "tei", "dense", {"inputs": "a"}, _HUB_S),
    "root": Route("/", "tei", "dense", {"inputs": "a"}),
    "invocations tei": Route("/invocations", "tei", "dense", {"inputs": "a"}),
    "invocations text_inputs": Route("/invocations", "tei", "dense", {"text_inputs": "a"}),
    "embed_all": Route("/embed_all", "tei", "dense", {"inputs": "a"}),
    "similarity": Route("/similarity", "tei", "dense", {"inputs": _COMPARED}),
    "root similarity": Route("/", "tei", "dense", {"inputs": _COMPARED}, ("/invocations",)),
    "embed_sparse": Route("/embed_sparse", "tei", "sparse", {"inputs": "a"}),
    "root sparse": Route("/", "tei", "sparse", {"inputs": "a"}),
    "cohere": Route("/v2/embed", "cohere", "dense", {"texts": ["a"]}),
    "cohere v1": Route("/v1/embed", "cohere", "dense", {"texts": ["a"]}, ("/embed",)),
    "cohere inputs": Route("/v2/embed", "cohere", "dense", {"inputs": [_content("a")]}, ("/v1/embed",)),
    "classify": Route("/classify", "vllm", "classifier", {"input": "a"}, ("/v1/classify", "/openai/v1/classify")),
    "classify tokens": Route("/classify", "vllm", "tagger", {"input": "a"}, ("/v1/classify", "/openai/v1/classify")),
    "invocations classify": Route("/invocations", "vllm", "classifier", {"input": "a"}),
    "predict": Route("/predict", "tei", "classifier", {"inputs": "a"}, ("/",)),
    "choose": Route("/predict", "tei", "judge", {"inputs": "a"}, ("/", "/invocations")),
    "predict tokens": Route("/predict", "tei", "tagger", {"inputs": "a"}, ("/", *_HUB_S)),
    "hub labels": Route("/models/m", "tei", "classifier", {"inputs": "a"}, _HUB_S),
    "rerank": Route("/v1/rerank", "rerank", "ranker", _RANKED, _RERANK_S),
    "voyage": Route("/voyage/v1/rerank", "rerank", "ranker", _RANKED),
    "rerank multi": Route("/v1/rerank", "rerank", "multi", _RANKED),
    "nvidia": Route("/v1/ranking", "rerank", "ranker", {"query": "q", "passages": ["a", "b"]}),
    "invocations rerank": Route("/invocations", "rerank", "ranker", _RANKED),
    "invocations pairs": Route("/invocations", "rerank", "ranker", {"text_pairs": [["q", "a"], ["q", "b"]]}),
    "invocations scores": Route("/invocations", "rerank", "ranker", _SCORED),
    "score": Route("/score", "vllm", "ranker", _SCORED, _SCORE_S),
    "score queries": Route("/score", "vllm", "ranker", {"queries": "q", "documents": ["a", "b"]}, _SCORE_S),
    "score items": Route("/score", "vllm", "ranker", {"queries": "q", "items": ["a", "b"]}, _SCORE_S),
    "score data": Route("/score", "vllm", "ranker", {"data_1": "q", "data_2": ["a", "b"]}, _SCORE_S),
    "tei rerank": Route("/rerank", "tei", "ranker", {"query": "q", "texts": ["a", "b"]}),
    "root rerank": Route("/", "tei", "ranker", {"query": "q", "texts": ["a", "b"]}, ("/invocations",)),
    "tokenize": Route("/tokenize", "vllm", "dense", {"prompt": "a"}),
    "detokenize": Route("/detokenize", "vllm", "dense", {"tokens": [1]}),
    "tei tokenize": Route("/tokenize", "tei", "dense", {"inputs": "a"}),
    "decode": Route("/decode", "tei", "dense", {"ids": [1]}),
    "cohere tokenize": Route("/v1/tokenize", "cohere", "dense", {"text": "a"}),
    "cohere detokenize": Route("/v1/detokenize", "cohere", "dense", {"tokens": [1]}),
}  # fmt: skip

OPENAI = ("openai", "openai hybrid", "openai sparse", "multi-vector", "invocations vllm")
"""With all fields of /v1/embeddings."""
OPENAI_DENSE = ("openai", "openai hybrid", "invocations vllm")
POOLING = ("pooling", "pooling tokens", "pooling multi", "pooling scores")
CLASSIFY = ("classify", "classify tokens", "invocations classify")
COHERE = ("cohere", "cohere v1")
SIMILARITY = ("similarity", "root similarity")
OLLAMA = ("ollama", "ollama old")
TEI_DENSE = ("tei", "hub", "root", "invocations tei")
TEI_SPARSE = ("embed_sparse", "root sparse")
TEI_LABELS = ("predict", "predict tokens", "hub labels", "choose")
DOCUMENTS = ("rerank", "voyage", "rerank multi", "invocations rerank")
MESSAGES = ("openai messages", "pooling messages", "classify messages", "invocations messages", "tokenize messages")
RERANK = (*DOCUMENTS, "score", "invocations pairs", "invocations scores")
RANKINGS = (*RERANK, "nvidia")
TEXTS = (*OPENAI, *POOLING, "zero-shot", *CLASSIFY)
DENSE, PROMPTED = (*OPENAI_DENSE, "pooling"), (*OPENAI_DENSE, *POOLING[:2], "zero-shot")
TEI_TEXTS = (*TEI_DENSE, "embed_all", *SIMILARITY, *TEI_SPARSE, *TEI_LABELS)
TEI_RERANK = ("tei rerank", "root rerank")
EMBEDDING = (
    *TEXTS, *OLLAMA, *TEI_TEXTS, *COHERE, *RANKINGS, *TEI_RERANK,
)  # fmt: skip
"""Whatever computes something."""


# --- what comes of a request ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Exchange:
    status: int
    headers: Mapping[str, str]
    content_type: str
    body: bytes
    request_id: str
    asked: Any = None
    """What has reached the pipeline: an EmbedRequest, or of tokens and conversations the facts as a dict; None: nothing
    has."""
    rendered: Any = None
    """The conversations that the chat template has got, with its options."""
    kept_s: float | None = None
    """How long the model shall stay loaded."""

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)


def _length_1(exchange: Exchange) -> bool:
    normalize: bool = exchange.asked.normalize
    return normalize and exchange.asked.output is not Output.UNNORMALIZED


def _results(exchange: Exchange) -> list[Any]:
    """Of a ranking, whatever its shape."""
    found = exchange.json
    if isinstance(found, dict):
        found = next(found[name] for name in ("results", "data", "rankings", "scores") if name in found)
    return [{"score": each} if isinstance(each, float) else each for each in found]


def _output(exchange: Exchange) -> Output:
    """Whether vectors shall have length 1 is another attribute."""
    output: Output = exchange.asked.output
    return Output.VECTORS if output is Output.UNNORMALIZED else output


def _raw_scores(exchange: Exchange) -> bool:
    names = ("relevance_score", "score", "logit")
    return min(next(each[name] for name in names if name in each) for each in _results(exchange)) < 0


def _activation(exchange: Exchange) -> str:
    """By the best score of the only text, whose logits are -1.5, -0.5 and 0.5."""
    found = exchange.json["data"] if isinstance(exchange.json, dict) else exchange.json
    row = found[0] if isinstance(found[0], list) else found
    if "probs" in row[0] or "data" in row[0]:
        row = row[0].get("probs", row[0].get("data"))
    best = max(each if isinstance(each, float) else each["score"] for each in row)
    return {0.5: "identity", 0.62: "sigmoid", 0.67: "softmax"}[round(best, 2)]


def _entities(exchange: Exchange) -> list[Any]:
    """Of the only text."""
    found: list[Any] = exchange.json["data"][0]["entities"] if isinstance(exchange.json, dict) else exchange.json
    return found


def _texts(name: str) -> Callable[[Exchange], Any]:
    """Of the pairs: "query" or "document"."""
    return lambda exchange: [getattr(pair, name) for pair in exchange.asked.inputs]


def _labels(exchange: Exchange) -> int:
    found = exchange.json
    return len(found[0] if isinstance(found[0], list) else found)


# --- attributes -------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One or several words for an attribute, with the same values, on some routes."""

    attribute: str
    routes: tuple[str, ...]
    words: tuple[str, ...]
    """Fields of the body, with a point before a field inside another, or headers ("header accept")."""
    values: tuple[tuple[Any, Any], ...]
    """Each as the client writes it, and what it means. Of a word that leaves several meanings open a frozenset, of
    which the server's default counts most; UNSAID: what counts where no word says anything; ABSENT: the same, and no
    other word contradicts it."""
    wrong: tuple[Any, ...] = ()
    """Values that are refused."""
    beside: Mapping[str, Any] = {}
    """Other fields, without which the word has no effect."""
    of: str = ""
    """Words of one name are synonyms, as those of one row are: they must have the same meaning."""
    is_alone: bool = False
    """Left out where two words are sent together."""
    is_exclusive: bool = False
    """A request that has another word, too, is refused, even if both mean the same."""


UNSAID, ABSENT = "unsaid", "absent"


@dataclass(frozen=True, slots=True)
class Attribute:
    seen: Callable[[Exchange], Any]
    """What the request has come to."""
    order: tuple[Any, ...] = ()
    """Of meanings that words leave open, which is preferred behind the server's default."""


def _forms(get: Callable[[Form], Any]) -> Callable[[Exchange], Any]:
    return lambda exchange: tuple(get(form) for form in exchange.asked.forms)


def _tokenizing(name: str, absent: Any = None) -> Callable[[Exchange], Any]:
    def seen(exchange: Exchange) -> Any:
        value = getattr(exchange.asked.tokenizing, name)  # sys.maxsize: no limit
        return absent if value in (None, sys.maxsize) else value

    return seen


def _asked(name: str) -> Callable[[Exchange], Any]:
    return lambda exchange: getattr(exchange.asked, name)


def _member(name: str) -> Callable[[Exchange], Any]:
    """Of what is asked for tokens or conversations."""
    return lambda exchange: exchange.asked.get(name)


def _hypotheses(exchange: Exchange) -> list[str]:
    pairs = [each.document for each in exchange.asked.inputs if isinstance(each, Pair)]
    return pairs or ["This example is {}."]


OWN_PROMPT, SERVER_S_OVERFLOW = "own: ", Overflow.TRUNCATE
"""Of every model here."""
ERROR, CUT, LEFT, CHUNK = Overflow.ERROR, Overflow.TRUNCATE, Overflow.TRUNCATE_LEFT, Overflow.CHUNK

ATTRIBUTES: dict[str, Attribute] = {
    "dimensions": Attribute(_asked("dimensions")),
    "dimensions of tokens": Attribute(_asked("dimensions")),
    "length 1": Attribute(
        lambda exchange: exchange.asked.output is not Output.UNNORMALIZED and exchange.asked.normalize
    ),
    "encoding": Attribute(_forms(lambda form: form.encoding)),
    "dtype": Attribute(_forms(lambda form: form.dtype)),
    "byte order": Attribute(_forms(lambda form: form.is_big_endian)),
    "overflow": Attribute(_tokenizing("overflow"), (CUT, LEFT, *Overflow)),
    "max tokens": Attribute(_tokenizing("max_tokens")),
    "max tokens of a document": Attribute(_tokenizing("max_document_tokens")),
    "max tokens of a query": Attribute(_tokenizing("max_query_tokens")),
    "instruction": Attribute(_tokenizing("instruction")),
    "special tokens": Attribute(_tokenizing("add_special_tokens")),
    "prompt": Attribute(_tokenizing("prompt", OWN_PROMPT)),
    "role": Attribute(_tokenizing("role")),
    "output": Attribute(_output, tuple(Output)),
    "priority": Attribute(_asked("priority")),
    "timeout": Attribute(_asked("timeout_s")),
    "report": Attribute(_asked("wants_report")),
    "inputs": Attribute(_asked("inputs")),
    "most weights": Attribute(lambda exchange: exchange.asked.sparse.top_k),
    "least weight": Attribute(lambda exchange: exchange.asked.sparse.min_weight),
    "late chunks": Attribute(_asked("late")),
    "request id": Attribute(lambda exchange: exchange.request_id),
    "keep alive": Attribute(lambda exchange: exchange.kept_s),
    "scores": Attribute(_raw_scores),
    "activation": Attribute(_activation),
    "number of labels": Attribute(_labels),
    "number of results": Attribute(lambda exchange: len(_results(exchange))),
    "documents in the response": Attribute(
        lambda exchange: any("document" in each or "text" in each for each in _results(exchange))
    ),
    "fields of documents": Attribute(_texts("document")),
    "documents": Attribute(_texts("document")),
    "query": Attribute(_texts("query")),
    "shape of rankings": Attribute(lambda exchange: next(iter(exchange.json))),
    "spans": Attribute(lambda exchange: not any("entity" in each for each in _entities(exchange))),
    "labels left out": Attribute(lambda exchange: len(_entities(exchange))),
    "candidates": Attribute(lambda exchange: [each for text in _hypotheses(exchange) for each in text if each in "bc"]),
    "hypothesis": Attribute(lambda exchange: {re.sub("[bc]", "{}", text) for text in _hypotheses(exchange)}),
    "several true labels": Attribute(
        lambda exchange: isinstance(exchange.json, dict) and sum(exchange.json["scores"]) > 1.1
    ),
    "temperature": Attribute(lambda exchange: round(exchange.json["data"][0]["score"], 1)),
    "ids": Attribute(_member("lists")),
    "texts": Attribute(_member("texts")),
    "added special tokens": Attribute(_member("add_special_tokens")),
    "skipped special tokens": Attribute(_member("skip_special_tokens")),
    "prompt of tokens": Attribute(_member("prompt")),
    "strings of tokens": Attribute(lambda exchange: exchange.json["token_strs"] is not None),
    "sparse format": Attribute(lambda exchange: "indices" not in exchange.json["data"][0]["sparse"]),
    "sparse tokens": Attribute(lambda exchange: "tokens" in exchange.json["data"][0]["sparse"]),
    "conversations": Attribute(lambda exchange: exchange.rendered["conversations"]),
    "continued message": Attribute(lambda exchange: exchange.rendered["continue_final_message"]),
    "generation prompt": Attribute(lambda exchange: exchange.rendered["kwargs"]["add_generation_prompt"]),
    "variables of the template": Attribute(lambda exchange: exchange.rendered["kwargs"].get("x")),
    "lines": Attribute(lambda exchange: exchange.body.endswith(b"\n")),
    "nothing": Attribute(lambda exchange: exchange.status),
}

# --- the table --------------------------------------------------------------------------------------------------


def words(*names: str, inside: bool = False) -> tuple[str, ...]:
    """`inside`: text-embeddings-inference's, which may also stand in `parameters`."""
    return (*names, *(f"parameters.{name}" for name in names)) if inside else names


def same(*values: Any) -> tuple[tuple[Any, Any], ...]:
    """Values that mean themselves."""
    return tuple((value, value) for value in values)


_FLAGS = ((True, True), (False, False))
_NO_FLAG = ("yes", 1, [True])
_NO_NUMBER = ("8", 1.5, True, [8])
_CUTS, _NOT_LEFT, _NOT_RIGHT = frozenset((CUT, LEFT)), frozenset(Overflow) - {LEFT}, frozenset(Overflow) - {CUT}
_OVERFLOWS = tuple((each.value, frozenset((each,))) for each in Overflow)
_SIDES = (("left", _NOT_RIGHT), ("right", _NOT_LEFT))
_DIRECTIONS = (*_SIDES, ("Left", _NOT_RIGHT), ("Right", _NOT_LEFT))
_ONLY_ERROR, _ONLY_CUT = frozenset((ERROR,)), frozenset((CUT,))
_FLAG_CUTS = ((True, _CUTS), (False, _ONLY_ERROR))
_WORD_CUTS = (("NONE", _ONLY_ERROR), ("START", frozenset((LEFT,))), ("END", _ONLY_CUT))
_PURPOSES = (
    ("query", "query: "), ("search_query", "query: "), ("retrieval.passage", "passage: "), ("document", "passage: "),
    ("clustering", OWN_PROMPT),
)  # fmt: skip
_KINDS = (("text", ABSENT), ("string", ABSENT))
_PROMPTS = (("query", "query: "), ("document", "passage: "), ("own", OWN_PROMPT))
_NO_PROMPT = ("nope", 5, ["query"])
_NAMES = (("m:query", "query: "), ("m:search_document", "passage: "), ("m", UNSAID), ("m:latest", UNSAID))
_ROLES = (("query", Role.QUERY), ("passage", Role.DOCUMENT))
_PRIORITIES = (("interactive", Priority.INTERACTIVE), ("normal", Priority.NORMAL), ("bulk", Priority.BULK))
_NUMBERED = ((-3, Priority.INTERACTIVE), (0, Priority.NORMAL), (7, Priority.BULK))
_RAW = ((True, True), (False, False), ("true", True), ("False", False))
_ACTIVATED = tuple((value, not raw) for value, raw in _RAW)
_JINA_S = tuple(
    (spelled, meaning)
    for name, dtype in (("float", Dtype.FLOAT32), ("binary", Dtype.BINARY), ("ubinary", Dtype.UBINARY))
    for spelled, meaning in ((name, (dtype,)), ([name], (dtype,)))
)
_TEXT_INPUTS = (("b", ["b"]), ("", [""]), (["b", "c"], ["b", "c"]))
_ID_INPUTS = (([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]))
_OBJECTS = (([{"text": "b", "image": None}, "c"], ["b", "c"]),)
_DENSE, _MULTI = frozenset((Output.VECTORS,)), frozenset((Output.TOKEN_VECTORS,))
_TOO_MANY = ["a"] * 9
_WRONG_TEXTS: tuple[Any, ...] = (5, {"secret": 1}, [], ["secret", 5], ["secret", None], _TOO_MANY)
_WRONG_OBJECTS = ([{"text": "secret", "secret": "c"}], [{"text": "a"}, {"text": 5}], [{"text": "a"}, [1]])
_WRONG_INPUTS = (*_WRONG_TEXTS, [1, "a"], [[1], "secret"], [[1], []], [[1], [True]])
_DOCUMENTS = ((["x", "y"], ["x", "y"]), ([{"text": "x"}, "y"], ["x", "y"]), ("x", ["x"]))
_WRONG_DOCUMENTS: tuple[Any, ...] = (5, [], [1, 2], [["secret"]], [{"title": "secret"}], _TOO_MANY)

TABLE = (
    # --- vectors ---
    Row("dimensions", DENSE, words("dimensions", "output_dimension", "truncate_dim"), ((8, 8), (16, None), (0, UNSAID)),
        (-1, 17, *_NO_NUMBER)),
    Row("dimensions", ("openai messages", "pooling messages"), words("dimensions"), ((8, 8),), (17, "8")),
    Row("dimensions", ("ollama",), words("dimensions"), ((8, 8), (16, None), (0, None)), (-1, 17, *_NO_NUMBER)),
    Row("dimensions", (*TEI_DENSE, *SIMILARITY), words("dimensions", inside=True), ((8, 8), (16, None)),
        (0, 17, *_NO_NUMBER)),
    Row("dimensions", COHERE, words("output_dimension"), ((8, 8), (16, None)), (0, 17, *_NO_NUMBER)),
    Row("dimensions of tokens", ("multi-vector", "pooling multi"),
        words("dimensions", "output_dimension", "truncate_dim"), ((4, None),), (3,)),
    Row("dimensions of tokens", ("pooling tokens",), words("dimensions"), ((16, None),), (8,)),
    Row("length 1", (*OPENAI_DENSE, *POOLING[:3]), words("normalize", "normalized", "use_activation"), _FLAGS,
        _NO_FLAG),
    Row("length 1", TEI_DENSE, words("normalize", inside=True), _FLAGS, _NO_FLAG),
    Row("encoding", DENSE, words("encoding_format"),
        (("float", (Encoding.FLOAT,)), ("base64", (Encoding.BASE64,)), ("bytes", (Encoding.BYTES,)),
         ("bytes_only", (Encoding.BYTES,)), ("npy", (Encoding.NPY,)), ("", ABSENT)),("hex", 5, ["float"])),
    Row("encoding", DENSE, words("embedding_type", "encoding_type"),
        (("base64", (Encoding.BASE64,)), ("float", UNSAID)), ("hex", 5, [], ["base64", "float"]), of="jina"),
    Row("encoding", (*DENSE, *TEI_DENSE), words("header accept"),
        (("application/x-npy", (Encoding.NPY,)), ("application/octet-stream", (Encoding.BYTES,)), ("*/*", UNSAID))),
    Row("encoding", TEI_DENSE, words("encoding_format", inside=True),
        (("float", (Encoding.FLOAT,)), ("base64", (Encoding.FLOAT,)), ("bytes", (Encoding.BYTES,)),
         ("npy", (Encoding.NPY,))),("hex", 5)),
    Row("encoding", SIMILARITY, words("encoding_format", inside=True), (("float", UNSAID), ("base64", UNSAID)),
        ("hex", "bytes", "npy", 5)),
    Row("dtype", DENSE, words("output_dtype"),
        (("float", (Dtype.FLOAT32,)), *((each.value, (each,)) for each in Dtype)), ("fp8", 5, ["int8"])),
    Row("dtype", DENSE, words("embed_dtype"),
        tuple((each.value, (each,)) for each in (Dtype.FLOAT32, Dtype.FLOAT16, Dtype.BFLOAT16)), ("int8", 5)),
    Row("dtype", DENSE, words("embedding_type", "encoding_type"), _JINA_S, ("int8", 5, [], ["float", "binary"])),
    Row("dtype", COHERE, words("embedding_types"),
        ((["float"], (Dtype.FLOAT32,)), (["int8", "ubinary", "int8"], (Dtype.INT8, Dtype.UBINARY)), ([], UNSAID)),
        ("float", ["float", "fp8"], [5], {})),
    Row("byte order", DENSE, words("endianness"), (("big", (True,)), ("little", (False,)), ("native", (False,))),
        ("middle", 5), {"encoding_format": "bytes"}),
    Row("byte order", DENSE, words("endianness"), (("big", (False,)),), is_alone=True),
    # --- long inputs ---
    Row("overflow", (*OPENAI_DENSE, "pooling", "pooling scores", "zero-shot"), words("overflow"), _OVERFLOWS,
        ("cut", 5, True)),
    Row("overflow", ("openai sparse", "multi-vector", *CLASSIFY), words("overflow"), _OVERFLOWS[:3],
        ("cut", 5, True)),
    Row("overflow", ("pooling tokens", "pooling multi"), words("overflow"), _OVERFLOWS[:3], ("chunk", "cut", 5, True)),
    Row("overflow", ("openai sparse", "multi-vector", *CLASSIFY), words("overflow"), (("chunk", ERROR),),
        is_alone=True),
    Row("overflow", MESSAGES[:4], words("overflow"), _OVERFLOWS[:3], ("cut", 5)),
    Row("overflow", TEXTS, words("truncate"), (*_FLAG_CUTS, *_WORD_CUTS), ("end", 1, [])),
    Row("overflow", TEXTS, words("truncation"), _FLAG_CUTS, _NO_FLAG),
    Row("overflow", (*TEXTS, *RANKINGS), words("truncation_side"), _SIDES, ("Left", "up", 5), of="side"),
    Row("overflow", (*TEXTS, *RANKINGS), words("truncation_direction"), _DIRECTIONS, ("up", 5), of="side"),
    Row("overflow", (*TEXTS, *RANKINGS), words("truncate_prompt_tokens"), ((5, _CUTS), (-1, _CUTS)),
        (0, -2, 257, *_NO_NUMBER)),
    Row("overflow", RANKINGS, words("overflow"), _OVERFLOWS[:3], ("chunk", "cut", 5)),
    Row("overflow", RANKINGS, words("truncate"), (*_FLAG_CUTS, *_WORD_CUTS), ("end", 1, [])),
    Row("overflow", RANKINGS, words("truncation"), (*_FLAG_CUTS, ("true", _CUTS), ("False", _ONLY_ERROR)), ("yes", 1)),
    Row("overflow", TEI_TEXTS, words("truncate", inside=True), _FLAG_CUTS, _NO_FLAG),
    Row("overflow", TEI_TEXTS, words("truncation_direction", inside=True), _DIRECTIONS, ("up", 5), of="side"),
    Row("overflow", TEI_RERANK, words("truncate"), _FLAG_CUTS, _NO_FLAG),
    Row("overflow", TEI_RERANK, words("truncation_direction"), _DIRECTIONS, ("up", 5), of="side"),
    Row("overflow", ("ollama",), words("truncate"), ((True, _ONLY_CUT), (False, _ONLY_ERROR)), _NO_FLAG),
    Row("overflow", COHERE, words("truncate"), _WORD_CUTS, ("end", True, 5)),
    Row("max tokens", (*TEXTS, *RANKINGS), words("truncate_prompt_tokens"), ((5, 5), (-1, None)),
        (0, -2, 257, 2, *_NO_NUMBER)),
    Row("max tokens", OLLAMA, words("options.num_ctx"), ((5, 5), (8192, None)), (0, 2, "4k", 1.5)),
    Row("max tokens", COHERE, words("max_tokens"), ((5, 5), (128_000, None)), (0, 2, *_NO_NUMBER)),
    Row("max tokens of a document", RANKINGS, words("max_tokens_per_doc"), ((5, 5), (0, None)), (-1, *_NO_NUMBER)),
    Row("max tokens of a query", RANKINGS, words("max_tokens_per_query"), ((5, 5), (0, None)), (-1, *_NO_NUMBER)),
    Row("special tokens", TEXTS, words("add_special_tokens"), _FLAGS, _NO_FLAG),
    # --- prompts ---
    Row("prompt", PROMPTED, words("prompt"), (*same("mine: ", "", OWN_PROMPT, "x" * MAX_PROMPT_CHARS),),
        (5, "x" * (MAX_PROMPT_CHARS + 1), ["a"]), is_exclusive=True),
    Row("prompt", (*PROMPTED, *CLASSIFY), words("prompt_name"), _PROMPTS, _NO_PROMPT, is_exclusive=True),
    Row("prompt", (*PROMPTED, *CLASSIFY), words("input_type"), (*_PURPOSES, *_KINDS), _NO_PROMPT, is_exclusive=True),
    Row("prompt", (*OPENAI_DENSE, "zero-shot"), words("task"), (*_PURPOSES, *_KINDS), _NO_PROMPT, is_exclusive=True),
    Row("prompt", POOLING[:2], words("embedding_mode"), _PURPOSES[:1] + _PURPOSES[3:4], ("passage", 5),
        is_exclusive=True),
    Row("prompt", (*TEI_DENSE, "embed_all", *SIMILARITY), words("prompt_name", inside=True), _PROMPTS, _NO_PROMPT),
    Row("prompt", COHERE, words("input_type"), _PURPOSES, (*_NO_PROMPT, "image")),
    Row("prompt", (*PROMPTED, *CLASSIFY, *COHERE, *OLLAMA), words("model"), _NAMES, (5, ["m"])),
    Row("prompt", ("openai", *POOLING[:2], "zero-shot", *COHERE, *OLLAMA), words("model"), (), ("dense:nope",)),
    Row("role", ("openai sparse", "multi-vector"), words("input_type", "task"), (*_ROLES, *_KINDS), _NO_PROMPT,
        is_exclusive=True),
    Row("role", ("openai sparse", "multi-vector", "pooling multi"), words("prompt_name"), (("query", Role.QUERY),),
        _NO_PROMPT, is_exclusive=True),
    Row("role", ("pooling multi",), words("input_type"), (*_ROLES, *_KINDS), _NO_PROMPT, is_exclusive=True),
    Row("role", ("pooling multi",), words("embedding_mode"), (("query", Role.QUERY), ("document", Role.DOCUMENT)),
        ("passage", 5), is_exclusive=True),
    Row("role", TEI_SPARSE, words("input_type", inside=True), _ROLES, _NO_PROMPT),
    Row("role", TEI_SPARSE, words("prompt_name", inside=True), (("query", Role.QUERY), ("document", Role.DOCUMENT)),
        _NO_PROMPT),
    # --- what is computed ---
    Row("output", ("openai hybrid",), words("output"),
        (("dense", _DENSE), (["dense"], _DENSE), ("sparse", frozenset((Output.LEXICAL,))), ("multi-vector", _MULTI),
         (["sparse", "dense"], frozenset((Output.HYBRID,)))),("tokens", 5, [], ["dense", 5])),
    Row("output", ("openai hybrid",), words("return_multivector"),
        ((True, _MULTI), (False, frozenset(Output) - _MULTI)), _NO_FLAG),
    Row("output", ("pooling",), words("task"), (("embed", UNSAID), ("token_embed", Output.TOKENS)),
        ("classify", "tokens", 5)),
    Row("most weights", ("openai sparse", *TEI_SPARSE[:1]), words("top_k", "max_active_dims"), same(1, 3),
        (0, *_NO_NUMBER)),
    Row("most weights", TEI_SPARSE, words("parameters.top_k", "parameters.max_active_dims"), same(1, 3),
        (0, *_NO_NUMBER)),
    Row("least weight", ("openai sparse",), words("min_weight"), ((0.5, 0.5), (1, 1.0)), (-0.1, "1", True)),
    Row("least weight", TEI_SPARSE, words("min_weight", inside=True), ((0.5, 0.5), (1, 1.0)), (-0.1, "1", True)),
    Row("sparse format", ("openai sparse",), words("sparse_format"), (("map", True), ("lists", False)), ("list", 5)),
    Row("sparse tokens", ("openai sparse",), words("return_tokens"), _FLAGS, _NO_FLAG),
    Row("report", (*OPENAI_DENSE, *POOLING[:2]), words("report"), _FLAGS, _NO_FLAG),
    # --- inputs ---
    Row("inputs", (*OPENAI_DENSE, "pooling", "classify"), words("input"), (*_TEXT_INPUTS, *_OBJECTS, *_ID_INPUTS),
        (*_WRONG_INPUTS, *_WRONG_OBJECTS)),
    Row("inputs", ("classify tokens",), words("input"), (*_TEXT_INPUTS, *_OBJECTS), (*_WRONG_TEXTS, [1])),
    Row("inputs", (*TEI_DENSE, "embed_all", "embed_sparse"), words("inputs"), (*_TEXT_INPUTS, *_ID_INPUTS),
        (*_WRONG_INPUTS[:1], *_WRONG_INPUTS[2:])),
    Row("inputs", ("predict",), words("inputs"),
        (("b", ["b"]), (["b"], ["b"]), (["b", "c"], [Pair("b", "c")]), ([["b"], ["c"], ["d"]], ["b", "c", "d"]),
         ({"text": "b"}, ["b"]), ([{"text": "b", "text_pair": "c"}, ["d", "e"]], [Pair("b", "c"), Pair("d", "e")])),
        (5, [], ["a", "b", "c"], [["a"], ["b", "c"]], [["a", "b", "c"]], [[]], [["secret", 5]], [[["secret"]]],
         {"text": None, "text_pair": "secret"}, {"text": "a", "text_pair": ["secret"]}, [{"text_pair": "secret"}],
         [["secret"]] * 9)),
    Row("inputs", ("hub labels",), words("inputs"), (("b", ["b"]), (["b", "c"], ["b", "c"])), (5, [], ["a", 5])),
    Row("inputs", ("invocations pairs",), words("text_pairs"), (([["b", "c"]], [Pair("b", "c")]),),
        ("a", [], [["a", "b", "c"]], [["secret", 1]], [["a", "b"], None], [[1, 2]], [["a", "b"]] * 9)),
    Row("ids", ("detokenize", "cohere detokenize"), words("tokens"), (([1, 2], [[1, 2]]),), ("secret", [], [1, True])),
    Row("ids", ("decode",), words("ids"), (([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]])),
        ("secret", [], [1, "secret"])),
    Row("texts", ("tokenize",), words("prompt"), (("b", ["b"]), ("", [""])), (5, ["secret"])),
    Row("texts", ("cohere tokenize",), words("text"), (("b", ["b"]),), (5, ["secret"])),
    Row("texts", ("tei tokenize",), words("inputs"), (("b", ["b"]), (["b", "c"], ["b", "c"])), (5, [], ["secret", 5])),
    Row("inputs", ("predict tokens",), words("inputs"), _TEXT_INPUTS, _WRONG_TEXTS),
    Row("inputs", ("ollama",), words("input"), (("b", ["b"]), (["b", "c"], ["b", "c"])),
        (5, {}, ["a", 5], [1], [[1]], _TOO_MANY)),
    Row("inputs", ("ollama old",), words("prompt"), (("b", ["b"]),), (5, ["a"], {})),
    Row("inputs", COHERE, words("texts"), _TEXT_INPUTS, (*_WRONG_TEXTS, [[1, 2]], [{"text": "a"}])),
    Row("late chunks", ("openai", "invocations vllm"), words("late_chunking"),
        ((True, LateChunking(([(0, 1)],), are_inputs=True)), ({"max_tokens": 3}, LateChunking(max_tokens=3)),
         ({"ranges": [[0, 1]]}, LateChunking(([(0, 1)],))), (False, UNSAID)),
        (5, "yes", {}, {"max_tokens": 0}, {"max_tokens": 1, "ranges": [[0, 1]]}, {"ranges": [[2, 1]]}, {"ranges": [5]},
         {"ranges": []})),
    Row("conversations", MESSAGES[:4], words("messages"), ((_TALK, [_TALK]), ([_TALK, _TALK], [_TALK, _TALK])),
        (5, [], ["secret"], [_TALK, "secret"], [{"content": "secret"}], [{"role": "user", "content": 5}],
         [{"role": "user", "content": [{"type": "image", "secret": 1}]}])),
    Row("conversations", MESSAGES[4:], words("messages"), ((_TALK, [_TALK]),), (5, [], ["a"], [_TALK, _TALK])),
    Row("continued message", MESSAGES, words("continue_final_message"), ((True, True), (False, False)), _NO_FLAG,
        {"add_generation_prompt": False}),
    Row("generation prompt", MESSAGES, words("add_generation_prompt"), _FLAGS, _NO_FLAG),
    Row("variables of the template", MESSAGES, words("chat_template_kwargs"), (({"x": 5}, 5),), (5, "x")),
    Row("inputs", ("invocations text_inputs",), words("text_inputs"), (*_TEXT_INPUTS, *_ID_INPUTS), (5, ["a", None])),
    Row("inputs", ("cohere inputs",), words("inputs"),
        (([_content("b")], ["b"]), ([_content("b"), _content("")], ["b", ""])),
        (5, {}, [], ["a"], [{"text": "a"}], [_content("a", "b")], [_content(5)],
         [{"content": [{"type": "image_url"}]}])),
    # --- rankings ---
    Row("query", (*DOCUMENTS[:2], "nvidia", *TEI_RERANK), words("query"),
        (("x", ["x", "x"]), ({"text": "x"}, ["x", "x"])), (5, {}, ["x"])),
    Row("query", ("score",), words("text_1"), (("x", ["x", "x"]), (["x", "y"], ["x", "y"])), (5, [1])),
    Row("query", ("score queries", "score items"), words("queries"), (("x", ["x", "x"]), (["x", "y"], ["x", "y"])),
        (5, [1])),
    Row("query", ("score data",), words("data_1"), (("x", ["x", "x"]), (["x", "y"], ["x", "y"])), (5, [1])),
    Row("documents", (*DOCUMENTS[:2], "score queries"), words("documents"), _DOCUMENTS, _WRONG_DOCUMENTS),
    Row("documents", ("score items",), words("items"), _DOCUMENTS, _WRONG_DOCUMENTS),
    Row("documents", ("score data",), words("data_2"), _DOCUMENTS, _WRONG_DOCUMENTS),
    Row("documents", ("score",), words("text_2"), _DOCUMENTS, _WRONG_DOCUMENTS),
    Row("documents", ("nvidia",), words("passages"), _DOCUMENTS, _WRONG_DOCUMENTS),
    Row("documents", TEI_RERANK, words("texts"), _DOCUMENTS[:1], _WRONG_DOCUMENTS),
    Row("documents", DOCUMENTS[:2], words("texts"), ((["a", "b"], UNSAID),), (["x"], 5), is_alone=True),
    Row("documents", TEI_RERANK[1:], words("documents"), ((["a", "b"], UNSAID),), (["x"], 5), is_alone=True),
    Row("shape of rankings", ("rerank",), words("property"), (("", "query"), (5, "query"))),
    Row("scores", DOCUMENTS[:2], words("raw_scores"), _RAW, ("yes", 1)),
    Row("scores", (*DOCUMENTS[:2], "invocations pairs"), words("use_activation"), _ACTIVATED, ("yes", 1)),
    Row("scores", ("score", "invocations scores"), words("raw_scores"), _RAW, ("yes", 1)),
    Row("scores", ("score", "invocations scores"), words("use_activation"), _ACTIVATED, ("yes", 1)),
    Row("scores", ("tei rerank",), words("raw_scores"), _RAW, ("yes", 1)),
    Row("scores", ("root rerank",), words("raw_scores"), _FLAGS, ("yes", 1)),
    Row("number of results", DOCUMENTS, words("top_n", "top_k"), ((1, 1), (0, 2)), (-1, *_NO_NUMBER)),
    Row("number of results", TEI_RERANK, words("top_n"), ((1, 1), (9, 2), (0, 2)), (-1, *_NO_NUMBER)),
    Row("documents in the response", DOCUMENTS, words("return_documents"), _RAW, ("yes", 1)),
    Row("documents in the response", TEI_RERANK[:1], words("return_text"), _RAW, ("yes", 1)),
    Row("documents in the response", TEI_RERANK[1:], words("return_text", "return_documents"), _RAW, ("yes", 1)),
    Row("fields of documents", ("rerank", "voyage"), words("rank_fields"),
        ((["title"], ["T"]), (["text", "title"], ["a\nT"]), (["text"], ["a"])), ("title", [5], ["x"] * 33, ["n"]),
        {"documents": [{"text": "a", "title": "T", "n": 5}]}),
    Row("instruction", (*DOCUMENTS[:2], "score", "nvidia"), words("instruction"), (("by date", "by date"),),
        (5, ["a"])),
    # --- labels ---
    Row("activation", ("classify", "pooling scores"), words("use_activation"), ((True, "softmax"), (False, "identity")),
        _NO_FLAG),
    Row("activation", ("classify",), words("raw_scores"), ((True, "identity"), (False, "softmax")), _NO_FLAG),
    Row("activation", ("predict", "hub labels"), words("raw_scores", inside=True),
        ((True, "identity"), (False, UNSAID)), _NO_FLAG),
    Row("activation", ("predict", "hub labels"), words("function_to_apply", inside=True),
        (("none", "identity"), ("sigmoid", "sigmoid"), ("softmax", "softmax"), ("default", ABSENT)), ("tanh", 5)),
    Row("number of labels", ("predict", "hub labels"), words("top_k", inside=True), ((1, 1), (9, 3)), (0, *_NO_NUMBER)),
    Row("spans", ("classify tokens",), words("aggregation_strategy"),
        (("none", False), *((each, True) for each in ("simple", "first", "max", "average"))), ("most", 5)),
    Row("spans", ("predict tokens",), words("aggregation_strategy", inside=True),
        (("none", False), *((each, True) for each in ("simple", "first", "max", "average"))), ("most", 5)),
    Row("labels left out", ("classify tokens",), words("ignore_labels"), ((["a", "b", "c"], 0), ([], UNSAID)),
        ("a", [5])),
    Row("labels left out", ("predict tokens",), words("ignore_labels", inside=True),
        ((["a", "b", "c"], 0), ([], UNSAID)), ("a", [5])),
    Row("temperature", ("zero-shot",), words("temperature"), ((1, UNSAID), (0.001, 1.0)), (0, "1", True)),
    Row("candidates", ("choose",), words("candidate_labels", inside=True),
        tuple((each, ["b", "c"]) for each in (["b", "c"], "b, c", " b,,c ")),
        ([], "", " , ", ["b", ""], ["b", 5], 5, {"secret": 1}, ["b"] * 9)),
    Row("hypothesis", ("choose",), words("hypothesis_template", inside=True), (("It is {}!", {"It is {}!"}),),
        ("", "no place", "{} and {}", "{} in {0}", "{}}", 5, ["{}"]),
        {"candidate_labels": ["b", "c"]}),
    Row("several true labels", ("choose",), words("multi_label", inside=True), _FLAGS, _NO_FLAG,
        {"candidate_labels": ["b", "c"]}),
    # --- tokens ---
    Row("added special tokens", ("tokenize", "tei tokenize"), words("add_special_tokens"), _FLAGS, _NO_FLAG),
    Row("skipped special tokens", ("decode",), words("skip_special_tokens"), _FLAGS, _NO_FLAG),
    Row("strings of tokens", ("tokenize",), words("return_token_strs"), _FLAGS, _NO_FLAG),
    Row("prompt of tokens", ("tei tokenize",), words("prompt_name"), _PROMPTS, _NO_PROMPT),
    Row("prompt of tokens", ("tokenize",), words("model"), _NAMES, (5, "dense:nope")),
    # --- the request itself ---
    Row("priority", (*TEXTS, *RERANK, *COHERE), words("priority"), (*_PRIORITIES, *_NUMBERED), ("high", 1.5, True, [])),
    Row("priority", EMBEDDING, words("header x-vecd-priority"), _PRIORITIES, ("Bulk", "1", "")),
    Row("timeout", EMBEDDING, words("header x-vecd-timeout-ms"), (("1500", 1.5), ("1", 0.001)),
        ("0", "-1", "1.5", "soon", "86400001")),
    Row("timeout", ("openai",), words("header x-vecd-timeout-ms"), (("86400000", 86400.0), ("0010", 0.01)),
        ("", "1e3", "+1", " 1", "1_0", "\xb2", "9" * 5000, "1, 1")),
    Row("request id", (*TEXTS, *RERANK), words("request_id"), (*same("mine-1"), ("no id!", UNSAID)), (5, ["a"])),
    Row("keep alive", OLLAMA, words("keep_alive"), (("5m", 300.0), (30, 30.0)), ("soon", {}, [])),
    Row("lines", ("pull",), words("stream"), _FLAGS, _NO_FLAG),
    # --- accepted, and of no effect; or refused, because they would have one ---
    Row("nothing", (*TEXTS, *RERANK), words("user"), (("u", UNSAID), (5, UNSAID), ({}, UNSAID))),
    Row("nothing", (*OPENAI, *POOLING), words("modality"), (("text", UNSAID),), ("image", 5)),
    Row("nothing", TEXTS, words("padding"), (("max_length", UNSAID), ("do_not_pad", UNSAID)), (True, "left")),
    Row("nothing", (*OPENAI, *POOLING), words("chat_template", "mm_processor_kwargs", "late_chunking_params"), (),
        ("x", {}, True)),
    Row("nothing", POOLING, words("return_multivector", "late_chunking"), ((False, UNSAID),), (True, {})),
    Row("nothing", COHERE, words("images"), (([], UNSAID),), (["data:image/png;base64,AA"],)),
    Row("nothing", ("show",), words("verbose"), ((True, UNSAID),)),
    Row("nothing", EMBEDDING, words("unknown"), (({"a": 1}, UNSAID),)),
    Row("nothing", OLLAMA, words("options"), (({"temperature": 1}, UNSAID),), ([], "x")),
    Row("nothing", TEI_TEXTS, words("parameters"), (({"unknown": 1}, UNSAID),), (["truncate"], 5)),
    Row("nothing", ("show by name", "pull by name"), words("name"), (("m:latest", UNSAID), ("dense", UNSAID)),
        (5, "dense:nope")),
    Row("nothing", ("show", "pull"), words("model"), (("m:latest", UNSAID), ("dense", UNSAID)), (5, "dense:nope")),
    Row("nothing", (*RERANK, "nvidia", "detokenize", "cohere tokenize", "cohere detokenize"), words("model"),
        (("m", UNSAID), ("", UNSAID)), (5, ["m"])),
)  # fmt: skip
