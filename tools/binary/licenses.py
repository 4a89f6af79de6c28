"""What the binary is made of, and under which licenses.

Owns `lib/LICENSES.md`, and the licenses of what has no package: Python, the launcher, libraries of the system. Those of
packages lie in their `*.dist-info` folders. Called by `build`.
"""

import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

_HEAD = """\
# What is in this folder

Each package's license is in its `*.dist-info` folder, where it has come with one; of the rest, in `licenses/`.

| what | version | license |
| --- | --- | --- |
"""


def add_licenses(lib: Path, distributions: Sequence[metadata.Distribution]) -> None:
    """Side effect: writes `lib`/LICENSES.md and `lib`/licenses."""
    folder = lib / "licenses"
    folder.mkdir()
    rows = [(d.name, d.version, _license_of(d)) for d in distributions]
    rows.append(("Python", platform.python_version(), "PSF-2.0"))
    shutil.copy2(Path(sysconfig.get_path("stdlib")) / "LICENSE.txt", folder / "python.txt")
    pyinstaller = metadata.distribution("pyinstaller")
    rows.append(("PyInstaller's launcher", pyinstaller.version, "GPL-2.0-or-later WITH Bootloader-exception"))
    for file in pyinstaller.files or []:
        if file.name == "COPYING.txt":
            shutil.copy2(Path(str(file.locate())), folder / "pyinstaller.txt")
    libraries = sorted(path.name for path in lib.iterdir() if ".so" in path.name)
    rows += [(library, *_of_system(library, folder)) for library in libraries]
    lines = [f"| {' | '.join(row)} |" for row in sorted(rows, key=lambda row: row[0].lower())]
    (lib / "LICENSES.md").write_text(_HEAD + "\n".join(lines) + "\n", encoding="utf-8")


def _license_of(distribution: metadata.Distribution) -> str:
    """What its metadata says, in one line."""
    fields = distribution.metadata
    for name in ("License-Expression", "License"):
        if name in fields and "\n" not in (value := str(fields[name])):
            return value
    named = [value for value in fields.get_all("Classifier") or [] if str(value).startswith("License ::")]
    classifiers = [str(value).rpartition("::")[2].strip() for value in named]
    return ", ".join(classifiers) or "see its folder"


def _of_system(library: str, folder: Path) -> tuple[str, str]:
    """Version, and where its license is, as Debian's packages say; elsewhere nobody does."""
    if library.startswith("libpython"):
        return "as Python", "licenses/python.txt"
    if shutil.which("dpkg") is None:
        return "of the system", "of the system"
    found = subprocess.run(["dpkg", "-S", f"*/{library}"], capture_output=True, text=True, check=False)
    package = found.stdout.partition(":")[0]
    notice = Path("/usr/share/doc") / package / "copyright"
    if not package or not notice.is_file():
        return "of the system", "of the system"
    shutil.copy2(notice, folder / f"{package}.txt")
    query = ["dpkg-query", "-W", "-f", "${Version}", package]
    told = subprocess.run(query, capture_output=True, text=True, check=False)
    return told.stdout, f"licenses/{package}.txt"
