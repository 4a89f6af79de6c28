"""Tiny models with random weights in the layouts in which well-known models are published, and their references.

Owns the list of layouts. Each module of this folder has those of some architectures: class names, tensor names,
settings, modules and kinds of tokenizers as published, sizes of its own. No published weights are here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray


class RowsOf(Protocol):
    def __call__(self, ids: NDArray[np.int64], border: int) -> NDArray[np.float32]:
        """The rows of one sequence of token ids [T], special tokens included, whose second part begins at `border`; 0:
        it has none. A vector [D] behind all steps, logits [labels] or [T, labels], sparse weights [V], or token
        vectors [T, D]."""


Reference: TypeAlias = Callable[[Path], RowsOf]
"""Of a folder, in float32: transformers' or sentence-transformers' own class; where the class is a model's own code,
torch written from its published description, which shares nothing with the product."""


@dataclass(frozen=True)
class Layout:
    name: str
    """Its hub id."""
    save: Callable[[Path], object]
    """Writes the checkpoint into an empty folder, the same bytes each time."""
    reference: Reference
    family: str
    """What the engines compute alike: `make test` has the first layout of each family, `make test-all` every one."""
    capability: str = "dense"
    path: str = "lean"
    """The engine in float32."""
    dtype: str = ""
    """The engine's default format where it is not decided by measuring; empty: whatever is measured."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of its table in the configuration file, for example {"kind": "rerank"}."""


_MODULES: tuple[str, ...] = ()
"""Of this folder; each has LAYOUTS, a tuple of Layout."""


def layouts() -> tuple[Layout, ...]:
    modules = (import_module(f"{__name__}.{name}") for name in _MODULES)
    return tuple(layout for module in modules for layout in module.LAYOUTS)
