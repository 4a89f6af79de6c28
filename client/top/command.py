"""`vecd top`: a running server, live in a terminal.

Owns the flags, the order of things (request, draw, wait), and what keys and signals do. Speaks only HTTP.
"""

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson

from vecd.base.flags import Command, TlsOptions, flag, parse
from vecd.base.programs import are_installed, not_installed
from vecd.client.aio import AsyncClient
from vecd.client.exchanges import VecdError
from vecd.client.top.figures import History, fetch_stats, is_final

_INTERVALS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 3600.0)
_SIGNALS = {
    **dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT), "q"),
    signal.SIGWINCH: "resized",
    signal.SIGTSTP: "stopped",
}
_KEYS = {"Q": "q", "\x04": "q", "P": "p", " ": "p", "=": "+", "_": "-"}
"""By another way to type it, a key."""
_MAX_KEYS = 64
_FILE_COLUMNS = 120
_TIMEOUT_S = 5.0
"""A supervisor replaces a gateway that hangs this long."""


@dataclass(frozen=True, kw_only=True)
class TopOptions(TlsOptions):
    """Immutable. Raises ValueError when the server's address or the key cannot be used, or nothing can be drawn."""

    url: str = flag(
        "http://127.0.0.1:8000",
        "http://host:port, https://host:port or unix:/path (http://127.0.0.1:8000); of the admin listener, if the "
        "server has one",
    )
    api_key: str | None = flag(
        None, "one that has the scope metrics; better set as VECD_API_KEY, a flag shows in ps", variable="VECD_API_KEY"
    )
    interval: float = flag(
        1.0,
        "seconds from one answer to the next request (1)",
        at_least=_INTERVALS_S[0],
        at_most=_INTERVALS_S[-1],
        unit="seconds",
    )
    once: bool = flag(False, "print one picture, of that many seconds, as plain text")
    json: bool = flag(False, "print one JSON object for each interval instead")

    def __post_init__(self) -> None:
        _ = self.client  # whether the key can be sent
        if self.json:
            return
        if not are_installed("rich"):
            raise ValueError(f"drawing needs rich, which is {not_installed('vecd[cli]')}; --json does not")
        if not self.once and (not sys.stdout.isatty() or os.environ.get("TERM") in (None, "", "dumb")):
            raise ValueError("standard output is not a terminal that can be drawn on: use --once or --json")

    @cached_property
    def client(self) -> AsyncClient:
        target = self.read_target(self.url)
        return AsyncClient.of_command(target, "vecd-top", api_key=self.api_key, retry_for=0, timeout=_TIMEOUT_S)


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 ended by the user, 1 the server refuses its figures or did not answer --once, 2 bad arguments."""
    options = parse(
        TopOptions,
        argv,
        Command(
            "vecd top",
            "Show what a running server does: rates, latency by stage, queue, workers, memory. "
            "Keys: q quits, p pauses the picture, + and - change the interval.",
        ),
    )
    try:
        asyncio.run(_write(options) if options.json or options.once else Watch(options).run())
    except VecdError as error:
        print(f"vecd top: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # the reader of --json has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


async def _write(options: TopOptions) -> None:
    """Without a terminal. Raises VecdError."""
    history = History()
    while True:
        line: dict[str, Any] = {"target": str(options.client.target), "error": None}
        try:
            line |= history.add(await fetch_stats(options.client))
        except VecdError as error:
            if options.once or is_final(error):
                raise
            line["error"] = f"no answer: {error}"
        if line["error"] or line["elapsed_s"] is not None:
            if options.json:
                print(orjson.dumps(line).decode(), flush=True)
            else:
                from vecd.client.top.view import Scene

                scene = Scene(target=line["target"], interval_s=options.interval, figures=line, rates=history.rates)
                width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _FILE_COLUMNS
                _console(width=width, no_color=True, force_terminal=False).print(scene)
            if options.once:
                return
        await asyncio.sleep(options.interval)


def _console(**options: Any) -> Any:
    from rich.console import Console  # an extra, and --json needs none

    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    return Console(highlight=False, markup=False, emoji=False, **options)


class Watch:
    """Keeps the picture on a terminal up to date. `run` once."""

    def __init__(self, options: TopOptions) -> None:
        from vecd.client.top.view import Scene

        self._client = options.client
        self._history = History()
        self._keyboard = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._scene = Scene(
            target=str(self._client.target), interval_s=options.interval, has_keys=self._keyboard is not None
        )
        self._events: asyncio.Queue[str | VecdError] = asyncio.Queue()
        """Keys, the names of what else there is to draw or to do, and what ends it."""

    async def run(self) -> None:
        """Until q, Ctrl-C or SIGTERM. Raises VecdError."""
        loop = asyncio.get_running_loop()
        for signal_number, name in _SIGNALS.items():
            loop.add_signal_handler(signal_number, self._events.put_nowait, name)
        if self._keyboard is not None:
            loop.add_reader(self._keyboard, self._read_keys)
        event: str | VecdError = "q"
        with suppress(OSError, termios.error):  # the terminal has gone
            while (event := await self._draw()) == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)  # not SIGTSTP, which is handled here: a shell sees no difference
        if isinstance(event, VecdError):
            raise event

    async def _draw(self) -> str | VecdError:
        """Returns which event ended it, with the terminal as it was. Raises OSError when the terminal has gone."""
        from rich.live import Live

        for name in ("COLUMNS", "LINES"):  # rich would believe them, and they do not change with the terminal
            os.environ.pop(name, None)
        console = _console(force_terminal=True, force_interactive=True)
        polling = asyncio.create_task(self._poll())
        try:
            with (
                _keys_without_enter(self._keyboard),
                Live(self._scene, console=console, screen=True, auto_refresh=False, redirect_stderr=False) as live,
            ):
                while isinstance(event := await self._events.get(), str) and event not in ("q", "stopped"):
                    self._take(event)
                    if event in ("p", "+", "-"):  # requested anew: what is shown, and how often, has changed
                        polling.cancel()
                        polling = asyncio.create_task(self._poll())
                    live.refresh()
        finally:
            polling.cancel()
        return event

    def _take(self, event: str) -> None:
        scene = self._scene
        match event:
            case "p":
                scene.is_paused = not scene.is_paused
            case "+":
                scene.interval_s = min((s for s in _INTERVALS_S if s > scene.interval_s), default=scene.interval_s)
            case "-":
                scene.interval_s = max((s for s in _INTERVALS_S if s < scene.interval_s), default=scene.interval_s)

    async def _poll(self) -> None:
        scene = self._scene
        while True:
            try:
                figures = self._history.add(await fetch_stats(self._client))
                scene.trouble = None
                if not scene.is_paused or scene.figures is None:
                    scene.figures, scene.rates = figures, tuple(self._history.rates)
            except VecdError as error:
                if is_final(error):
                    self._events.put_nowait(error)
                    return
                scene.trouble = f"no answer, trying again: {error}"
            self._events.put_nowait("answered")
            # From an answer on, so that a server that reads its processes' times once a second reads them for each.
            await asyncio.sleep(scene.interval_s)

    def _read_keys(self) -> None:
        keys = ""
        with suppress(OSError):
            keys = os.read(self._keyboard or 0, _MAX_KEYS).decode("latin-1")
        for key in keys or "q":  # the terminal has gone
            self._events.put_nowait(_KEYS.get(key, key))


@contextmanager
def _keys_without_enter(keyboard: int | None) -> Iterator[None]:
    if keyboard is None:
        yield
        return
    modes = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:
        yield
    finally:
        with suppress(termios.error):
            termios.tcsetattr(keyboard, termios.TCSADRAIN, modes)
