"""Reads a linear layer that has a file of its own: safetensors, or a state dict that torch has saved.

Owns the check of its two tensors. Needs no torch. Called by the heads of the engines.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from vecd.shm.card import ModelError
from vecd.workers.plain_pickle import PickleError, load_state_dict
from vecd.workers.weights import broken


def load_linear(path: Path, out_dim: int, in_dim: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The weight [out_dim, in_dim] and the bias [out_dim], float32. Raises ModelError when the file is missing, holds
    anything else, or is a pickle of anything but tensors."""
    try:
        tensors = load_file(path) if path.suffix == ".safetensors" else load_state_dict(path)
    except PickleError as error:
        raise ModelError(f"{path}: {error}") from None
    except (OSError, SafetensorError, TypeError, AttributeError) as error:  # the last two: numpy has no such type
        raise broken(path, error) from None
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    expected = {"weight": (out_dim, in_dim), "bias": (out_dim,)}
    if shapes != expected:
        raise ModelError(f"{path}: holds {shapes}, should hold {expected}")
    return tensors["weight"].astype(np.float32), tensors["bias"].astype(np.float32)
