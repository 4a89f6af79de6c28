"""vecd in Ray Data: a pipeline whose vecd and whose driver are killed writes every row once."""

import os
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.ray_cluster import ROOT, ray_cluster
from tests.support.serving import running_server

pytestmark = [
    # Minutes: Ray lists, reads and writes by tasks of its own, each of which starts a process.
    pytest.mark.skipif(not os.environ.get("VECD_SOAK"), reason="VECD_SOAK: make soak starts Ray Data"),
    pytest.mark.timeout(600),
]

_NUM_ROWS = 6000


def test_every_row_once_with_a_checkpoint(tmp_path):
    texts = [f"row {n} of a table" for n in range(_NUM_ROWS)]
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"id": [f"r{n}" for n in range(_NUM_ROWS)], "text": texts}), tmp_path / "in" / "0.parquet")
    with running_server("--engine", "dummy", "--workers", "1") as server:
        expected = [vector for start in range(0, _NUM_ROWS, 500) for vector in server.embed(texts[start : start + 500])]
    command = [
        str(ROOT / "deploy" / "bulk" / "ray_data.py"), "--input", str(tmp_path / "in"),
        "--output", str(tmp_path / "out"), "--checkpoint", str(tmp_path / "done"), "--num-nodes", "2",
        "--", "--engine", "dummy", "--workers", "1", "--dummy-ms-per-text", "3",
    ]  # fmt: skip
    with ray_cluster(2) as cluster:
        driver = cluster.driver(*command)
        deadline = time.monotonic() + 180
        while not list((tmp_path / "out").glob("*.parquet")):
            assert driver.poll() is None, cluster.log()
            assert time.monotonic() < deadline, cluster.log()
            time.sleep(0.05)
        [supervisor] = cluster.nodes[0].supervisors()
        supervisor.kill()
        time.sleep(2)
        assert driver.poll() is None, cluster.log()  # otherwise nothing is interrupted
        driver.kill()
        driver.wait()
        assert cluster.driver(*command, log="again").wait(240) == 0, cluster.log("again")
    found = pq.read_table(tmp_path / "out").to_pydict()
    assert sorted(found["id"]) == sorted(f"r{n}" for n in range(_NUM_ROWS))
    vectors = dict(zip(found["id"], found["embedding"], strict=True))
    assert np.array_equal(
        np.array([vectors[f"r{n}"] for n in range(_NUM_ROWS)], np.float32), np.array(expected, np.float32)
    )
