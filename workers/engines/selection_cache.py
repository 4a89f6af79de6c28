"""The choice of an engine, and the memory of it: what was compared once need not be compared at every start.

Owns `Selection` and its file in the cache folder. A choice holds for one set of model files, one version of this code
and of what it stands on, one processor or accelerator, and one set of wishes; anything else is another file. Imports no
torch, because the fork server asks here whether it needs to choose at all. Called by `vecd.workers.engines.load` and
`vecd.workers.process.forkserver`.

    <cache folder>/engines/<key>.json     made by a rename, so that nobody reads half of one

The vectors of the plain model are part of it: each start computes a few of them again (`vecd.workers.engines.parity`),
so that a memory that is wrong, for whatever reason, costs a second and never a vector.
"""

import base64
import hashlib
import json
import logging
import os
import platform
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vecd.workers.config import WorkerConfig

log = logging.getLogger("vecd.choices")

_FORMAT = 1
_LIBRARIES = ("torch", "transformers", "safetensors", "numpy")
# What libraries read that decides which instructions they use.
_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which engine a model gets, and how far it was from the plain model."""

    path: str
    dtype: str
    parity: dict[str, Any]
    """`vecd.workers.engines.parity.Agreement` as JSON values."""
    plain: NDArray[np.float32]
    """The plain model's vectors of all probes, [P, D]."""
    warnings: list[str] = field(default_factory=list)
    """What was tried before and refused, one line each."""

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "dtype": self.dtype,
            "agreement": self.parity,
            "warnings": self.warnings,
            "shape": list(self.plain.shape),
            "plain": base64.b64encode(self.plain.astype("<f4").tobytes()).decode(),
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Selection":
        """Raises KeyError, TypeError or ValueError for anything but what `to_json` gave."""
        plain = np.frombuffer(base64.b64decode(fields["plain"]), dtype="<f4").reshape(fields["shape"])
        return cls(
            path=str(fields["path"]),
            dtype=str(fields["dtype"]),
            parity=dict(fields["agreement"]),
            plain=plain.astype(np.float32),
            warnings=list(fields["warnings"]),
        )


def recall(config: WorkerConfig) -> Selection | None:
    """The choice made earlier under the same conditions, if it is remembered."""
    path = _file(config)
    try:
        return Selection.from_json(json.loads(path.read_text())) if path else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        log.warning("%s cannot be read and is made anew: %s: %s", path, type(error).__name__, error)
        forget(config)  # or the next look would warn again
        return None


def remember(config: WorkerConfig, choice: Selection) -> None:
    """Write the choice down; where that cannot be done it is made again at each start, and the log says so."""
    path = _file(config)
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False) as file:
            try:
                json.dump(choice.to_json(), file)
                file.flush()
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
                raise
    except OSError as error:
        log.warning("the choice of an engine cannot be remembered: %s", error)


def forget(config: WorkerConfig) -> None:
    path = _file(config)
    if path is not None:
        with suppress(OSError):
            path.unlink()


# --- the key ----------------------------------------------------------------------------------------------------


def _file(config: WorkerConfig) -> Path | None:
    """None without a cache folder, or when the model's files cannot be looked at."""
    if not config.cache_folder:
        return None
    try:
        conditions = json.dumps(_conditions(config), sort_keys=True)
    except OSError:
        return None
    return Path(config.cache_folder) / "engines" / f"{hashlib.sha256(conditions.encode()).hexdigest()[:32]}.json"


def _conditions(config: WorkerConfig) -> dict[str, Any]:
    """Everything that an agreement depends on."""
    return {
        "format": _FORMAT,
        "model": list(_stamps(config)),
        "card": config.card.to_json(),
        "wishes": [config.engine, config.dtype, config.device.partition(":")[0]],
        "device": _device_name(config.device),
        "code": _digest_of_code(),
        "libraries": {name: metadata.version(name) for name in _LIBRARIES},
        "variables": {name: os.environ.get(name) for name in _VARIABLES},
    }


def _stamps(config: WorkerConfig) -> Iterator[list[Any]]:
    """What changes when a file does, without reading it: weights may have gigabytes.

    The time of the last change of the inode cannot be set by hand, unlike the time of modification, which image
    builders set to a constant.
    """
    folders = {config.card.folder, config.card.weights_folder}
    folders |= {str(Path(config.card.folder) / step.path) for step in config.card.steps if step.path}
    for folder in sorted(folders):
        for path in sorted([*Path(folder).glob("*.safetensors"), *Path(folder).glob("*.json")]):
            stat = path.stat()
            yield [str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _digest_of_code() -> str:
    """Of this package's sources: an engine that was changed is another one. Empty where there are no sources."""
    digest = hashlib.sha256()
    folder = Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest() + metadata.version("vecd")


def _device_name(device: str) -> str:
    """The processor with its instruction sets, or the accelerator."""
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_properties(device))
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = [re.search(rf"^{key}\s*:\s*(.*)$", cpuinfo, re.MULTILINE) for key in ("model name", "(?:flags|Features)")]
    return " ".join(line[1] for line in found if line)
