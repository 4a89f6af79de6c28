"""Merges an adapter into the weights of its base.

Owns the sum. Changed tensors are float32 whatever the base's are stored as: a difference of two bytes' length is often
less than the last bit of what it is added to. All others stay as they are.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vecd.base.files import JsonMapping
from vecd.model.adapters import CONFIG, Merge, merged_settings, merges, merges_of_task
from vecd.model.files import Folder
from vecd.workers.torch.checkpoint import TYPES, Tensors
from vecd.workers.torch.making import Content, Planned

Floats: TypeAlias = NDArray[np.float32]

_BLOCK = 2**17
"""Floats of the rows that are summed at once, which a core's cache holds."""


def read(sources: Sequence[Path], options: JsonMapping) -> Content:
    """`sources`: PEFT's two files, or none, the base's weights, and the settings of a model with adapters by task, one
    of which is `options["task"]`. Raises ModelError, in one line."""
    weights = [path for path in sources if path.suffix == ".safetensors"]
    settings = [path for path in sources if path.suffix == ".json" and path.name != CONFIG]
    folder = Folder(settings[0].parent) if settings else None
    if sources[0].name == CONFIG:
        adapter, base = Tensors(weights[:1]), Tensors(weights[1:])
        config = Folder(sources[0].parent).settings(CONFIG)
        merged = merges(config, adapter.stored, base.stored, weights[1].parent)
    else:
        assert folder is not None
        adapter = base = Tensors(weights)
        merged = merges_of_task(folder.settings("config.json"), base.stored, options["task"], weights[0])
    tensors = {name: _planned(merge, base, adapter) for name, merge in merged.items()}
    return Content(tensors, merged_settings(folder, options["task"]) if folder else {})


def _planned(merge: Merge, base: Tensors, adapter: Tensors) -> Planned:
    stored = base.stored[merge.weight]
    if not merge.left:
        return Planned(TYPES[stored.kind], stored.shape, lambda: base[merge.weight])
    return Planned(torch.float32, stored.shape, partial(_sum, merge, base, adapter))


def _sum(merge: Merge, base: Tensors, adapter: Tensors) -> Tensor:
    left, right = adapter[merge.left], adapter[merge.right]
    if merge.at is not None:
        left, right = left[merge.at], right[merge.at]
    weight = base[merge.weight].float()
    _add(
        (weight.T if merge.is_transposed else weight).numpy(),
        (left.float() * merge.scale).numpy(),
        right.float().numpy(),
    )
    return weight


def _add(weight: Floats, left: Floats, right: Floats) -> None:
    """Add the product of `left` [out, r] and `right` [r, in] to `weight`, in an order that is the same on every
    machine, as no library's product is: the identity of the model is a digest of the sum. By numpy, whose steps have
    one thread: 8 to 10 s for the 440 million numbers of jina-embeddings-v5-text-small, of rank 32."""
    num_rows = max(1, _BLOCK // max(1, weight.shape[1]))
    for start in range(0, len(weight), num_rows):
        rows, factors = weight[start : start + num_rows], left[start : start + num_rows]
        product = np.zeros(rows.shape, np.float32)
        for column, row in zip(factors.T, right, strict=True):
            product += column[:, None] * row
        rows += product
