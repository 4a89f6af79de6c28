"""`vecd top`: a running server, live in a terminal.

Owns the order of things: ask, draw, wait, and what keys and signals do. Speaks only HTTP. Called as `vecd top` or
`python -m vecd.client.top.command`; figures are `vecd.client.top.frame`'s, their look `vecd.client.top.view`'s, the
terminal `vecd.client.top.screen`'s.
"""

import asyncio
import os
import signal
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import orjson

from vecd.client.top.frame import Frame
from vecd.client.top.history import History
from vecd.client.top.options import MAX_INTERVAL_S, MIN_INTERVAL_S, Options, parse_options
from vecd.client.top.source import Away, Refused

if TYPE_CHECKING:
    from vecd.client.top.screen import Screen
    from vecd.client.top.view import Scene

_INTERVALS_S = (MIN_INTERVAL_S, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, MAX_INTERVAL_S)
"""What + and - step through."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PLAIN_COLUMNS = 100
"""Of a picture that goes into a file."""


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 ended as asked, 1 the server has no figures for us, or did not answer --once, 2 bad arguments."""
    options = parse_options(argv)
    try:
        return asyncio.run(_run(options))
    except Refused as error:
        print(f"vecd top: {error}", file=sys.stderr)
        return 1
    except Away as away:
        print(f"vecd top: {options.target} does not answer: {away}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # whoever read --json has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


async def _run(options: Options) -> int:
    if options.is_json:
        await _write_lines(options)
    elif options.is_once:
        await _print_once(options)
    else:
        from vecd.client.top.screen import Screen, terminal

        await Watch(options, Screen(terminal())).run()
    return 0


# --- without a terminal ----------------------------------------------------------------------------------------


async def _write_lines(options: Options) -> None:
    """Raises Refused; with --once Away, too."""
    source, history = options.source(), History()
    try:
        while True:
            try:
                frame = history.add(await source.ask())
            except Away as away:
                if options.is_once:
                    raise
                _write_line({"target": str(options.target), "error": f"no answer: {away}"})
            else:
                if frame.elapsed_s is not None:
                    _write_line({"target": str(options.target), "error": None, **asdict(frame)})
                    if options.is_once:
                        return
            await asyncio.sleep(options.interval_s)
    finally:
        source.close()


def _write_line(line: dict[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(line).decode() + "\n")
    sys.stdout.flush()


async def _print_once(options: Options) -> None:
    """Raises Refused and Away."""
    from rich.console import Console

    from vecd.client.top.view import Scene, draw

    source, history = options.source(), History()
    try:
        history.add(await source.ask())
        await asyncio.sleep(options.interval_s)
        frame = history.add(await source.ask())
    finally:
        source.close()
    console = Console(no_color=True, force_terminal=False, highlight=False, markup=False, emoji=False)
    if not console.file.isatty():
        console.width = int(os.environ.get("COLUMNS") or _PLAIN_COLUMNS)
    scene = Scene(
        target=str(options.target),
        interval_s=options.interval_s,
        frame=frame,
        trends=history.trends(),
        is_ascii=console.options.ascii_only,
    )
    with console.capture() as captured:
        console.print(draw(scene, console.width, None))
    sys.stdout.write("\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n")


# --- on a terminal ---------------------------------------------------------------------------------------------


class Watch:
    """The picture, kept up to date until it is to end."""

    def __init__(self, options: Options, screen: "Screen") -> None:
        self._options = options
        self._screen = screen
        self._source = options.source()
        self._history = History()
        self._interval_s = options.interval_s
        self._frame: Frame | None = None
        self._shown: Scene | None = None
        """What stands still while paused."""
        self._trouble: str | None = None
        self._is_paused = False
        self._is_ending = False
        self._is_stopping = False
        self._changed = asyncio.Event()
        self._interval_changed = asyncio.Event()

    async def run(self) -> None:
        """Until q, Ctrl-C or SIGTERM. Raises Refused."""
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._end)
        loop.add_signal_handler(signal.SIGWINCH, self._changed.set)
        loop.add_signal_handler(signal.SIGTSTP, self._stop)
        keyboard = self._screen.keyboard
        if keyboard is not None:
            loop.add_reader(keyboard, self._read_keys)
        asking = asyncio.create_task(self._keep_asking())
        asking.add_done_callback(lambda _: self._changed.set())
        try:
            with self._screen:  # not before its signals are handled
                await self._keep_drawing(asking)
        finally:
            if keyboard is not None:
                loop.remove_reader(keyboard)
            asking.cancel()
            self._source.close()

    async def _keep_drawing(self, asking: "asyncio.Task[None]") -> None:
        while not self._is_ending:
            if asking.done():
                asking.result()
            if self._is_stopping:
                self._is_stopping = False
                self._screen.stop()
            self._changed.clear()
            try:
                self._draw()
            except OSError:  # the terminal has gone
                return
            await self._changed.wait()

    async def _keep_asking(self) -> None:
        """Raises Refused."""
        while True:
            try:
                self._frame = self._history.add(await self._source.ask())
                self._trouble = None
            except Away as away:
                self._trouble = f"no answer, trying again: {away}"
            self._changed.set()
            await self._pause_between()

    async def _pause_between(self) -> None:
        """From one answer to the next question: so a server that reads its processes' times once a second reads them
        again for each."""
        answered_at = asyncio.get_running_loop().time()
        while True:
            self._interval_changed.clear()
            try:
                async with asyncio.timeout_at(answered_at + self._interval_s):
                    await self._interval_changed.wait()
            except TimeoutError:
                return

    def _draw(self) -> None:
        from vecd.client.top.view import draw

        scene = self._scene()
        self._screen.draw(lambda width, height: draw(scene, width, height))

    def _scene(self) -> "Scene":
        """While paused the figures stand still, and so do the sparklines."""
        from vecd.client.top.view import Scene

        if self._shown is not None and self._is_paused:
            frame, trends = self._shown.frame, self._shown.trends
        else:
            frame, trends = self._frame, self._history.trends()
        self._shown = Scene(
            target=str(self._options.target),
            interval_s=self._interval_s,
            frame=frame,
            trends=trends,
            trouble=self._trouble,
            is_paused=self._is_paused,
            has_keys=self._screen.keyboard is not None,
            is_ascii=self._screen.console.options.ascii_only,
        )
        return self._shown

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
                    self._pause()
                case "+" | "=":
                    self._step(1)
                case "-" | "_":
                    self._step(-1)

    def _pause(self) -> None:
        self._is_paused = not self._is_paused
        self._changed.set()

    def _step(self, direction: int) -> None:
        """The next longer or shorter interval."""
        longer = [s for s in _INTERVALS_S if s > self._interval_s]
        shorter = [s for s in _INTERVALS_S if s < self._interval_s]
        self._interval_s = (
            min(longer, default=MAX_INTERVAL_S) if direction > 0 else max(shorter, default=MIN_INTERVAL_S)
        )
        self._interval_changed.set()
        self._changed.set()

    def _end(self) -> None:
        self._is_ending = True
        self._changed.set()

    def _stop(self) -> None:
        self._is_stopping = True
        self._changed.set()


if __name__ == "__main__":
    sys.exit(main())
