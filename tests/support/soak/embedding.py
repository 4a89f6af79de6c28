"""Kills `vecd embed` twice half-way, and compares what it has written with what the server answers."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import psutil

from tests.support.bulk_texts import real_lines
from tests.support.serving import Server, clean_environment, eventually
from tests.support.soak.form import pick, record

NUM_LINES = pick(short=2400, long=100_000)


KILLED_AFTER = pick(short=(1, 1), long=(33_333, 33_333))
"""When so many rows more have been committed."""


FLAGS = pick(short=("--batch-texts", "4", "--concurrency", "1"), long=())
"""The short form is over too soon otherwise."""


MIN_COSINE = 0.999
"""Of a row and the server's direct answer: the number format may be bfloat16, and batches differ."""


BATCH = 256


class Embedder:
    """One process of `vecd embed`, and the most memory it has had."""

    def __init__(self, server: Server, source: Path, out: Path) -> None:
        arguments = [str(source), "-o", str(out), "--url", server.url, *FLAGS]
        command = [sys.executable, "-m", "vecd.client.bulk.command", *arguments]
        self.stderr = out.with_name("stderr")
        with self.stderr.open("ab") as stderr:
            self.process = subprocess.Popen(command, stderr=stderr, env=clean_environment(out.parent, {}))
        self.peak_mb = 0.0

    def look(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self.peak_mb = max(self.peak_mb, psutil.Process(self.process.pid).memory_info().rss / 2**20)

    def wait_for(self, num_rows: int, journal: Path) -> None:
        """Until so many are committed."""

        def is_far_enough() -> bool:
            self.look()
            assert self.process.poll() is None, self.stderr.read_text()
            return rows_in(journal) >= num_rows

        eventually(is_far_enough, timeout_s=1500)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def rows_in(journal: Path) -> int:
    return json.loads(journal.read_bytes())["commit"]["position"]["row"] if journal.exists() else 0


def direct_answers(server: Server, lines: list[str]) -> np.ndarray:
    """What the server answers to whoever asks it for the same texts."""
    rows = []
    with httpx.Client(base_url=server.url, timeout=300) as http:
        for start in range(0, len(lines), BATCH):
            body = {"input": lines[start : start + BATCH], "encoding_format": "bytes"}
            answer = http.post("/v1/embeddings", json=body).raise_for_status()
            rows.append(np.frombuffer(answer.content, "<f4").reshape(-1, 384))
    return np.concatenate(rows)


def kill_twice_and_compare(server: Server, folder: Path) -> None:
    lines = real_lines(NUM_LINES)
    source, out = folder / "lines.txt", folder / "vectors.npy"
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    journal = folder / "vectors.npy.journal"
    began_at, cpu_before = time.monotonic(), os.times()
    peaks, resumed_at = [], []
    for num_rows in KILLED_AFTER:
        embedder = Embedder(server, source, out)
        embedder.wait_for(rows_in(journal) + num_rows, journal)
        embedder.kill()
        assert not out.exists()
        resumed_at.append(rows_in(journal))
        peaks.append(embedder.peak_mb)
    embedder = Embedder(server, source, out)
    while embedder.process.poll() is None:
        embedder.look()
        time.sleep(0.02)
    took_s, cpu = time.monotonic() - began_at, os.times()
    assert embedder.process.returncode == 0, embedder.stderr.read_text()

    vectors = np.load(out)
    assert vectors.shape == (NUM_LINES, 384)
    direct = direct_answers(server, lines)
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(direct, axis=1)
    cosines = np.einsum("ij,ij->i", vectors, direct) / lengths
    num_wrong = int((cosines < MIN_COSINE).sum())
    cpu_s = cpu.children_user + cpu.children_system - cpu_before.children_user - cpu_before.children_system
    record(
        "vecd embed, killed",
        rows=len(vectors),
        kills=len(KILLED_AFTER),
        resumed_at=resumed_at,
        wrong_rows=num_wrong,
        least_cosine=round(float(cosines.min()), 6),
        largest_difference=round(float(np.abs(vectors - direct).max()), 6),
        took_s=round(took_s, 1),
        rows_per_s=round(NUM_LINES / took_s),
        embedder_cpu_us_per_row=round(1e6 * cpu_s / NUM_LINES, 1),
        embedder_peak_mb=round(max(*peaks, embedder.peak_mb)),
    )
    assert num_wrong == 0
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith("vectors")) == ["vectors.npy"]
