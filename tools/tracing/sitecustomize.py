"""Notes what a process runs, for `tools/trace_request.py` and `tools/mutate.py`. Python imports it by its name.

Each note is written at once: a process that is killed leaves its notes. A forked process goes on with it.
"""

import json
import mmap
import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any

_FOLDER = os.environ.get("TRACE_FOLDER")


def _note_files(folder: str, root: str) -> None:
    """Below `root`. The first byte of the file `round` says which request is traced, and 0 that none is."""
    with open(f"{folder}/round", "r+b") as file:
        current = mmap.mmap(file.fileno(), 1)
    entered = _appending(f"{folder}/entered")
    seen: set[tuple[int, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if (number := current[0]) and event == "call":
            path = frame.f_code.co_filename
            if path.startswith(root) and (number, path) not in seen:
                seen.add((number, path))
                os.write(entered, f"{number} {path}\n".encode())

    threading.setprofile(note)
    sys.setprofile(note)


def _note_lines(folder: str) -> None:
    """Those that the file `wanted` names."""
    with open(f"{folder}/wanted") as file:
        wanted = {path: set(lines) for path, lines in json.load(file).items()}
    touched = _appending(f"{folder}/touched")
    traced: dict[CodeType, bool] = {}

    def enter(frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if code.co_filename not in wanted:
            return None
        if code not in traced:
            traced[code] = not wanted[code.co_filename].isdisjoint(line for _, _, line in code.co_lines())
        return note if traced[code] else None

    def note(frame: FrameType, event: str, _: object) -> Any:
        path, line = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and line in wanted[path]:
            wanted[path].discard(line)
            os.write(touched, f"{line} {path}\n".encode())
        return note

    threading.settrace(enter)
    sys.settrace(enter)


def _appending(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)


if _FOLDER and os.path.exists(f"{_FOLDER}/wanted"):
    _note_lines(_FOLDER)
elif _FOLDER:
    _note_files(_FOLDER, os.environ["TRACE_ROOT"])
