"""The selection of an engine, and its cache: a comparison made once is not repeated at every start.

Owns `Selection` and its file in the cache directory. A selection holds for one set of model files, one version of this
code and its libraries, one processor or accelerator, and one set of requested settings; anything else is another file.
Imports no torch, because the fork server looks here to decide whether a comparison is needed. Called by
`vecd.workers.engines.load` and `vecd.workers.process.forkserver`.

    <cache directory>/engines/<key>.json     written by a rename, so no reader sees half a file

A selection holds the reference model's vectors. Each start computes a few of them again
(`vecd.workers.engines.parity`), so a wrong cache entry costs a second and never gives a wrong vector.
"""

import base64
import hashlib
import json
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vecd.shm.card import export_files
from vecd.workers.config import REFERENCE_FILE, WorkerConfig
from vecd.workers.engines.timing import Times
from vecd.workers.json_file import read_json, write_json
from vecd.workers.processor import cpuinfo

log = logging.getLogger("vecd.selection")

_FORMAT = 2
_LIBRARIES = ("torch", "transformers", "onnxruntime", "safetensors", "numpy")
# The variables by which libraries decide which instructions they use.
_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


@dataclass(frozen=True, slots=True)
class Selection:
    """The engine that a model gets, and its parity with the reference model."""

    path: str
    dtype: str
    parity: dict[str, Any]
    """`vecd.workers.engines.parity.Parity` as JSON values."""
    reference: NDArray[np.float32]
    """The reference model's vectors of all probes, [P, D]."""
    warnings: list[str] = field(default_factory=list)
    """The paths and dtypes that were tried before and refused, one line each."""
    times: Times = field(default_factory=dict)
    """Of the engines that the path was chosen among; empty if it was not measured."""

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "dtype": self.dtype,
            "agreement": self.parity,
            "warnings": self.warnings,
            "times": self.times,
            "shape": list(self.reference.shape),
            "reference": base64.b64encode(self.reference.astype("<f4").tobytes()).decode(),
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Selection":
        """Raises KeyError, TypeError or ValueError for fields that are not from `to_json`."""
        reference = np.frombuffer(base64.b64decode(fields["reference"]), dtype="<f4").reshape(fields["shape"])
        return cls(
            path=str(fields["path"]),
            dtype=str(fields["dtype"]),
            parity=dict(fields["agreement"]),
            reference=reference.astype(np.float32),
            warnings=list(fields["warnings"]),
            times=dict(fields["times"]),
        )


def recall(config: WorkerConfig) -> Selection | None:
    """The selection made earlier under the same conditions; None if there is none. Raises ModelError if the device
    cannot be used."""
    path = _file(config)
    try:
        return Selection.from_json(read_json(path)) if path else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        log.warning("%s cannot be read and is made anew: %s: %s", path, type(error).__name__, error)
        forget(config)  # otherwise the next call would warn again
        return None


def remember(config: WorkerConfig, selection: Selection) -> None:
    """Write the selection to the cache. If that fails, log a warning; each start then compares again."""
    path = _file(config)
    if path is None:
        return
    try:
        write_json(path, selection.to_json())
    except OSError as error:
        log.warning("the selection of an engine cannot be remembered: %s", error)


def forget(config: WorkerConfig) -> None:
    path = _file(config)
    if path is not None:
        with suppress(OSError):
            path.unlink()


# --- the key ----------------------------------------------------------------------------------------------------


def _file(config: WorkerConfig) -> Path | None:
    """None without a cache directory, or when the model's files cannot be examined."""
    if not config.cache_folder:
        return None
    try:
        conditions = json.dumps(_conditions(config), sort_keys=True)
    except OSError:
        return None
    return Path(config.cache_folder) / "engines" / f"{hashlib.sha256(conditions.encode()).hexdigest()[:32]}.json"


def _conditions(config: WorkerConfig) -> dict[str, Any]:
    """Everything that parity depends on."""
    return {
        "format": _FORMAT,
        "model": list(stamps(config)),
        "card": config.card.to_json(),
        "requested": [config.engine, config.dtype, config.device.partition(":")[0]],
        "device": _device_name(config.device),
        "code": _digest_of_code(),
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "variables": {name: os.environ.get(name) for name in _VARIABLES},
    }


def stamps(config: WorkerConfig) -> Iterator[list[Any]]:
    """Values that change when a file changes, without reading it, because weights may have gigabytes.
    Raises OSError.

    The inode's change time cannot be set by a program. The modification time can: image builders set it to a constant.
    """
    folders = {config.card.folder, config.card.weights_folder}
    folders |= {str(Path(config.card.folder) / step.path) for step in config.card.all_steps if step.path}
    for folder in sorted(folders):
        paths = [*Path(folder).glob("*.safetensors"), *Path(folder).glob("*.json")]
        yield from (_stamp(path) for path in sorted(path for path in paths if path.name != REFERENCE_FILE))
    yield from (_stamp(Path(config.card.folder) / step.file) for step in config.card.all_steps if step.file)
    if config.card.export_file:
        yield from map(_stamp, export_files(Path(config.card.export_file)))


def _stamp(path: Path) -> list[Any]:
    stat = path.stat()
    return [str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _version(library: str) -> str | None:
    """None for one that is not installed."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _digest_of_code() -> str:
    """A digest of this package's sources and vecd's version, because a changed engine needs a new comparison. Only the
    version counts where there are no sources."""
    digest = hashlib.sha256()
    folder = Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest() + metadata.version("vecd")


def _device_name(device: str) -> str:
    """The processor with its instruction sets, or the accelerator. Raises ModelError if that cannot be used."""
    if device.startswith("cuda"):
        from vecd.workers.engines.torch import cuda

        return cuda.describe(device)
    return f"{cpuinfo('model name') or platform.processor()} {cpuinfo('flags|Features')}"
