"""`vecd top`: a running server, live in a terminal.

Owns the flags, the order of things (request, draw, wait), and what keys and signals do. Speaks only HTTP. Called as
`vecd top` or `python -m vecd.client.top.command`.
"""

import asyncio
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson

from vecd.base.flags import TlsOptions, flag, number, parse
from vecd.base.programs import not_installed
from vecd.base.target import Target
from vecd.client.top.figures import (
    Figures,
    History,
    Stats,
    StatsRefused,
    StatsUnavailable,
    fetch_stats,
    render_stats_request,
)

_INTERVALS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 3600.0)
_SIGNALS = {
    **dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT), "q"),
    signal.SIGWINCH: "resized",
    signal.SIGTSTP: "stopped",
}
_KEYS = {"Q": "q", "\x04": "q", "P": "p", " ": "p", "=": "+", "_": "-"}
"""By another way to type it, a key."""
_FILE_COLUMNS = 100


@dataclass(frozen=True, kw_only=True)
class TopOptions(TlsOptions):
    """Immutable. Raises ValueError when the server's address or the key cannot be used, or nothing can be drawn."""

    url: str = flag(
        "http://host:port, https://host:port or unix:/path (http://127.0.0.1:8000); of the admin listener, if the "
        "server has one",
        default="http://127.0.0.1:8000",
    )
    api_key: str | None = flag(
        "one that has the scope metrics; better set as VECD_API_KEY, a flag shows in ps", variable="VECD_API_KEY"
    )
    interval: float = flag(
        "seconds from one answer to the next request (1)",
        default=1.0,
        read=number("seconds", _INTERVALS_S[-1], least=_INTERVALS_S[0]),
        metavar="S",
    )
    once: bool = flag("print one picture, of that many seconds, as plain text", default=False)
    json: bool = flag("print one JSON object for each interval instead", default=False)

    def __post_init__(self) -> None:
        render_stats_request(self.target, self.api_key)  # whether the key can be sent
        if self.json:
            return
        if importlib.util.find_spec("rich") is None:
            raise ValueError(f"drawing needs rich, which is {not_installed('vecd[cli]')}; --json does not")
        if not self.once and (not sys.stdout.isatty() or os.environ.get("TERM") in (None, "", "dumb")):
            raise ValueError("standard output is not a terminal that can be drawn on: use --once or --json")

    @cached_property
    def target(self) -> Target:
        return self.read_target(self.url)

    async def fetch(self) -> Stats:
        """Raises StatsUnavailable or StatsRefused."""
        return await fetch_stats(self.target, self.api_key)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 ended by the user, 1 the server refuses its figures or did not answer --once, 2 bad arguments."""
    options = parse(
        TopOptions,
        argv,
        prog="vecd top",
        description="Show what a running server does: rates, latency by stage, queue, workers, memory. "
        "Keys: q quits, p pauses the picture, + and - change the interval.",
    )
    try:
        asyncio.run(_write(options) if options.json or options.once else Watch(options).run())
    except StatsRefused as error:
        print(f"vecd top: {error}", file=sys.stderr)
        return 1
    except StatsUnavailable as error:
        print(f"vecd top: {options.target} does not answer: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # the reader of --json has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


# --- without a terminal ----------------------------------------------------------------------------------------


async def _write(options: TopOptions) -> None:
    """Raises StatsRefused; with --once also StatsUnavailable."""
    history = History()
    while True:
        line: dict[str, Any] = {"target": str(options.target), "error": None}
        try:
            figures = history.add(await options.fetch())
        except StatsUnavailable as error:
            if options.once:
                raise
            print(orjson.dumps({**line, "error": f"no answer: {error}"}).decode(), flush=True)
        else:
            if figures["elapsed_s"] is not None:
                if options.json:
                    print(orjson.dumps({**line, **figures}).decode(), flush=True)
                else:
                    _write_picture(options, figures, history)
                if options.once:
                    return
        await asyncio.sleep(options.interval)


def _write_picture(options: TopOptions, figures: Figures, history: History) -> None:
    from rich.console import Console

    from vecd.client.top.view import Scene

    console = Console(
        width=None if sys.stdout.isatty() else int(os.environ.get("COLUMNS") or _FILE_COLUMNS),
        no_color=True,
        force_terminal=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    scene = Scene(target=str(options.target), interval_s=options.interval, figures=figures, rates=tuple(history.rates))
    with console.capture() as captured:
        console.print(scene)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


# --- on a terminal ---------------------------------------------------------------------------------------------


class Watch:
    """Keeps the picture up to date. `run` once."""

    def __init__(self, options: TopOptions) -> None:
        from vecd.client.top.view import Scene, Terminal  # rich is an extra, and --json needs none

        self._options = options
        self._history = History()
        self._latest: Figures | None = None
        """As `figures` of the scene, which stay while it is paused."""
        self._scene = Scene(target=str(options.target), interval_s=options.interval)
        self._terminal = Terminal(self._scene)
        self._scene.has_keys = self._terminal.keyboard is not None
        self._events: asyncio.Queue[str] = asyncio.Queue()
        """Keys, and the names of what else there is to draw or to do."""

    async def run(self) -> None:
        """Until q, Ctrl-C or SIGTERM. Raises StatsRefused."""
        loop, happen = asyncio.get_running_loop(), self._events.put_nowait
        for signal_number, event in _SIGNALS.items():
            loop.add_signal_handler(signal_number, happen, event)
        with self._terminal, suppress(OSError):  # OSError: the terminal has gone
            if self._terminal.keyboard is not None:
                loop.add_reader(self._terminal.keyboard, self._read_keys)
            reading = self._start_reading()
            try:
                self._terminal.draw()
                while (event := await self._next_event(reading)) != "q":
                    if event == "due":
                        reading = self._start_reading()
                        continue
                    self._handle(event)
                    self._terminal.draw()
            finally:
                reading.cancel()
                if self._terminal.keyboard is not None:
                    loop.remove_reader(self._terminal.keyboard)

    def _read_keys(self) -> None:
        for key in self._terminal.keys() or "q":
            self._events.put_nowait(_KEYS.get(key, key))

    async def _next_event(self, reading: "asyncio.Task[float]") -> str:
        """Raises StatsRefused."""
        # From one answer to the next request, so that a server that reads its processes' times once a second reads them
        # again for each.
        due_at = reading.result() + self._scene.interval_s if reading.done() else None
        try:
            async with asyncio.timeout_at(due_at):
                return await self._events.get()
        except TimeoutError:
            return "due"

    def _handle(self, event: str) -> None:
        scene = self._scene
        match event:
            case "p":
                scene.is_paused = not scene.is_paused
                self._show_latest()
            case "+":
                scene.interval_s = min((s for s in _INTERVALS_S if s > scene.interval_s), default=scene.interval_s)
            case "-":
                scene.interval_s = max((s for s in _INTERVALS_S if s < scene.interval_s), default=scene.interval_s)
            case "stopped":
                self._terminal.stop()

    def _start_reading(self) -> "asyncio.Task[float]":
        reading = asyncio.create_task(self._read())
        reading.add_done_callback(lambda _: self._events.put_nowait("answered"))
        return reading

    async def _read(self) -> float:
        """Returns when the answer came, by the clock of the event loop. Raises StatsRefused."""
        try:
            self._latest = self._history.add(await self._options.fetch())
            self._scene.trouble = None
        except StatsUnavailable as error:
            self._scene.trouble = f"no answer, trying again: {error}"
        self._show_latest()
        return asyncio.get_running_loop().time()

    def _show_latest(self) -> None:
        scene = self._scene
        if not scene.is_paused or scene.figures is None:
            scene.figures = self._latest
            scene.rates, scene.num_restarts = tuple(self._history.rates), self._history.num_restarts


if __name__ == "__main__":
    sys.exit(main())
