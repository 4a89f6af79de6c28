"""Libraries of the system that packages need, beside them; and the proof that none is missing.

Owns the rule of what may be taken from the machine that it runs on: glibc, which every Linux has (musl's are others),
and which must fit the kernel and the name service. Called by `build`.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

_OF_THE_SYSTEM = re.compile(r"(ld-linux.*|lib(c|m|dl|pthread|rt|util|resolv|anl|nsl))\.so\.\d+")


def add_libraries(lib: Path) -> None:
    """Copy what is needed into `lib`. Raises RuntimeError for a library that this machine has not got either."""
    for path in sorted(_shared_objects(lib)):
        for name, found in _needed(path, lib).items():
            if found is None:
                raise RuntimeError(f"{path.relative_to(lib)} needs {name}, which is not installed")
            if not _OF_THE_SYSTEM.fullmatch(name) and lib not in found.parents and not (lib / name).exists():
                shutil.copy2(found.resolve(), lib / name)


def _shared_objects(lib: Path) -> list[Path]:
    return [path for path in lib.rglob("*.so*") if path.is_file() and path.open("rb").read(4) == b"\x7fELF"]


def _needed(path: Path, lib: Path) -> dict[str, Path | None]:
    """What the loader finds, by name; with what they in turn need."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(lib)}
    told = subprocess.run(["ldd", str(path)], env=environment, capture_output=True, text=True, check=False).stdout
    found = re.findall(r"^\s*(\S+) => (not found|/.*?)(?: \(0x[0-9a-f]+\))?$", told, re.MULTILINE)
    return {name: None if where == "not found" else Path(where) for name, where in found}
