"""Makes workers of a server under trial misbehave on certain token ids, or hang while they start.

Imported by every Python whose PYTHONPATH has this folder. Changes the engines' `begin`, and that only while the file
named by TRIAL_FAULTS exists, which a trial makes when its server is ready: loading and comparing go undisturbed. While
the folder named by TRIAL_FAULTS with `.starts` behind it exists, one engine can be made, and every other hangs.
"""

import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

KILL, SPIN, SLEEP, RAISE, CRASH, NAN = range(30101, 30107)
"""The ids: ends its worker by SIGKILL, never returns, returns after SLEEP_S, raises, ends its worker by a fault, makes
all vectors of its batch NaN."""
SLEEP_S = 0.3
_ENGINES = {
    "vecd.workers.dummy": "DummyEngine",
    "vecd.workers.onnx.engine": "LeanEngine",
    "vecd.workers.torch.transformer": "TransformerEngine",
}


def misbehave(begin: Callable[..., Any]) -> Callable[..., Any]:
    def begin_or_not(self: Any, batch: Any, rows: Any) -> Any:
        if os.path.exists(os.environ["TRIAL_FAULTS"]):
            ids = set(batch.token_ids.tolist())
            if KILL in ids:
                os.kill(os.getpid(), signal.SIGKILL)
            if CRASH in ids:
                ctypes.string_at(0)  # a worker outlives a SIGSEGV that is sent
            while SPIN in ids:
                pass
            if SLEEP in ids:
                time.sleep(SLEEP_S)
            if RAISE in ids:
                raise RuntimeError("on purpose")
            if NAN in ids:
                finish = begin(self, batch, rows)
                rows[: batch.lengths.size] = math.nan
                return finish
        return begin(self, batch, rows)

    return begin_or_not


def start_once(init: Callable[..., None]) -> Callable[..., None]:
    def init_or_hang(self: Any, *arguments: Any, **options: Any) -> None:
        starts = os.environ["TRIAL_FAULTS"] + ".starts"
        if os.path.exists(starts):
            try:
                os.mkdir(os.path.join(starts, "first"))
            except FileExistsError:
                time.sleep(3600)
        init(self, *arguments, **options)

    return init_or_hang


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the engines as everybody does, and changes them once they are there."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _ENGINES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            engine = getattr(module, _ENGINES[name])
            engine.begin = misbehave(engine.begin)
            engine.__init__ = start_once(engine.__init__)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


if "TRIAL_FAULTS" in os.environ:
    with contextlib.suppress(ImportError):
        import importlib.util

        sys.meta_path.insert(0, _Finder())
