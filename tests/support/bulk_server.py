"""A server of made-up vectors that fails as a test tells it to, so that `vecd embed` meets every kind of trouble.

Each text has one vector, which `vector_of` knows, so every row of an output can be checked.
"""

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


class QuietServer(ThreadingHTTPServer):
    """A client that does not speak its protocol is no error of a test."""

    def handle_error(self, request: object, client_address: object) -> None:
        pass


class BulkServer:
    """In threads of its own. To be closed by `with`."""

    def __init__(self, fail: Fail = lambda texts: None, certificate: Certificate | None = None) -> None:
        self.fail = fail
        self.model = "made-up"
        self.dim = DIM
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer(200, orjson.dumps({"max_input_length": 256, "max_client_batch_size": 2048}), {})

            def do_POST(self) -> None:
                body = orjson.loads(self.rfile.read(int(self.headers["content-length"])))
                server.bodies.append(body)
                server.headers.append(dict(self.headers.items()))
                texts = body["input"]
                failure = server.fail(texts)
                if failure is None:
                    rows = np.array(
                        [vector_of(text, server.model)[: server.dim] for text in texts],
                        body.get("output_dtype", "float32"),
                    )
                    told = {"x-vecd-tokens": str(len(texts)), "x-vecd-dimensions": str(server.dim), "x-vecd-model": "m"}
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
        return [text for body in self.bodies for text in body["input"] if text != PROBE]

    def __enter__(self) -> "BulkServer":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
