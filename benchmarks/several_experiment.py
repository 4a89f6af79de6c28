"""What the parts of `make bench-models` have in common: their models, folders and findings.

Owns the folders of models, which it makes when one is asked for first. Called by `benchmarks.models` and by the parts.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.checkpoints import save_cross_encoder
from benchmarks.findings import Finding
from benchmarks.inprocess import DTYPE
from benchmarks.servers import bundled_model
from benchmarks.targets import Target

FEW = 32
"""Texts that are asked again and again; the cache of vectors is off."""
REST_S = 2.0
"""A worker gives memory back after a second without a batch."""


@dataclass(frozen=True, slots=True)
class SeveralExperiment:
    """What the parts have in common."""

    num_rounds: int
    turn_s: float
    duration_s: float
    """Of each kind of stretch of a trial, over all its slices."""
    flags: Sequence[str]
    folder: Path
    """For models and caches; gone at the end."""
    against: Path | None
    sparse: Path | None
    budget: int | None
    _made: dict[str, Path] = field(default_factory=dict)

    def model(self, name: str, make: Callable[[Path], Path]) -> Path:
        """A folder below `folder`, made once."""
        if name not in self._made:
            self._made[name] = make(self.folder / name)
        return self._made[name]

    def copy(self, name: str) -> Path:
        """The bundled model under another path, so that no page of its files is another model's, too."""
        return self.model(name, lambda folder: Path(shutil.copytree(bundled_model(), folder)))

    def reranker(self) -> Path:
        return self.model("reranker", save_cross_encoder)

    def scratch(self, name: str) -> Path:
        """A folder for the configuration and the cache of one kind of server."""
        folder = self.folder / f"of-{name}"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder


def figure(
    part: str, work: str, unit: str, ours: float, target: Target | None, others_cores: float, **details: object
) -> Finding:
    """A finding without a peer."""
    return Finding(
        section=f"models-{part}",
        work=work,
        dtype=DTYPE,
        unit=unit,
        ours=ours,
        target=target,
        others_cores=others_cores,
        details=details,
    )
