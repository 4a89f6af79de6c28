"""Lets a virtual environment use the torch of the Python that it was made from, instead of another of up to 5 GB.

Run by the Makefile with that Python, before pip: `python -I tools/reuse_torch.py .venv constraints.txt`. If that Python
has the pinned torch among its packages, in either build, and can import it, then links to it and to the packages that
come with it (CUDA's libraries, triton) are put into the folder `torch-of-python` of the environment, and a .pth file
names that folder. pip then finds the torch, and installs the rest as pinned. Else, both are taken away.

The environment sees no other package of that Python. `--system-site-packages` would show it all of them, and pytest and
transformers act on what is merely installed: plugins, and optional packages in whatever version they are. With -I,
neither PYTHONPATH nor a user's own packages count, because not everyone who runs that Python has them.
"""

import importlib
import re
import shutil
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

FOLDER = "torch-of-python"
_COMES_WITH_TORCH = re.compile(r"torch$|triton$|nvidia-|cuda-")
"""Names of distributions. All else that torch requires is pinned in constraints.txt."""


def main(environment: Path, constraints: Path) -> None:
    """Side effects: writes `FOLDER` and its .pth file anew, or removes them; prints what was done, if anything."""
    # Another Python than the one that the environment was made from may have a torch that does not fit it.
    packages = environment / "lib" / f"python{sysconfig.get_python_version()}{sys.abiflags}" / "site-packages"
    folder, pth = environment.absolute() / FOLDER, packages / f"{FOLDER}.pth"
    shutil.rmtree(folder, ignore_errors=True)
    pth.unlink(missing_ok=True)
    if not packages.exists() or (packages / "torch").exists():  # pip has installed one
        return
    paths = _files_of_torch(constraints.read_text())
    if not paths:
        return
    folder.mkdir()
    for path in paths:
        (folder / path.name).symlink_to(path)
    pth.write_text(f"{folder}\n")
    print(f"{environment} uses the torch of {sys.executable}")


def _files_of_torch(constraints: str) -> list[Path]:
    """The folders and files that are torch's or come with it, at the top of the place where this Python has them. None
    unless its torch is the pinned version, and can be imported."""
    pinned = re.search(r"^torch==(\S+)$", constraints, re.MULTILINE)
    try:
        torch = metadata.distribution("torch")
        # The build, as in 2.13.0+cpu, is no part of what is pinned.
        if pinned is None or torch.version.partition("+")[0] != pinned[1]:
            return []
        importlib.import_module("torch")
    except Exception:  # there is none, or its import ran into anything
        return []
    place = Path(str(torch.locate_file(""))).absolute()
    names = {
        file.parts[0]
        for distribution in metadata.distributions(path=[str(place)])
        if _COMES_WITH_TORCH.match(re.sub(r"[-_.]+", "-", distribution.name).lower())
        for file in distribution.files or ()
    }
    # Of an editable torch, for example, only a .pth file is there.
    return [place / name for name in sorted(names - {"..", "__pycache__"})] if "torch" in names else []


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
