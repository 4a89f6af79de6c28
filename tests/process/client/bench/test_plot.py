import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vecd.client.bench.command import main
from vecd.client.bench.plot import Point, draw_latency

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


needs_matplotlib = pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is the extra vecd[plot]")


POINTS = [Point(100, 2, 5, "1 client"), Point(900, 3.5, 9, "4 clients"), Point(1000, 15, 80, "16 clients")]


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)


@pytest.mark.usefixtures("without_matplotlib")
def test_it_is_said_before_anything_is_measured(
    start_server: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start_server()
    with pytest.raises(SystemExit) as exit_info:
        main(["--url", server.url, "--plot", str(tmp_path / "curve.png")])
    assert exit_info.value.code == 2
    assert "pip install 'vecd[plot]'" in capsys.readouterr().err
    assert server.bodies == []


def draw(path: Path, **curves: list[Point]) -> bytes:
    draw_latency(curves, path, "latency")
    return path.read_bytes()


@needs_matplotlib
@pytest.mark.parametrize("names", [["one"], ["one", "other"], [f"server {i}" for i in range(9)]])
def test_curves_are_a_png(tmp_path: Path, names: list[str]) -> None:
    image = draw(tmp_path / "a.png", **dict.fromkeys(names, POINTS))
    assert image.startswith(b"\x89PNG\r\n")
    assert len(image) > 10_000


def test_a_point_a_run(start_server: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[dict[str, list[Point]]] = []
    monkeypatch.setattr("vecd.client.bench.options.require_matplotlib", lambda: None)
    monkeypatch.setattr("vecd.client.bench.command.draw_latency", lambda curves, *_: drawn.append(curves))
    server = start_server()
    options = ["--clients", "1,2", "--requests", "5", "--warmup", "0", "--plot", str(tmp_path / "curve.png")]
    assert main(["--url", server.url, *options]) == 0
    ((name, points),) = drawn[0].items()
    assert name == server.url
    assert [point.label for point in points] == ["1 client", "2 clients"]
    assert all(point.throughput_per_s > 0 and 0 < (point.p50_ms or 0) <= (point.p99_ms or 0) for point in points)
