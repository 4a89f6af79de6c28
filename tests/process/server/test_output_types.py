"""`vecd serve` with --quantization-ranges: what int8 is then, and what is wrong with a file."""

import base64
import signal
import subprocess

import httpx
import numpy as np
import pytest

from tests.support.serving import clean_environment, eventually, running_server, vecd

_FLAGS = ("--engine", "weightless", "--workers", "1")
_TIMEOUT_S = 120
_RANGES = np.outer(np.array([-0.2, 0.25], dtype=np.float32), np.linspace(0.5, 1, 384, dtype=np.float32))


@pytest.fixture(scope="module")
def quantize_embeddings():
    from sentence_transformers.util import quantize_embeddings

    return quantize_embeddings


def ask(url: str, **fields) -> httpx.Response:
    body = {"model": "m", "input": ["a text", "another"], **fields}
    return httpx.post(f"{url}/v1/embeddings", json=body, timeout=_TIMEOUT_S)


def test_ranges_of_a_file_are_used_and_read_again_on_sighup(tmp_path, quantize_embeddings):
    path = tmp_path / "ranges.npy"
    np.save(path, _RANGES)
    with running_server(*_FLAGS, "--matryoshka", "--quantization-ranges", str(path)) as server:
        rows = np.frombuffer(ask(server.url, encoding_format="bytes").content, "<f4").reshape(2, 384)

        def codes() -> np.ndarray:
            data = ask(server.url, encoding_format="base64", output_dtype="int8").json()["data"]
            return np.array([np.frombuffer(base64.b64decode(item["embedding"]), "i1") for item in data])

        assert np.array_equal(codes(), quantize_embeddings(rows, "int8", ranges=_RANGES))
        refused = ask(server.url, output_dtype="int8", dimensions=128)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dimensions")

        path.write_bytes(b"no NumPy file")
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: "ranges.npy: is no NumPy file (.npy), or is cut off" in server.stderr)
        assert np.array_equal(codes(), quantize_embeddings(rows, "int8", ranges=_RANGES))

        np.save(path, 2 * _RANGES)
        server.process.send_signal(signal.SIGHUP)
        expected = quantize_embeddings(rows, "int8", ranges=2 * _RANGES)
        eventually(lambda: np.array_equal(codes(), expected))


def test_a_bad_file_is_one_line_and_no_server(tmp_path):
    np.save(tmp_path / "ranges.npy", _RANGES[:, 1:])
    command = [*vecd(*_FLAGS), "--port", "0", "--quantization-ranges", str(tmp_path / "ranges.npy")]
    (tmp_path / "tmp").mkdir()
    ended = subprocess.run(
        command,
        env=clean_environment(tmp_path, {}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 2
    [line] = [line for line in ended.stderr.splitlines() if "ranges.npy" in line]
    path = tmp_path / "ranges.npy"
    assert line == f"vecd: --quantization-ranges: {path}: must have the shape (2, 384), has (2, 383)"
    assert "Traceback" not in ended.stderr
