import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vecd.gateway.encoding.forms import (
    RangesError,
    default_ranges,
    from_bfloat16,
    normalize,
    read_ranges,
    shorten,
    to_bfloat16,
    to_binary,
    to_float16,
    to_ubinary,
)
from vecd.gateway.errors import BadRequest

_PAGE = (Path(__file__).parents[4] / "docs" / "output-types.md").read_text()
[_RANGES] = re.findall(r"^```python ranges\n(.*?)^```$", _PAGE, re.MULTILINE | re.DOTALL)

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
matrices = arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 40)), elements=finite)
in_its_own_time = settings(max_examples=50)  # a busy machine is no failure


@pytest.fixture(scope="module")
def vectors():
    """float32 [32, 384], of length 1, in directions that no model has chosen."""
    return normalize(np.random.default_rng(0).standard_normal((32, 384), dtype=np.float32))


@pytest.fixture(scope="module")
def quantize_embeddings():
    from sentence_transformers.util import quantize_embeddings

    return quantize_embeddings


# --- shape ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dimensions", [1, 64, 383])
def test_shortened_vectors_are_those_of_sentence_transformers(vectors, dimensions):
    from sentence_transformers.util import normalize_embeddings, truncate_embeddings
    from torch import from_numpy

    expected = normalize_embeddings(truncate_embeddings(from_numpy(vectors), dimensions)).numpy()
    np.testing.assert_allclose(normalize(shorten(vectors, dimensions)), expected, atol=1e-7, rtol=2e-7)


@in_its_own_time
@given(matrices)
def test_normalized_rows_have_length_1_unless_they_are_zeros(rows):
    lengths = np.linalg.norm(normalize(rows).astype(np.float64), axis=1)
    np.testing.assert_allclose(lengths, rows.any(axis=1).astype(float), atol=1e-6)


def test_normalizing_keeps_directions_however_long():
    direction = np.array([[3, 4]], dtype=np.float32)
    for scale in (1e-43, 1e-30, 1e-10, 1, 1e10, 5e37):
        np.testing.assert_allclose(normalize(direction * np.float32(scale)), [[0.6, 0.8]], rtol=2e-2)
    np.testing.assert_allclose(normalize(direction * np.float32(1e-30)), [[0.6, 0.8]], rtol=1e-6)


def test_what_is_borrowed_is_only_read():
    rows = np.full((2, 16), 0.25, dtype=np.float32)
    rows.flags.writeable = False
    ranges = default_ranges(16)
    for made in (
        shorten(rows, 8), normalize(rows), to_float16(rows), to_bfloat16(rows), ranges.to_int8(rows),
        ranges.to_uint8(rows), to_binary(rows), to_ubinary(rows),
    ):  # fmt: skip
        assert not np.shares_memory(made, rows)


# --- floating point ---------------------------------------------------------------------------------------------


def test_bfloat16_is_rounded_as_torch_does():
    import torch

    patterns = np.random.default_rng(0).integers(0, 2**32, 1_000_000, dtype=np.uint32)
    # Halfway between two, just beside it, and what hypothesis would not hit: the carry into the exponent, zeros.
    halfway = (np.arange(2**16, dtype=np.uint32) << 16) + 0x8000
    rows = np.concatenate([patterns, halfway, halfway + 1, halfway - 1]).view(np.float32)
    rows = rows[np.abs(rows) < 3.38e38]
    expected = torch.from_numpy(rows).to(torch.bfloat16)
    bits = to_bfloat16(rows)
    assert np.array_equal(bits, expected.view(torch.int16).numpy().view(np.uint16))
    assert np.array_equal(from_bfloat16(bits), expected.float().numpy())


@pytest.mark.parametrize(
    ("convert", "greatest", "too_great"),
    [(to_float16, 65519.0, 65520.0), (to_bfloat16, 3.3895e38, 3.3962e38)],
)
def test_what_would_be_infinite_is_refused(convert, greatest, too_great):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # NumPy's, which would be in the log
        for sign in (1, -1):
            convert(np.array([[1, sign * greatest]], dtype=np.float32))
            with pytest.raises(BadRequest, match="float32") as caught:
                convert(np.array([[1, sign * too_great]], dtype=np.float32))
            assert "3.39" not in caught.value.message


# --- whole numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["int8", "uint8"])
def test_codes_are_those_of_sentence_transformers(vectors, quantize_embeddings, precision, tmp_path):
    ranges = np.vstack([vectors[::2].min(axis=0), vectors[::2].max(axis=0)])  # of half: the rest is clipped
    np.save(tmp_path / "ranges.npy", ranges)
    read = read_ranges(str(tmp_path / "ranges.npy"), 384)
    expected = quantize_embeddings(vectors, precision, ranges=ranges)
    codes = read.to_int8(vectors) if precision == "int8" else read.to_uint8(vectors)
    assert codes.dtype == expected.dtype == precision
    assert np.array_equal(codes, expected)
    # And are not so because nothing depends on them.
    assert not np.array_equal(codes, quantize_embeddings(vectors, precision, ranges=ranges * np.float32(1.01)))


