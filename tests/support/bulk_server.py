"""A server of made-up vectors that fails as a test tells it to, so that `vecd embed` meets every kind of trouble.

Each text has one vector, which `vector_of` knows, so every row of an output can be checked. With `capabilities` it has
other results in the shapes of the routes that have them, which `record_of` knows for each text or pair.
"""

import base64
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import orjson

from tests.support.certificates import Certificate
from tests.support.http_stub import Answer, StubServer
from vecd.client.embed.options import Pace
from vecd.client.embed.results import PROBE

DIM = 4
AT_ONCE = Pace(first_commit_s=0.01, commit_s=0.01, only_node_s=0.2)
"""For runs of `vecd embed` that take no second."""
Fail: TypeAlias = Callable[[list[str]], tuple[int, str] | None]
"""For the texts of a request: the status and message to answer with, or None. Status 0: the connection is closed."""


def identity_of(model: str) -> str:
    return f"{hashlib.md5(model.encode()).hexdigest()};dtype=float32"


def vector_of(text: str, model: str = "made-up") -> np.ndarray:
    digest = hashlib.sha256(f"{model}:{text}".encode()).digest()
    return np.frombuffer(digest[:DIM], "i1").astype("<f4") + np.float32(0.5)


def vectors_of(texts: list[str]) -> np.ndarray:
    return np.array([vector_of(text) for text in texts], np.float32).reshape(len(texts), DIM)


LABELS = ("no", "maybe", "yes")


def record_of(item: str, kind: str, model: str = "made-up") -> dict[str, Any]:
    """The columns of a text, or of the pair "text|text", that `vecd embed --results KIND` writes."""
    vector = vector_of(item, model).tolist()
    if kind == "scores":
        return {"score": float(1 / (1 + np.exp(-vector[0] / 20)))}
    if kind == "labels":
        order = sorted(range(len(LABELS)), key=lambda index: -vector[index])
        scores = [{"label": LABELS[index], "score": vector[index]} for index in order]
        return {**scores[0], "scores": scores}
    if kind == "entities":
        start = int(abs(vector[0])) % 5
        return {"entities": [{"label": "PER", "start": start, "end": start + 2, "score": vector[1]}]}
    if kind == "sparse":
        return {"indices": [1, 5 + int(abs(vector[0])), 900], "values": vector[:3]}
    return {"embeddings": [vector] * (1 + len(item) % 3)}


class BulkServer(StubServer):
    def __init__(self, fail: Fail = lambda texts: None, certificate: Certificate | None = None) -> None:
        super().__init__(certificate)
        self.fail = fail
        self.model = "made-up"
        self.capabilities: tuple[str, ...] = ()
        """In /info; empty: there is nothing of them, and vectors are dense."""
        self.num_info_failures = 0
        """That /info has before it is there."""
        self.dim = DIM
        self.nodes: list[tuple[str | None, str]] = []
        """Identity and model of the nodes that requests go to in turn; empty: there is one, of `model`."""
        self.told: dict[str, Any] = {}
        """What else /info says of the model."""
        self._num_routed = 0
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer | None:
        if method == "GET":
            model = {**({"capabilities": self.capabilities} if self.capabilities else {}), **self.told}
            info = {"max_input_length": 256, "max_client_batch_size": 2048, **({"model": model} if model else {})}
            self.num_info_failures -= 1
            return 503 if self.num_info_failures >= 0 else 200, orjson.dumps(info), {}
        fields = orjson.loads(body)
        self.bodies.append(fields)
        self.headers.append(dict(headers))
        texts = _items_of(fields)
        failure = self.fail(texts)
        identity, served = self.next_node()
        told = {} if identity is None else {"x-vecd-identity": identity}
        if identity is not None and headers.get("if-vecd-identity", identity) != identity:
            return 412, orjson.dumps({"error": {"message": "identity_mismatch"}}), told
        if failure is not None:
            status, message = failure
            return (status, orjson.dumps({"error": {"message": message}}), {"Retry-After": "0"}) if status else None
        if path != "/v1/embeddings" or "output" in fields:
            return 200, orjson.dumps(self.results(path, fields, texts, served)), told
        vectors = [vector_of(text, served)[: self.dim] for text in texts]
        told |= {"x-vecd-tokens": str(len(texts)), "x-vecd-dimensions": str(self.dim), "x-vecd-model": "m"}
        return 200, np.array(vectors, fields.get("output_dtype", "float32")).tobytes(), told

    @property
    def texts(self) -> list[str]:
        """All that it was asked for, samples left out."""
        return [text for body in self.bodies for text in _items_of(body) if text != PROBE]

    def next_node(self) -> tuple[str | None, str]:
        """Identity and model of the node that gets a request."""
        if not self.nodes:
            return identity_of(self.model), self.model
        self._num_routed += 1
        return self.nodes[self._num_routed % len(self.nodes)]

    def results(self, path: str, body: dict[str, Any], items: list[str], model: str) -> Any:
        """The response in the shape of a route that has no dense vectors alone."""
        if path == "/predict" and "token-classify" in self.capabilities:
            found = [record_of(item, "entities", model)["entities"] for item in items]
            return [[{"entity_group": each.pop("label"), "word": "w", **each} for each in every] for every in found]
        if path == "/predict":
            return [record_of(item, "labels", model)["scores"][: body.get("top_k")] for item in items]
        data = [record_of(item, "scores", model) if path == "/score" else _vectors(body, item, model) for item in items]
        return {"data": [{"index": n, **each} for n, each in enumerate(data)], "usage": {"prompt_tokens": len(items)}}


def _vectors(body: dict[str, Any], item: str, model: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "dense" in body["output"]:
        found["embedding"] = vector_of(item, model)
    if "sparse" in body["output"]:
        found["sparse"] = record_of(item, "sparse", model)
    if "multi-vector" in body["output"]:
        found["embeddings"] = np.array(record_of(item, "multi-vector", model)["embeddings"])
    as_base64 = body["encoding_format"] == "base64"
    dtype = body.get("output_dtype", "float32")
    return {name: _encoded(value, dtype, as_base64=as_base64) for name, value in found.items()}


def _items_of(body: dict[str, Any]) -> list[str]:
    """The texts of a request, or its pairs as "text|text"."""
    if "queries" in body:
        return [f"{query}|{document}" for query, document in zip(body["queries"], body["documents"], strict=True)]
    inputs: list[Any] = body["input"] if "input" in body else body["inputs"]
    return ["|".join(item) if isinstance(item, list) else item for item in inputs]


def _encoded(value: Any, dtype: str, *, as_base64: bool) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    return base64.b64encode(value.astype(dtype).tobytes()).decode() if as_base64 else value.tolist()
