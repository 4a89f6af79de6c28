"""Tensors mapped from a file, as float32."""

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from vecd.workers.engines.lean.arrays import Arrays


def test_every_float16_is_the_float32_of_the_same_value(tmp_path: Path) -> None:
    bits = np.arange(2**16, dtype=np.uint16).reshape(-1, 64)
    numbers = bits.view(np.float16)
    finite = numbers[np.isfinite(numbers).all(axis=1)]
    path = tmp_path / "model.safetensors"
    save_file({"all": numbers, "finite": finite, "none": numbers[:0]}, path)
    arrays = Arrays([path])
    assert np.array_equal(arrays["finite"].view(np.uint32), finite.astype(np.float32).view(np.uint32)), "and -0 stays"
    assert np.array_equal(arrays["all"], numbers.astype(np.float32), equal_nan=True)
    assert arrays["none"].shape == (0, 64)
    assert np.array_equal(arrays.table("finite")(np.array([3, 1])), finite[[3, 1]].astype(np.float32))
