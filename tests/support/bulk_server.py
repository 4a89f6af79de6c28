"""A server of made-up vectors that fails as a test tells it to, so that `vecd embed` meets every kind of trouble.

Each text has one vector, which `vector_of` knows, so every row of an output can be checked. With `capabilities` it has
other results in the shapes of the routes that have them, which `record_of` knows for each text or pair.
"""

import base64
import hashlib
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

import numpy as np
import orjson

from tests.support.certificates import Certificate
from vecd.client.bulk.kinds import PROBE

DIM = 4
Fail: TypeAlias = Callable[[list[str]], tuple[int, str] | None]
"""For the texts of a request: the status and message to answer with, or None. Status 0: the connection is closed."""


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


class QuietServer(ThreadingHTTPServer):
    """A client that does not speak its protocol is no error of a test."""

    def handle_error(self, request: object, client_address: object) -> None:
        pass


class BulkServer:
    """In threads of its own. To be closed by `with`."""

    def __init__(self, fail: Fail = lambda texts: None, certificate: Certificate | None = None) -> None:
        self.fail = fail
        self.model = "made-up"
        self.capabilities: tuple[str, ...] = ()
        """In /info; empty: there is nothing of them, and vectors are dense."""
        self.dim = DIM
        self.nodes: list[tuple[str | None, str]] = []
        """Identity and model of the nodes that requests go to in turn; empty: a server that knows no identities."""
        self.told: dict[str, Any] = {}
        """What else /info says of the model."""
        self._num_routed = 0
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                model = {"capabilities": server.capabilities} if server.capabilities else {}
                model |= server.told
                info = {"max_input_length": 256, "max_client_batch_size": 2048, **({"model": model} if model else {})}
                self._answer(200, orjson.dumps(info), {})

            def do_POST(self) -> None:
                body = orjson.loads(self.rfile.read(int(self.headers["content-length"])))
                server.bodies.append(body)
                server.headers.append(dict(self.headers.items()))
                texts = _items_of(body)
                failure = server.fail(texts)
                identity, model = server.next_node()
                has_identity = {} if identity is None else {"x-vecd-identity": identity}
                if identity is not None and self.headers.get("if-vecd-identity", identity) != identity:
                    self._answer(412, orjson.dumps({"error": {"message": "identity_mismatch"}}), has_identity)
                elif failure is None and (self.path != "/v1/embeddings" or "output" in body):
                    self._answer(200, orjson.dumps(server.results(self.path, body, texts)), {})
                elif failure is None:
                    rows = np.array(
                        [vector_of(text, model)[: server.dim] for text in texts],
                        body.get("output_dtype", "float32"),
                    )
                    told = {"x-vecd-tokens": str(len(texts)), "x-vecd-dimensions": str(server.dim), "x-vecd-model": "m"}
                    told |= has_identity
                    self._answer(200, rows.tobytes(), told)
                elif failure[0] == 0:
                    self.close_connection = True
                else:
                    self._answer(failure[0], orjson.dumps({"error": {"message": failure[1]}}), {"Retry-After": "0"})

            def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._http = QuietServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.address = f"127.0.0.1:{self._http.server_port}"
        self.url = f"http://{self.address}"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate.cert, certificate.key)
            # The handshake is for the connection's own thread, by its first read.
            self._http.socket = context.wrap_socket(self._http.socket, server_side=True, do_handshake_on_connect=False)
            self.url = f"https://{self.address}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def texts(self) -> list[str]:
        """All that it was asked for, probes left out."""
        return [text for body in self.bodies for text in _items_of(body) if text != PROBE]

    def next_node(self) -> tuple[str | None, str]:
        """Identity and model of the node that gets a request."""
        if not self.nodes:
            return None, self.model
        self._num_routed += 1
        return self.nodes[self._num_routed % len(self.nodes)]

    def results(self, path: str, body: dict[str, Any], items: list[str]) -> Any:
        """The response in the shape of a route that has no dense vectors alone."""
        if path == "/score":
            data = [{"index": n, **record_of(item, "scores", self.model)} for n, item in enumerate(items)]
            return {"data": data, "usage": {"prompt_tokens": len(items)}}
        if path == "/predict" and "token-classify" in self.capabilities:
            found = [record_of(item, "entities", self.model)["entities"] for item in items]
            return [[{"entity_group": each.pop("label"), "word": "w", **each} for each in every] for every in found]
        if path == "/predict":
            return [record_of(item, "labels", self.model)["scores"][: body.get("top_k")] for item in items]
        return {"data": [self._vectors(body, item) for item in items], "usage": {"prompt_tokens": len(items)}}

    def _vectors(self, body: dict[str, Any], item: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if "dense" in body["output"]:
            found["embedding"] = vector_of(item, self.model)
        if "sparse" in body["output"]:
            found["sparse"] = record_of(item, "sparse", self.model)
        if "multi-vector" in body["output"]:
            found["embeddings"] = np.array(record_of(item, "multi-vector", self.model)["embeddings"])
        as_base64 = body["encoding_format"] == "base64"
        dtype = body.get("output_dtype", "float32")
        return {name: _encoded(value, dtype, as_base64=as_base64) for name, value in found.items()}

    def __enter__(self) -> "BulkServer":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


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
