"""Write a JSON file in whole, and read one.

Owns the rename. Called by the modules whose files in the cache directory other servers read at the same time
(`vecd.workers.short_texts`, `vecd.workers.engines.selection_cache`, `vecd.workers.engines.references`). Imports no
numpy, because the supervisor imports it.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from vecd.shm.model_files import open_regular


def write_json(path: Path, value: Any, mode: int = 0o600) -> None:
    """Write by a rename, so no reader sees half a file; makes the folder. `mode`: who may read it. Raises OSError, and
    leaves nothing behind then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False) as file:
        try:
            json.dump(value, file)
            os.fchmod(file.fileno(), mode)
            file.flush()
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise


def read_json(path: Path, max_bytes: int = -1) -> Any:
    """At most `max_bytes` of it, if that is not negative. Raises OSError as `open_regular`, and ValueError or
    RecursionError for another content."""
    with open_regular(path) as file:
        return json.loads(file.read(max_bytes))
