"""An HTTP server in threads of its own, whose answers are a method: what servers that fail as a test tells share."""

import ssl
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self, TypeAlias

from tests.support.certificates import Certificate

Answer: TypeAlias = tuple[int, bytes, dict[str, str]]


class _QuietServer(ThreadingHTTPServer):
    """A client that does not speak its protocol is no error of a test."""

    def handle_error(self, request: object, client_address: object) -> None:
        pass


class StubServer:
    """To be closed by `with`."""

    def __init__(self, certificate: Certificate | None = None) -> None:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # head and body are written apart: the client's delayed ACK is 40 ms

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                answer = server.answer(self.command, self.path, dict(self.headers.items()), body)
                if answer is None:
                    self.close_connection = True
                    return
                status, content, headers = answer
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._http = _QuietServer(("127.0.0.1", 0), Handler)
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

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer | None:
        """Status, body and headers; None: the connection is closed."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
