"""A file system of its own for a binary: glibc, zlib and nothing else, where nothing of the binary can be written to.

That takes root's rights, or user namespaces.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

DIST = Path(__file__).parents[2] / "dist"
FOLDER = "opt/a folder with blanks/vecd"
OF_SYSTEM = re.compile(r"(ld-linux.*|lib(z|c|m|dl|pthread|rt|util|resolv|anl|nss_\w+))\.so\.\d")

# The mounts are gone with the process; no variable reaches it.
IN_ROOM = """
set -e
room=$1 folder=$2
shift 2
mount --rbind /proc "$room/proc"
mount --rbind /dev "$room/dev"
mount --bind "$room/opt" "$room/opt"
mount -o remount,ro,bind "$room/opt"
exec env -i "$(command -v chroot)" "$room" "/$folder/vecd" "$@"
"""


def in_room(room: Path, folder: str = FOLDER) -> list[str]:
    """The command that runs the binary in `folder` there; its arguments follow."""
    namespaces = ["--mount"] if os.geteuid() == 0 else ["--mount", "--user", "--map-root-user"]
    return ["unshare", *namespaces, "sh", "-c", IN_ROOM, "sh", str(room), folder]


def run(room: Path, *arguments: str, folder: str = FOLDER) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*in_room(room, folder), *arguments], capture_output=True, text=True, timeout=60, check=False)


def make_room(root: Path, binary: Path) -> Path:
    """Copy `binary`, libc and folders to write to below `root`, and return it. Skips the test where that cannot be."""
    if not (binary / "vecd").exists():
        pytest.skip(f"there is no {binary}: make test-binary")
    namespaces = "-m" if os.geteuid() == 0 else "-Urm"
    if subprocess.run(["unshare", namespaces, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no file system of its own can be made here: unshare --mount is not allowed")
    root.chmod(0o755)  # as of any root: `vecd install-service` looks whether others can read
    for name in ("proc", "dev", "tmp", "cache", str(Path(FOLDER).parent)):
        (root / name).mkdir(parents=True)
    for folder in (Path("/lib64"), *Path("/lib").glob("*-linux-gnu"), Path("/lib")):
        for path in [path for path in folder.glob("*.so.*") if OF_SYSTEM.fullmatch(path.name)]:
            (root / folder.relative_to("/")).mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, root / path.relative_to("/"))
    subprocess.run(["cp", "-a", str(binary), str(root / FOLDER)], check=True)
    return root


def foreign_libraries(process: psutil.Process) -> list[Path]:
    """What it has loaded that is neither of the binary nor of libc."""
    mapped = {re.sub(r" \(deleted\)$", "", line.path) for line in process.memory_maps(grouped=False)}
    libraries = [Path(path) for path in mapped if ".so" in path or "python" in path]
    assert libraries
    return [path for path in libraries if FOLDER not in str(path) and not OF_SYSTEM.fullmatch(path.name)]
