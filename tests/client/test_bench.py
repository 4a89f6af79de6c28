import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from client.bench import main
from client.report import heading

DEADLINE_S = 60.0


def test_the_table_has_a_row_for_each_number_of_clients(
    start_server: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    server = start_server()
    assert main(["--url", server.url, "--clients", "1,2,3", "--requests", "6", "--warmup", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == heading()
    assert [line.split()[0] for line in lines[2:] if "busy" not in line] == ["1", "2", "3"]
    assert len(server.bodies) == 18


def test_a_unix_socket(start_server: Callable[..., Any], tmp_path: Path) -> None:
    server = start_server(unix_path=tmp_path / "s")
    assert main(["--url", server.url, "--clients", "2", "--requests", "6", "--warmup", "0"]) == 0
    assert len(server.bodies) == 6


def test_what_is_asked_for_is_sent(start_server: Callable[..., Any]) -> None:
    server = start_server()
    options = "--clients 1 --requests 1 --warmup 0 --texts-per-request 4 --words 3 --encoding-format float --model m"
    assert main(["--url", server.url, "--path", "/x", "--api-key", "k", *options.split()]) == 0
    body = server.bodies[0]
    assert [len(text.split()) for text in body["input"]] == [3, 3, 3, 3]
    assert (body["encoding_format"], body["model"]) == ("float", "m")
    assert server.heads[0].startswith(b"POST /x HTTP/1.1\r\n")
    assert b"Authorization: Bearer k\r\n" in server.heads[0]


def test_by_default_no_model_is_named_and_base64_is_asked_for(start_server: Callable[..., Any]) -> None:
    server = start_server()
    assert main(["--url", server.url, "--clients", "1", "--requests", "1", "--warmup", "0"]) == 0
    assert server.bodies[0].keys() == {"input", "encoding_format"}
    assert isinstance(server.bodies[0]["input"], str)
    assert server.bodies[0]["encoding_format"] == "base64"


def test_the_same_seed_sends_the_same_texts(start_server: Callable[..., Any]) -> None:
    server = start_server()
    for seed in ("1", "1", "2"):
        main(["--url", server.url, "--clients", "1", "--requests", "3", "--warmup", "0", "--seed", seed])
    first, second, other = (server.bodies[start : start + 3] for start in (0, 3, 6))
    assert first == second
    assert first != other


def test_each_run_is_one_line_of_json_without_the_key(start_server: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    server = start_server(lambda n: 200 if n % 2 else 503)
    options = "--clients 1,2 --requests 4 --warmup 0 --api-key s3cret --lengths lognormal:5,0.5"
    assert main(["--url", server.url, "--json", str(path), *options.split()]) == 0
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["clients"], second["clients"]) == (1, 2)
    assert first["requests"] == 2
    assert first["errors"] == {"HTTP 503": 2}
    assert first["lengths"] == "lognormal 5 words (sigma 0.5)"
    assert first["requests_per_s"] > 0
    assert first["p99_ms"] >= first["p50_ms"] > 0
    assert "s3cret" not in path.read_text()


def test_a_dead_server_is_one_clear_line_and_exit_1(dead_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", dead_url]) == 1
    assert capsys.readouterr().err.startswith(f"vecd bench: cannot connect to {dead_url}: ")


def test_without_a_single_success_the_exit_code_is_1(
    start_server: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    server = start_server(lambda _: 401)
    assert main(["--url", server.url, "--clients", "1", "--requests", "3", "--warmup", "0"]) == 1
    assert '3 × HTTP 401: {"error":{"message":"no luck"}}' in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--url", "https://127.0.0.1"],
        ["--url", "http://127.0.0.1:1/v1"],
        ["--clients", "0"],
        ["--clients", "1,x"],
        ["--duration", "0"],
        ["--duration", "inf"],
        ["--warmup", "-1"],
        ["--timeout", "nan"],
        ["--words", "0"],
        ["--lengths", "normal:1,1"],
        ["--encoding-format", "raw"],
        ["--path", "v1"],
        ["--json", "/nowhere/at/all"],
    ],
)
def test_bad_arguments_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert "vecd bench: error: " in capsys.readouterr().err


def test_an_interrupt_prints_what_was_measured(start_server: Callable[..., Any]) -> None:
    bench: list[subprocess.Popen[str]] = []

    def interrupt_at_100(n: int) -> int:
        if n == 100:
            os.kill(bench[0].pid, signal.SIGINT)
        return 200

    server = start_server(interrupt_at_100)
    command = [sys.executable, "-m", "client.bench", "--url", server.url, "--clients", "2,4", "--warmup", "0"]
    bench.append(subprocess.Popen([*command, "--duration", "600"], stdout=subprocess.PIPE, text=True))
    try:
        output, _ = bench[0].communicate(timeout=DEADLINE_S)
    finally:
        bench[0].kill()
        bench[0].wait()
    assert bench[0].returncode == 130
    rows = output.splitlines()[2:]
    assert rows[0].split()[0] == "2"
    assert "interrupted" in output
    assert not any(row.split()[0] == "4" for row in rows)
