"""How many short texts a second an engine computes, remembered for the next start.

Owns the file in the cache directory. The figure is measured once for a model, a version of vecd, a processor and the
requested engine, if `--gateways auto` wants it (`vecd.workers.engines.load`). The next start reads it
(`vecd.launch.config.plan`) for the number of gateways, and for nothing else, so that a wrong one is never a wrong
vector. Imports no numpy, because the supervisor imports it.

    <cache directory>/short-texts/<key>.json     {"texts_per_s": 512.0}, written by a rename
"""

import hashlib
import json
import logging
import platform
from importlib import metadata
from pathlib import Path

from vecd.workers.config import WorkerConfig
from vecd.workers.json_file import read_json, write_json
from vecd.workers.processor import cpuinfo

log = logging.getLogger("vecd.selection")

SHORT_TEXT_TOKENS = 12
_FORMAT = 1


def recall_texts_per_s(config: WorkerConfig) -> float | None:
    """Texts of SHORT_TEXT_TOKENS that one thread of a worker computes in a second, or one GPU; above 0. None if it has
    not been measured."""
    try:
        found = float(read_json(_file(config))["texts_per_s"]) if config.cache_folder else 0.0
    except (OSError, KeyError, TypeError, ValueError, RecursionError):
        return None
    return found if 0 < found < float("inf") else None


def remember_texts_per_s(config: WorkerConfig, texts_per_s: float) -> None:
    """Write what was measured to the cache. If that fails, log a warning."""
    try:
        write_json(_file(config), {"texts_per_s": texts_per_s})
    except OSError as error:
        log.warning("the speed of the engine cannot be remembered: %s", error)


def _file(config: WorkerConfig) -> Path:
    """By what the speed depends on; the name of a GPU is not known before the workers are forked."""
    key = {
        "format": _FORMAT,
        "version": metadata.version("vecd"),
        "card": config.card.to_json(),
        "requested": [config.engine, config.dtype, config.device.partition(":")[0]],
        "processor": cpuinfo("model name") or platform.processor(),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return Path(config.cache_folder) / "short-texts" / f"{digest[:32]}.json"
