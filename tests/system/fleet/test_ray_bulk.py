"""Bulk work on Ray: what is killed is done again, what is complete is not, and every row is there once.

`make test-fleet` embeds 20,000 lines in 20 shards; with VECD_SOAK=1 they are 200,000 in 40. A vecd, a node and the
driver are killed one after the other; the driver is then run again.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.ray_cluster import ROOT, RayCluster, ray_cluster
from tests.support.serving import clean_environment

pytestmark = [
    pytest.mark.skipif(not os.environ.get("VECD_FLEET"), reason="make test-fleet starts Ray"),
    pytest.mark.timeout(1800),
]

_NUM_LINES, _NUM_SHARDS = (200_000, 40) if os.environ.get("VECD_SOAK") else (20_000, 20)
_SERVE_FLAGS = ("--engine", "dummy", "--workers", "1")
_PAUSE_S = 300.0


def test_every_row_once_whatever_is_killed(tmp_path):
    inputs, outputs = tmp_path / "in", tmp_path / "out"
    inputs.mkdir()
    lines = [f"line {n} of a corpus" for n in range(_NUM_LINES)]
    size = _NUM_LINES // _NUM_SHARDS
    for shard in range(_NUM_SHARDS):
        part = lines[shard * size : (shard + 1) * size]
        (inputs / f"part-{shard:03}.txt").write_text("".join(f"{line}\n" for line in part))
    manifest = tmp_path / "manifest.txt"
    manifest.write_text("".join(f"{path}\n" for path in sorted(inputs.iterdir())))
    expected = _embedded_directly(tmp_path, sorted(inputs.iterdir()))
    command = [
        str(ROOT / "deploy" / "bulk" / "ray_shards.py"), "--manifest", str(manifest), "--output-dir", str(outputs),
        "--num-shards", str(_NUM_SHARDS), "--", "--output-format", "npy", "--", *_SERVE_FLAGS,
        "--dummy-ms-per-text", "2",
    ]  # fmt: skip
    began_at = time.monotonic()
    with ray_cluster(3) as cluster:
        driver = cluster.driver(*command)
        before = _await_outputs(cluster, driver, outputs, 2)
        [supervisor] = cluster.nodes[0].supervisors()  # the shards of a node share a server
        supervisor.kill()
        before |= _await_outputs(cluster, driver, outputs, len(before) + 3)
        cluster.nodes[1].kill()
        before |= _await_outputs(cluster, driver, outputs, len(before) + 3)
        driver.kill()
        driver.wait()
        before |= _outputs(outputs)
        assert len(before) < _NUM_SHARDS  # otherwise nothing was interrupted
        again = cluster.driver(*command, log="again")
        assert again.wait(_PAUSE_S * 4) == 0, cluster.log("again")
    after = _outputs(outputs)
    figures = {"lines": _NUM_LINES, "shards": _NUM_SHARDS, "found_by_second_run": len(before)}
    print("RESULT", json.dumps({"trial": "Ray shards", **figures, "took_s": round(time.monotonic() - began_at)}))
    # What was complete when something died is the same file: each death cost the shards under way and no other.
    assert {name: after[name] for name in before} == before
    found = np.concatenate([np.load(outputs / f"part-{shard:03}.npy") for shard in range(_NUM_SHARDS)])
    assert np.array_equal(found, expected)
    left = sorted(path.name for path in outputs.iterdir())
    assert left == [".vecd-identity.json", *(f"part-{shard:03}.npy" for shard in range(_NUM_SHARDS))]


def _embedded_directly(folder: Path, inputs: list[Path]) -> np.ndarray:
    """Without Ray: float32 [lines, dimensions]."""
    (folder / "tmp").mkdir()
    out = folder / "direct.npy"
    command = [sys.executable, "-m", "vecd", "embed", *map(str, inputs), "-o", str(out), "--quiet", "--", *_SERVE_FLAGS]
    subprocess.run(command, check=True, timeout=300, env=clean_environment(folder, {}), cwd=ROOT)
    return np.load(out)


def _outputs(folder: Path) -> dict[str, tuple[int, int]]:
    """Of each complete output, what tells whether it is written again."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*.npy")}


def _await_outputs(
    cluster: RayCluster, driver: "subprocess.Popen[bytes]", folder: Path, num: int
) -> dict[str, tuple[int, int]]:
    deadline = time.monotonic() + _PAUSE_S
    while len(found := _outputs(folder)) < num:
        assert driver.poll() is None, cluster.log()
        assert time.monotonic() < deadline, cluster.log()
        time.sleep(0.05)
    return found