@pytest.mark.parametrize(("precision", "convert"), [("binary", to_binary), ("ubinary", to_ubinary)])
def test_signs_are_those_of_sentence_transformers(vectors, quantize_embeddings, precision, convert):
    rows = vectors.copy()
    rows[:, ::7] = 0
    expected = quantize_embeddings(rows, precision)
    codes = convert(rows)
    assert (codes.dtype, codes.shape) == (expected.dtype, (32, 48))
    assert np.array_equal(codes, expected)


@pytest.mark.parametrize("dim", [8, 384, 1536])
def test_default_codes_are_elements_times_127_rounded(dim, quantize_embeddings):
    rng = np.random.default_rng(dim)
    rows = normalize(rng.standard_normal((200, dim), dtype=np.float32))
    widest = min(1, 32 / np.sqrt(dim))
    codes = default_ranges(dim).to_int8(rows)
    exact = rows.astype(np.float64) * 127 / widest
    assert np.abs(codes - exact).max() <= 0.5 + 1e-4
    assert np.array_equal(default_ranges(dim).to_uint8(rows), codes.astype(int) + 128)
    # sentence-transformers makes the same of the ranges that docs/output-types.md has.
    names = {"np": np, "vectors": rows, "dim": dim, "quantize_embeddings": quantize_embeddings}
    exec(_RANGES, names)
    assert np.array_equal(codes, np.asarray(names["codes"]))


@pytest.mark.parametrize("dim", [1, 384, 1024])
def test_default_codes_of_up_to_1024_dimensions_are_never_clipped(dim):
    axes = np.zeros((3, dim), dtype=np.float32)
    axes[0, 0], axes[1, -1] = 1, -1
    codes = default_ranges(dim).to_int8(axes)
    assert (codes[0, 0], codes[1, -1], np.abs(codes[2]).max()) == (127, -127, 0)


# --- a file of ranges -------------------------------------------------------------------------------------------


def ranges_of(dim: int = 3, **kwargs) -> np.ndarray:
    return np.array([[-1] * dim, [1] * dim], **{"dtype": np.float32, **kwargs})


@pytest.mark.parametrize("dtype", [">f4", np.float64])
def test_ranges_may_be_of_another_precision(tmp_path, dtype):
    np.save(tmp_path / "ranges.npy", ranges_of(dtype=dtype))
    ranges = read_ranges(str(tmp_path / "ranges.npy"), 3)
    assert ranges.starts.dtype == ranges.widths.dtype == np.dtype("=f4")
    assert np.array_equal(ranges.starts, [-1, -1, -1])


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (ranges_of(4), r"must have the shape \(2, 3\), has \(2, 4\)"),
        (ranges_of(dtype=np.int8), "must be float32, is int8"),
        (ranges_of() * np.float32(np.inf), "not finite"),
        (ranges_of(dtype=np.float64) * 1e300, "not finite"),
        (ranges_of()[::-1], "least value must be below the greatest, is not at 3 of 3 dimensions, first at 0"),
        (np.array([[0, 0, 5], [1, 1, 5]], dtype=np.float32), "is not at 1 of 3 dimensions, first at 2"),
        (ranges_of() * np.float32(3e38), "is not at 3 of 3"),
        (ranges_of() * np.float32(1e-45), "is not at 3 of 3"),
    ],
)
def test_ranges_that_cannot_be_are_named(tmp_path, array, reason):
    path = tmp_path / "ranges.npy"
    np.save(path, array)
    with pytest.raises(RangesError, match=reason) as caught:
        read_ranges(str(path), 3)
    assert str(caught.value).startswith(f"--quantization-ranges: {path}: ")
    assert "\n" not in str(caught.value)


def test_files_that_are_no_ranges_are_named(tmp_path):
    (tmp_path / "text.npy").write_text("-1,1")
    (tmp_path / "empty.npy").write_bytes(b"")
    np.save(tmp_path / "cut.npy", ranges_of())
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:-1])
    (tmp_path / "header.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:40])
    np.save(tmp_path / "pickle.npy", np.array([{}]), allow_pickle=True)
    np.savez(tmp_path / "several.npz", ranges_of())
    for name in ("text.npy", "empty.npy", "cut.npy", "header.npy", "pickle.npy", "several.npz", "none.npy", "."):
        with pytest.raises(RangesError, match="quantization-ranges") as caught:
            read_ranges(str(tmp_path / name), 3)
        assert "\n" not in str(caught.value)
