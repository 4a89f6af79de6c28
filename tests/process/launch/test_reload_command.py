"""What comes of a reload reaches whoever asked for it, for any server of this user."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from vecd.launch.systemd import reload_command
from vecd.launch.systemd.reload_command import ReloadSocket, main

# Takes requests for reloads, and says after a while what came of each, as the supervisor does.
SERVER = """
import asyncio, sys
from vecd.launch.systemd.reload_command import ReloadSocket
url, *problems = sys.argv[1:]

def request():
    if problems == ["ending"]:
        return None
    if problems == ["end"]:
        sys.exit()
    result = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.2, result.set_result, problems)
    return result

async def main():
    await server.listen()
    print("ready", flush=True)
    await asyncio.sleep(60)

server = ReloadSocket(request, lambda: url)
asyncio.run(main())
"""


@pytest.fixture
def start() -> Iterator[Callable[..., int]]:
    """Starts a server, with its address and the problems of its reload. Returns its process id."""
    with ExitStack() as stack:

        def start_server(*arguments: str) -> int:
            command = [sys.executable, "-c", SERVER, *arguments]
            server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(server.kill)
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            return server.pid

        yield start_server


def test_a_reload_that_is_done(start):
    assert main([str(start("http://127.0.0.1:60001"))]) == 0
    assert main(["--port", "60001"]) == 0


def test_one_that_is_refused_says_why(start, capsys):
    pid = start("http://127.0.0.1:60001", "port: cannot be changed", "model: there is none")
    assert main([str(pid)]) == 2
    assert capsys.readouterr().err == "port: cannot be changed\nmodel: there is none\n"


@pytest.mark.parametrize("how", ["end", "ending"])
def test_a_server_that_ends_meanwhile(how, start, capsys):
    assert main([str(start("http://127.0.0.1:60001", how))]) == 3
    assert "has ended meanwhile" in capsys.readouterr().err


def test_the_only_one_needs_no_name_and_one_of_several_does(start, capsys, monkeypatch):
    """Other servers of this machine are not asked."""
    pids = [start("http://127.0.0.1:60001"), start("unix:/run/vecd.sock")]
    found = list(reload_command.find_servers())
    for server in found:
        server.connection.close()
    assert {server.pid for server in found} >= set(pids)
    find_servers = reload_command.find_servers

    def find(ours: list[int]) -> Callable[[], Iterator[reload_command.RunningServer]]:
        return lambda: (server for server in find_servers() if server.pid in ours)

    monkeypatch.setattr(reload_command, "find_servers", find(pids[:1]))
    assert main([]) == 0
    monkeypatch.setattr(reload_command, "find_servers", find(pids))
    assert main([]) == 2
    told = capsys.readouterr().err
    assert "several servers of this user are running, name one:\n" in told
    assert f"  vecd reload {pids[1]}    unix:/run/vecd.sock\n" in told
    assert main(["--port", "60002"]) == 3
    assert "no server of this user is running on port 60002; these are running:" in capsys.readouterr().err
    monkeypatch.setattr(reload_command, "find_servers", find([]))
    assert main([]) == 3
    assert capsys.readouterr().err == "vecd reload: no server of this user is running\n"


def test_another_process_is_left_alone(capsys):
    """SIGHUP ends whoever does not know it."""
    with subprocess.Popen(["sleep", "60"]) as other:
        assert main([str(other.pid)]) == 3
        assert other.poll() is None
        other.kill()
    assert f"with the process id {other.pid}" in capsys.readouterr().err


def test_a_name_that_another_process_has_taken_is_not_believed():
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(reload_command.address_of(os.geteuid(), 9_999_999))
        other.listen()
        began_at = time.monotonic()
        assert main(["9999999"]) == 3
        assert time.monotonic() - began_at < 5, "nothing is read from it"


def test_a_server_whose_name_another_process_has_taken_says_so(caplog):
    async def listen() -> None:
        server = ReloadSocket(lambda: None, lambda: "")
        await server.listen()
        server.close()

    address = reload_command.address_of(os.geteuid(), os.getpid())
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(address)
        asyncio.run(listen())
        other.listen()
        asyncio.run(listen())
    told = f"has the socket @{address[1:]}"
    assert caplog.messages == [
        f"no `vecd reload` of this server: {who} {told}"
        for who in ("another process", f"process {os.getpid()} of user {os.geteuid()}")
    ]
    assert {record.levelname for record in caplog.records} == {"ERROR"}


def test_the_end_of_the_server_while_a_reload_is_waited_for_is_no_error(caplog):
    async def end() -> None:
        has_asked = asyncio.Event()

        def ask() -> "asyncio.Future[list[str]]":
            has_asked.set()
            return asyncio.get_running_loop().create_future()

        server = ReloadSocket(ask, lambda: "")
        await server.listen()
        _, writer = await asyncio.open_unix_connection(reload_command.address_of(os.geteuid(), os.getpid()))
        writer.write(b"reload\n")
        await has_asked.wait()
        writer.close()
        server.close()

    asyncio.run(end())  # which cancels what is left
    assert not caplog.messages


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may be another user")
def test_another_user_gets_no_answer(start):
    address = reload_command.address_of(0, start("http://127.0.0.1:60001"))
    code = "import os, socket, sys; os.setuid(65534); other = socket.socket(socket.AF_UNIX); "
    code += "other.connect(chr(0) + sys.argv[1]); other.settimeout(10); print(other.recv(100))"
    done = subprocess.run(
        [sys.executable, "-c", code, address[1:]], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "b''\n"


@pytest.mark.parametrize(
    "arguments", [["x"], ["0"], ["9" * 20], ["9" * 5000], ["-5"], ["2", "3"], ["--port"], ["--port", "x"]]
)
def test_bad_arguments(arguments, capsys):
    assert main(arguments) == 2
    assert "usage: vecd reload [PID | --port PORT]" in capsys.readouterr().err
