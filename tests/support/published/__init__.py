"""Tiny models with random weights in the layouts in which well-known models are published, and their references.

Owns the list of layouts. Each module of this folder has those of some architectures: class names, tensor names,
settings, modules and kinds of tokenizers as published, sizes of its own. No published weights are here.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tests.support.several_models import shared_folder


class RowsOf(Protocol):
    def __call__(self, ids: NDArray[np.int64], border: int) -> NDArray[np.float32]:
        """The rows of one sequence of token ids [T], special tokens included, whose second part begins at `border`; 0:
        it has none. Of a multi-vector model, no token attends to those from there on. A vector [D] behind all steps,
        logits [labels] or [T, labels], sparse weights [V], or token vectors [T, D]."""


Reference: TypeAlias = Callable[[Path], RowsOf]
"""Of a folder, in float32: transformers' or sentence-transformers' own class; where the class is a model's own code,
torch written from its published description, which shares nothing with the product."""


Ids: TypeAlias = tuple[Sequence[int], int]
"""The token ids of one sequence, and where its second part begins, as `RowsOf` takes them."""

IdsOf: TypeAlias = Callable[[str, str], Ids]
"""Of a text, prompt included, and ""; of a query and a document; of a text and its role, of a multi-vector model."""


@dataclass(frozen=True)
class Layout:
    name: str
    """Its hub id, and behind a slash the task whose adapter is merged."""
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
    prompts: Mapping[str, str] | None = None
    """Of dense vectors, by the name that a request gives, "" for none; None: those that the folder's files state."""
    ids: Callable[[Path], IdsOf] | None = None
    """Of a folder, where its tokenizer alone does not give them: those of a template, for example."""


def layouts() -> tuple[Layout, ...]:
    """Those of LAYOUTS, a tuple of Layout, in each module of this folder."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))
    found = (getattr(import_module(f"{__name__}.{name}"), "LAYOUTS", ()) for name in names)
    return tuple(layout for of_module in found for layout in of_module)


def folder_of(layout: Layout) -> Path:
    """Saved by the first process of a run that asks for it."""
    return shared_folder(f"published-{layout.name.replace('/', '--')}", layout.save)


def table_of(layout: Layout, source: Path | str, name: str = "", **settings: Any) -> str:
    """Its table in the configuration file, in TOML."""
    if isinstance(source, Path) and layout.name.count("/") == 2:
        source = source / layout.name.rpartition("/")[2]
    lines = [f"[models.{json.dumps(name or layout.name)}]"]
    values = {"source": str(source), **layout.settings, **settings}
    return "\n".join([*lines, *(f"{key} = {_in_toml(value)}" for key, value in values.items()), ""])


def _in_toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_in_toml(each)}" for key, each in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)
