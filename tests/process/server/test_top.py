"""`vecd top` in a real terminal, looking at a real server."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256

import httpx
import pytest

from tests.support.serving import Server, command_line, running_server
from vecd.client.top.command import main as top

DEADLINE_S = 60.0
BACK = b"\x1b[?1049l"
"""Leaves the alternate screen."""
HOME = b"\x1b[H"
"""Begins each picture."""
MODES = slice(0, 6)
"""Of termios' attributes: flags and speeds."""
EMBED_KEY, METRICS_KEY = "the-key-of-a-caller-0123456789", "the-key-of-a-dashboard-0123456789"


@dataclass(frozen=True)
class ModelInfo:
    server: Server
    admin_url: str


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[ModelInfo]:
    """With keys, two gateways, and figures on a listener of their own."""
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(
        "".join(
            f'[[keys]]\nname = "{name}"\nsha256 = "{sha256(key.encode()).hexdigest()}"\nscopes = ["{scope}"]\n'
            for name, key, scope in (
                ("caller", EMBED_KEY, "embed"),
                ("dashboard", METRICS_KEY, "metrics"),
                ("operator", "the-key-of-an-operator-0123456789", "admin"),  # for which the listener asks for keys
            )
        )
    )
    admin = keys.with_name("admin.sock")
    flags = ("--engine", "dummy", "--workers", "2", "--gateways", "2", "--keys-file", str(keys))
    with running_server(*flags, "--admin-uds", str(admin)) as server:
        yield ModelInfo(server, f"unix:{admin}")


def command(url: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "vecd", "top", "--url", url, *flags]


