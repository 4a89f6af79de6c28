"""`vecd check --fleet` with nodes that do not know the identity of their model, yet or ever."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from vecd.launch.check import fleet
from vecd.launch.check.fleet import TEXTS
from vecd.launch.check.fleet_command import main


class SilentNode(BaseHTTPRequestHandler):
    """Knows the identity of its model from some request on."""

    protocol_version = "HTTP/1.1"
    num_unknown = 0

    def do_GET(self) -> None:
        if self.path == "/info":
            info = {"version": "1", "max_input_length": 256, "max_client_batch_size": 32, "model_dtype": "float32"}
            return self.answer(info)
        type(self).num_unknown -= 1
        identity = None if self.num_unknown >= 0 else "a;dtype=float32"
        return self.answer({"data": [{"id": "m", "root": "m", "capabilities": ["dense"], "identity": identity}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.answer({"data": [{"embedding": base64.b64encode(bytes(4 * 8)).decode()} for _ in TEXTS]})

    def answer(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(("num_unknown", "exit_code"), [(3, 0), (100, 2)])
def test_nodes_that_do_not_know_their_identity_cannot_be_compared(
    num_unknown: int, exit_code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fleet, "_PAUSE_S", 0.0)
    monkeypatch.setattr(SilentNode, "num_unknown", num_unknown)
    with ThreadingHTTPServer(("127.0.0.1", 0), SilentNode) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        urls = [f"http://{host}:{server.server_port}" for host in ("127.0.0.1", "localhost")]
        assert main(["--fleet", *urls]) == exit_code
        server.shutdown()
    said = capsys.readouterr().out
    for url in urls:
        assert (f"{url}: cannot be compared: the identity of m is not known there" in said) == (exit_code == 2)
