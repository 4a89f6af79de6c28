"""`vecd top`: a running server, live in a terminal.

Owns the order of things: request, draw, wait, and what keys and signals do. Speaks only HTTP. Called as `vecd top` or
`python -m vecd.client.top.command`.
"""

import asyncio
import os
import signal
import sys
from contextlib import closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import orjson

from vecd.client.top.figures import History
from vecd.client.top.options import MAX_INTERVAL_S, MIN_INTERVAL_S, TopOptions, parse_options
from vecd.client.top.source import StatsRefused, StatsUnavailable

if TYPE_CHECKING:  # rich is an extra, and --json needs none
    from vecd.client.top.screen import Screen

_INTERVALS_S = (MIN_INTERVAL_S, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, MAX_INTERVAL_S)
"""The steps of + and -."""
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_FILE_COLUMNS = 100
"""Width of a picture that is written into a file."""


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 ended by the user, 1 the server refuses its figures or did not answer --once, 2 bad arguments."""
    options = parse_options(argv)
    try:
        asyncio.run(_run(options))
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


async def _run(options: TopOptions) -> None:
    if options.json:
        await _write_lines(options)
    elif options.once:
        await _print_once(options)
    else:
        from vecd.client.top.screen import Screen

        await Watch(options, Screen()).run()


# --- without a terminal ----------------------------------------------------------------------------------------


async def _write_lines(options: TopOptions) -> None:
    """Raises StatsRefused; with --once also StatsUnavailable."""
    history = History()
    with closing(options.source()) as source:
        while True:
            try:
                figures = history.add(await source.read())
            except StatsUnavailable as error:
                if options.once:
                    raise
                _write_line({"target": str(options.target), "error": f"no answer: {error}"})
            else:
                if figures.elapsed_s is not None:
                    _write_line({"target": str(options.target), "error": None, **asdict(figures)})
                    if options.once:
                        return
            await asyncio.sleep(options.interval)


def _write_line(line: dict[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(line).decode() + "\n")
    sys.stdout.flush()


async def _print_once(options: TopOptions) -> None:
    """Raises StatsRefused and StatsUnavailable."""
    from rich.console import Console

    from vecd.client.top.view import Scene, draw

    history = History()
    with closing(options.source()) as source:
        history.add(await source.read())
        await asyncio.sleep(options.interval)
        figures = history.add(await source.read())
    console = Console(no_color=True, force_terminal=False, highlight=False, markup=False, emoji=False)
    if not console.file.isatty():
        console.width = int(os.environ.get("COLUMNS") or _FILE_COLUMNS)
    scene = Scene(
        target=str(options.target),
        interval_s=options.interval,
        figures=figures,
        trends=history.trends(),
        is_ascii=console.options.ascii_only,
    )
    with console.capture() as captured:
        console.print(draw(scene, console.width, None))
    sys.stdout.write("\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n")


# --- on a terminal ---------------------------------------------------------------------------------------------


class Watch:
    """Keeps the picture up to date. `run` once."""

    def __init__(self, options: TopOptions, screen: "Screen") -> None:
        from vecd.client.top.view import Scene

        self._source = options.source()
        self._screen = screen
        self._history = History()
        self._scene = Scene(
            target=str(options.target),
            interval_s=options.interval,
            figures=None,
            trends=self._history.trends(),
            has_keys=screen.keyboard is not None,
            is_ascii=screen.console.options.ascii_only,
        )
        """The picture as it is drawn. While it is paused, its figures and trends stay."""
        self._latest = self._scene
        """The same with the latest figures."""
        self._is_ending = False
        self._is_stopping = False
        self._changed = asyncio.Event()
        self._interval_changed = asyncio.Event()

    async def run(self) -> None:
        """Until q, Ctrl-C or SIGTERM. Raises StatsRefused."""
        loop = asyncio.get_running_loop()
        for number in _END_SIGNALS:
            loop.add_signal_handler(number, self._end)
        loop.add_signal_handler(signal.SIGWINCH, self._changed.set)
        loop.add_signal_handler(signal.SIGTSTP, self._stop)
        if self._screen.keyboard is not None:
            loop.add_reader(self._screen.keyboard, self._read_keys)
        reading = asyncio.create_task(self._keep_reading())
        reading.add_done_callback(lambda _: self._changed.set())
        try:
            with self._screen:  # after its signals are handled
                await self._keep_drawing(reading)
        finally:
            if self._screen.keyboard is not None:
                loop.remove_reader(self._screen.keyboard)
            reading.cancel()
            self._source.close()

    async def _keep_drawing(self, reading: "asyncio.Task[None]") -> None:
        from vecd.client.top.view import draw

        while not self._is_ending:
            if reading.done():
                reading.result()
            if self._is_stopping:
                self._is_stopping = False
                self._screen.stop()
            self._changed.clear()
            try:
                self._screen.draw(lambda width, height: draw(self._scene, width, height))
            except OSError:  # the terminal has gone
                return
            await self._changed.wait()

    async def _keep_reading(self) -> None:
        """Raises StatsRefused."""
        while True:
            try:
                figures = self._history.add(await self._source.read())
                self._change(figures=figures, trends=self._history.trends(), trouble=None)
            except StatsUnavailable as error:
                self._change(trouble=f"no answer, trying again: {error}")
            await self._pause_between()

    async def _pause_between(self) -> None:
        """Wait from one answer to the next request, so that a server that reads its processes' times once a second
        reads them again for each."""
        answered_at = asyncio.get_running_loop().time()
        while True:
            self._interval_changed.clear()
            try:
                async with asyncio.timeout_at(answered_at + self._scene.interval_s):
                    await self._interval_changed.wait()
            except TimeoutError:
                return

    def _change(self, **changes: Any) -> None:
        """Draw the picture anew with `changes`."""
        self._latest = replace(self._latest, **changes)
        shown = self._scene
        if self._latest.is_paused and shown.figures is not None:
            self._scene = replace(self._latest, figures=shown.figures, trends=shown.trends)
        else:
            self._scene = self._latest
        self._changed.set()

    # --- keys and signals --------------------------------------------------------------------------------------

    def _read_keys(self) -> None:
        try:
            keys = self._screen.keys()
        except OSError:
            keys = ""
        if not keys:  # the terminal has gone
            self._end()
        for key in keys:
            match key:
                case "q" | "Q" | "\x04":
                    self._end()
                case "p" | "P" | " ":
                    self._change(is_paused=not self._latest.is_paused)
                case "+" | "=":
                    self._set_interval(min((s for s in _INTERVALS_S if s > self._latest.interval_s), default=None))
                case "-" | "_":
                    self._set_interval(max((s for s in _INTERVALS_S if s < self._latest.interval_s), default=None))

    def _set_interval(self, interval_s: float | None) -> None:
        """None: there is no longer or shorter one."""
        if interval_s is not None:
            self._change(interval_s=interval_s)
            self._interval_changed.set()

    def _end(self) -> None:
        self._is_ending = True
        self._changed.set()

    def _stop(self) -> None:
        self._is_stopping = True
        self._changed.set()


if __name__ == "__main__":
    sys.exit(main())