def environment(**changes: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VECD_")}
    return {**inherited, "TERM": "xterm-256color", **changes}


class Terminal:
    """A pseudo terminal with `vecd top` on it."""

    def __init__(self, argv: list[str], columns: int, lines: int, **env: str) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(columns, lines, is_told=False)
        self.modes = termios.tcgetattr(self.slave)
        self.written = b""
        self.process = subprocess.Popen(
            argv, stdin=self.slave, stdout=self.slave, stderr=self.slave, env=environment(**env), start_new_session=True
        )

    def resize(self, columns: int, lines: int, *, is_told: bool = True) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        if is_told:
            self.process.send_signal(signal.SIGWINCH)

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def read_until(self, is_there: Callable[[str], bool]) -> str:
        """The first picture of which it is true, without colours. What came before is forgotten."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            *pictures, unfinished = self.written.split(HOME)
            for number, picture in enumerate(pictures):
                text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", picture.decode())
                if is_there(text):
                    self.written = HOME.join([*pictures[number + 1 :], unfinished])
                    return text
            self._read(deadline)
        raise AssertionError(f"not seen in {DEADLINE_S} s; last: {self.written[-3000:]!r}")

    def read_to_end(self) -> str:
        """All that it writes until it has ended."""
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "it does not end"
            self._read(deadline, most_s=0.05)
        while self._read(time.monotonic()):
            pass
        return self.written.decode()

    def _read(self, deadline: float, most_s: float = 1.0) -> bytes:
        readable, _, _ = select.select([self.master], [], [], min(most_s, max(0.0, deadline - time.monotonic())))
        data = os.read(self.master, 65536) if readable else b""
        self.written += data
        return data

    def is_restored(self) -> bool:
        return termios.tcgetattr(self.slave)[MODES] == self.modes[MODES]


@contextmanager
def on_terminal(url: str, *flags: str, columns: int = 100, lines: int = 30, **env: str) -> Iterator[Terminal]:
    terminal = Terminal(command(url, *flags), columns, lines, **env)
    try:
        yield terminal
    finally:
        if terminal.process.poll() is None:
            terminal.process.kill()
            terminal.process.wait()
        os.close(terminal.master)
        os.close(terminal.slave)


@contextmanager
def load(served: ModelInfo) -> Iterator[None]:
    """One request after the other, and one of three is wrong."""
    stop = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=served.server.url, headers={"authorization": f"Bearer {EMBED_KEY}"}) as client:
            while not stop.is_set():
                client.post("/v1/embeddings", json={"input": ["a text", "another one"]}).raise_for_status()
                client.post("/embed", json={"inputs": "a text"}).raise_for_status()
                assert client.post("/v1/embeddings", json={"input": 5}).status_code == 400

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_it_shows_a_server_under_load_and_gives_the_terminal_back(served):
    with (
        load(served),
        on_terminal(served.admin_url, "--interval", "0.2", VECD_API_KEY=METRICS_KEY, COLUMNS="250") as terminal,
    ):
        # Counters and stages come at different times: the row "total" is there before its first value.
        rates = [rf"^{name} +[\d,.]*[1-9][\d,.]*/s" for name in ("inputs", "tokens")]
        patterns = (*rates, " ready", r"^total +[\d.]+ m?s", r"^errors +400 [\d.]+/s \([\d,]+\)")
        picture = terminal.read_until(lambda text: all(re.search(each, text, re.MULTILINE) for each in patterns))
        assert "all-MiniLM-L6-v2 · 384 dimensions · 256 tokens · mean" in picture
        assert METRICS_KEY not in picture
        assert not terminal.is_restored(), "keys come without Enter"
        terminal.resize(60, 20)
        small = terminal.read_until(lambda text: max(map(len, text.split("\n"))) <= 60)
        assert len(small.split("\n")) <= 20
        assert "total" in small
        terminal.type("p+")
        terminal.read_until(lambda text: "paused" in text and "every 0.5 s" in text)
        terminal.type("p")
        terminal.read_until(lambda text: "paused" not in text)
        terminal.type("q")
        written = terminal.read_to_end()
        assert terminal.process.returncode == 0
        assert written.endswith(BACK.decode())
        assert terminal.is_restored()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_gives_the_terminal_back(served, number):
    with on_terminal(served.admin_url, "--api-key", METRICS_KEY, NO_COLOR="1") as terminal:
        terminal.read_until(lambda text: "all-MiniLM-L6-v2" in text)
        assert not re.search(rb"\x1b\[[0-9;]*3[0-9]m", terminal.written), "NO_COLOR"
        if number is signal.SIGINT:
            # As Ctrl-C does; the terminal itself sends it only to whom it controls.
            os.killpg(terminal.process.pid, number)
        else:
            terminal.process.send_signal(number)
        assert terminal.read_to_end().endswith(BACK.decode())
        assert terminal.process.returncode == 0
        assert terminal.is_restored()


def test_stopped_it_gives_the_terminal_back_and_takes_it_again(served):
    with on_terminal(served.admin_url, "--interval", "0.2", VECD_API_KEY=METRICS_KEY) as terminal:
        terminal.read_until(lambda text: "all-MiniLM-L6-v2" in text)
        terminal.process.send_signal(signal.SIGTSTP)
        assert os.WIFSTOPPED(os.waitpid(terminal.process.pid, os.WUNTRACED)[1])
        assert terminal.is_restored()
        terminal.process.send_signal(signal.SIGCONT)
        terminal.written = b""
        terminal.read_until(lambda text: "all-MiniLM-L6-v2" in text)
        assert not terminal.is_restored()
        terminal.type("q")
        terminal.read_to_end()
        assert terminal.process.returncode == 0
        assert terminal.is_restored()


@pytest.mark.parametrize("is_tls", [False, True])
def test_whoever_is_refused_has_his_terminal_back_and_is_told_why(served, is_tls):
    url = served.server.url.replace("http:", "https:") if is_tls else served.admin_url
    with on_terminal(url, VECD_API_KEY=EMBED_KEY) as terminal:
        _, _, rest = terminal.read_to_end().partition(BACK.decode())
        assert terminal.process.returncode == 1
        assert ("it does not speak TLS" if is_tls else "does not have the scope 'metrics'") in rest
        assert terminal.is_restored()


def test_without_a_terminal_it_prints_one_picture_as_text(served):
    argv = command(served.admin_url, "--once", "--interval", "0.2")
    done = subprocess.run(
        argv, env=environment(VECD_API_KEY=METRICS_KEY), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "all-MiniLM-L6-v2" in done.stdout
    assert re.search(r"^2 gateways +answers/s", done.stdout, re.MULTILINE)


def test_for_programs_it_writes_a_line_of_json(served, capsys):
    assert top(["--url", served.admin_url, "--api-key", METRICS_KEY, "--once", "--json", "--interval", "0.2"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    frame = json.loads(line)
    assert frame["model"]["id"] == "all-MiniLM-L6-v2"
    assert frame["elapsed_s"] > 0.1
    assert [worker["state"] for worker in frame["workers"]] == ["ready", "ready"]


@pytest.mark.parametrize(
    ("url", "key", "words"),
    [
        ("admin", "", "--api-key, or VECD_API_KEY, is for one that has the scope metrics"),
        ("admin", "wrong", "Incorrect API key provided; --api-key"),
        ("admin", EMBED_KEY, "does not have the scope 'metrics'"),
        ("public", METRICS_KEY, "--admin-port"),
        ("unix:/nowhere/at/all", METRICS_KEY, "unix:/nowhere/at/all: [Errno 2] No such file"),
    ],
)
def test_without_access_it_says_what_is_missing(served, capsys, monkeypatch, url, key, words):
    monkeypatch.setenv("VECD_API_KEY", key)
    url = {"admin": served.admin_url, "public": served.server.url}.get(url, url)
    assert top(["--url", url, "--once"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err
    assert said.err.count("\n") == 1
    assert not key or key not in said.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "use --once or --json"),
        (("--once", "--interval", "nan"), "--interval"),
        (("--once", "--interval", "0.01"), "from 0.1 to 3600"),
        (("--once", "--url", "ftp://x"), "neither http://host:port nor https://host:port nor unix:/path"),
        (("--once", "--url", "http://x", "--insecure"), "only with https://"),
        (("--once", "--api-key", "a\nb"), "characters that cannot be sent"),
    ],
)
def test_what_it_cannot_do_it_says_in_one_line(capsys, flags, words):
    with pytest.raises(SystemExit) as ended:
        top(list(flags))
    assert ended.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_without_rich_it_says_how_to_have_it_and_json_needs_none(served, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        top(["--once"])
    assert ended.value.code == 2
    assert "pip install 'vecd[cli]'" in capsys.readouterr().err
    assert top(["--url", served.admin_url, "--api-key", METRICS_KEY, "--once", "--json", "--interval", "0.1"]) == 0


def test_a_server_that_goes_away_is_waited_for(served):
    """Last, because it ends the server: first the gateway that answers, then all of it."""
    with on_terminal(served.admin_url, "--interval", "0.1", VECD_API_KEY=METRICS_KEY) as terminal:
        terminal.read_until(lambda text: " ready" in text)
        gateways = [child for child in served.server.processes() if "vecd.child gateway" in command_line(child)]
        assert len(gateways) == 2
        for gateway in gateways:
            gateway.kill()
        # Their successors accept from the same socket; the question waits in it, and no picture is without figures.
        gone_pids = [str(gateway.pid) for gateway in gateways]
        back = terminal.read_until(
            lambda text: "gateway" in text and not any(pid in text for pid in gone_pids) and text.count(" ready") == 2
        )
        assert "no answer" not in back
        served.server.process.send_signal(signal.SIGTERM)
        gone = terminal.read_until(lambda text: "no answer" in text)
        served.server.process.wait(DEADLINE_S)
        assert "trying again" in gone
        assert "all-MiniLM-L6-v2" in gone, "what was last seen stays"
        terminal.type("q")
        terminal.read_to_end()
        assert terminal.process.returncode == 0
        assert terminal.is_restored()
