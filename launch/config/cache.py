"""The cache directory: selections of an engine, converted tokenizers.

Owns the choice of the directory. Everything in it can be deleted at any time. Called by `vecd.launch.config.plan`.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from vecd.launch.config.settings import Settings


def cache_folder(settings: Settings, environ: Mapping[str, str] = os.environ) -> Path:
    """--cache-dir, else systemd's CacheDirectory=, else `vecd` in the user's cache. Absolute; may not exist yet."""
    if settings.cache_dir is not None:
        return settings.cache_dir
    # systemd separates several folders by colons; a unit of vecd has one.
    of_service = environ.get("CACHE_DIRECTORY", "").partition(":")[0]
    if of_service:
        return Path(of_service).absolute()
    of_user = environ.get("XDG_CACHE_HOME", "")
    # The specification says that a relative path is to be ignored.
    return (Path(of_user) if of_user.startswith("/") else _home() / ".cache") / "vecd"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # a user without a home directory, as some containers have
        return Path("/var/cache")
