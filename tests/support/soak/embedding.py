"""Kills `vecd embed`, and compares what it has written with what the server answers."""

import json
import os
import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import psutil

from tests.support.bulk_texts import long_and_short_lines, real_lines
from tests.support.serving import Server, clean_environment, eventually
from tests.support.soak.form import pick, record

NUM_LINES = pick(short=2400, long=100_000)
KILLED_AFTER = pick(short=(1, 1), long=(33_333, 33_333))
"""When so many rows more have been committed."""
FLAGS = pick(short=("--batch-texts", "4", "--concurrency", "1"), long=())
"""The short form is over too soon otherwise."""
OUT = "vectors.npy"
MAX_DIFFERENCE = 1e-6
"""Of a number in a row and in the server's direct answer, in float32: the batches differ."""
KILLED_AFTER_S = (2.0, 12.0)
"""From the first commit on."""
MAX_LOST_S = 3.0
SETTLE_S = 1.0
BATCH = 256


class Embedder:
    """One process of `vecd embed`, and the most memory it has had."""

    def __init__(self, server: Server, source: Path, out: Path) -> None:
        command = [sys.executable, "-m", "vecd", "embed", str(source), "-o", str(out), "--url", server.url, *FLAGS]
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
    """Kill when so many rows more have been committed. Every row must be as the server answers it."""
    source, journal, lines = _prepare(folder, real_lines(NUM_LINES))
    began_at, cpu_before = time.monotonic(), os.times()
    peaks, resumed_at = [], []
    for num_rows in KILLED_AFTER:
        embedder = Embedder(server, source, folder / OUT)
        embedder.wait_for(rows_in(journal) + num_rows, journal)
        embedder.kill()
        resumed_at.append(rows_in(journal))
        peaks.append(embedder.peak_mb)
    peaks.append(_finish(server, folder))
    took_s, cpu = time.monotonic() - began_at, os.times()
    cpu_s = cpu.children_user + cpu.children_system - cpu_before.children_user - cpu_before.children_system
    record(
        "vecd embed, killed",
        rows=len(lines),
        kills=len(KILLED_AFTER),
        resumed_at=resumed_at,
        took_s=round(took_s, 1),
        rows_per_s=round(NUM_LINES / took_s),
        embedder_cpu_us_per_row=round(1e6 * cpu_s / NUM_LINES, 1),
        embedder_peak_mb=round(max(peaks)),
    )
    _compare(server, folder, lines)


def kill_at_random_and_compare(server: Server, folder: Path, num_lines: int, num_kills: int) -> None:
    """Kill at random moments. A kill must lose at most `MAX_LOST_S` of the server's work, and no row."""
    source, journal, lines = _prepare(folder, long_and_short_lines(num_lines))
    moments, lost_s = random.Random(num_lines), []
    with httpx.Client(base_url=server.url, timeout=60) as http:

        def num_served() -> int:
            return int(http.get("/stats").json()["totals"]["tokens"])

        for _ in range(num_kills):
            time.sleep(SETTLE_S)  # the server still computes what it got from the last one
            served_before, kept_before, rows_before = num_served(), _tokens_in(journal), rows_in(journal)
            embedder = Embedder(server, source, folder / OUT)
            embedder.wait_for(rows_before + 1, journal)
            first_at, served_first = time.monotonic(), num_served()
            time.sleep(moments.uniform(*KILLED_AFTER_S))
            assert embedder.process.poll() is None, "the run is over: it needs more lines"
            num_tokens, killed_at = num_served(), time.monotonic()
            embedder.kill()
            tokens_per_s = (num_tokens - served_first) / (killed_at - first_at)
            kept = _tokens_in(journal) - kept_before
            lost_s.append(round((num_tokens - served_before - kept) / tokens_per_s, 2))
    _finish(server, folder)
    record("vecd embed, killed at random", rows=len(lines), kills=num_kills, lost_s=lost_s)
    _compare(server, folder, lines)
    assert max(lost_s) <= MAX_LOST_S


def _prepare(folder: Path, lines: list[str]) -> tuple[Path, Path, list[str]]:
    """The file of `lines`, and where the journal will be."""
    source = folder / "lines.txt"
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return source, folder / f"{OUT}.journal", lines


def _tokens_in(journal: Path) -> int:
    """Tokens of all rows that are committed."""
    return json.loads(journal.read_bytes())["commit"]["num_tokens"] if journal.exists() else 0


def _finish(server: Server, folder: Path) -> float:
    """Run until the output is complete. Returns the peak of the process's memory in MB."""
    assert not (folder / OUT).exists()
    embedder = Embedder(server, folder / "lines.txt", folder / OUT)
    while embedder.process.poll() is None:
        embedder.look()
        time.sleep(0.02)
    assert embedder.process.returncode == 0, embedder.stderr.read_text()
    return embedder.peak_mb


def _compare(server: Server, folder: Path, lines: list[str]) -> None:
    """Each row of the output with the server's direct answer."""
    vectors = np.load(folder / OUT)
    assert vectors.shape == (len(lines), 384)
    differences = np.abs(vectors - direct_answers(server, lines)).max(axis=1)
    num_wrong = int((~(differences <= MAX_DIFFERENCE)).sum())
    record("vecd embed, compared", rows=len(lines), wrong_rows=num_wrong, largest_difference=float(differences.max()))
    assert num_wrong == 0
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith("vectors")) == [OUT]
