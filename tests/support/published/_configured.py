"""The configuration of a layout's worker, by the plan of a server: with what is converted or merged at the start."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tests.support.published import Layout, folder_of, table_of
from tests.support.serving import cache_folder
from vecd.launch.config.models import load_models
from vecd.launch.config.plan import make_plans
from vecd.launch.config.settings import load_settings
from vecd.workers.config import WorkerConfig


@contextmanager
def configured(layout: Layout, dtype: str, folder: Path) -> Iterator[WorkerConfig]:
    """`folder`: for the configuration file."""
    file = folder / "vecd.toml"
    file.write_text(table_of(layout, folder_of(layout), dtype=dtype))
    flags = ["--config", str(file), "--cache-dir", cache_folder(), "--device", "cpu", "--accept-unordered"]
    [plan] = make_plans(load_models(load_settings(flags)), lambda stage: None)
    try:
        yield replace(plan.workers[0], num_threads=1)
    finally:
        plan.close()
