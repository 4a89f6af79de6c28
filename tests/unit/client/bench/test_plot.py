import importlib.util
from pathlib import Path

import pytest

from vecd.client.bench.plot import Point, draw_latency

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
if HAS_MATPLOTLIB:
    import matplotlib.font_manager  # noqa: F401 (where it was never imported, it starts fc-list, which no unit test may)
needs_matplotlib = pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is the extra vecd[plot]")
POINTS = [Point(100, 2, 5, "1 client"), Point(900, 3.5, 9, "4 clients"), Point(1000, 15, 80, "16 clients")]
NOTHING = Point(0, None, None)


def draw(path: Path, **curves: list[Point]) -> bytes:
    draw_latency(curves, path, "latency")
    return path.read_bytes()


@pytest.mark.slow
@needs_matplotlib
def test_runs_without_successes_are_left_out(tmp_path: Path) -> None:
    assert draw(tmp_path / "a.png", one=[*POINTS, NOTHING]) == draw(tmp_path / "b.png", one=POINTS)
    assert draw(tmp_path / "a.png", one=POINTS[:2]) != draw(tmp_path / "b.png", one=POINTS)


@needs_matplotlib
@pytest.mark.parametrize("curves", [{}, {"one": []}, {"one": [NOTHING]}, {"one": [NOTHING], "other": []}])
def test_nothing_is_drawn_as_empty_axes(tmp_path: Path, curves: dict[str, list[Point]]) -> None:
    assert draw(tmp_path / "a.png", **curves).startswith(b"\x89PNG")


@needs_matplotlib
@pytest.mark.parametrize("names", [["one"], ["one", "other"], [f"server {i}" for i in range(9)]])
def test_curves_are_a_png(tmp_path: Path, names: list[str]) -> None:
    image = draw(tmp_path / "a.png", **dict.fromkeys(names, POINTS))
    assert image.startswith(b"\x89PNG\r\n")
    assert len(image) > 10_000
