"""Files of a served model change under it, by every way: what answers is the loaded model, or an error, and never
another vector. In short each change and each file once, with VECD_SOAK=1 all cells of the table.

The model is tiny, and two: one of dense vectors with a head in a file of its own, and one of sparse weights that has
other weights for queries. A server has a copy for each file that changes, and goes through all deaths, one after the
other: each cell begins where the last one ended.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers.sentence_transformer.modules import Dense, Normalize

from tests.support.checkpoints import Checkpoints
from tests.support.every_kind import remember_reference
from tests.support.serving import Server, eventually, exact_server
from tests.support.soak.faults import gateways, workers
from tests.support.soak.form import LONG, pick
from tests.support.sparse_checkpoints import save_splade

TEXTS = [" ".join(f"w{2 + (n * 7 + word * 11) % 100}" for word in range(1 + n % 40)) for n in range(64)]
_NUM_ROUNDS = pick(short=1, long=3)
_COMES_BACK_S = 60.0


def _renamed(path: Path, new: Path) -> None:
    new.rename(path)


def _copied_over(path: Path, new: Path) -> None:
    shutil.copyfile(new, path)


def _truncated(path: Path, new: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _removed(path: Path, new: Path) -> None:
    path.unlink()


CHANGES: dict[str, Callable[[Path, Path], None]] = {
    "renamed": _renamed, "copied over": _copied_over, "truncated": _truncated, "removed": _removed
}  # fmt: skip
FILES = {
    "weights": "dense/model.safetensors",
    "heads": "dense/2_Dense/model.safetensors",
    "tokenizer": "dense/tokenizer.json",
    "query weights": "sparse/*SparseStaticEmbedding/model.safetensors",
}
THREADS = {
    "one thread": ("--workers", "2", "--threads-per-worker", "1"),
    "two threads": ("--workers", "2", "--threads-per-worker", "2"),
    "leased cores": ("--workers", "1"),
}
DEATHS = ("nothing dies", "a worker dies", "a gateway dies")

_IN_SHORT = {"leased cores": [dict(zip(FILES, CHANGES, strict=True))]}
_IN_LONG = {threads: [dict.fromkeys(FILES, change) for change in CHANGES] for threads in THREADS}
"""By the number of threads, for each server the change of each file."""
_CELLS = [(threads, changes) for threads, servers in (_IN_LONG if LONG else _IN_SHORT).items() for changes in servers]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders "dense" and "sparse", and beside each file that changes another one, whose name ends in ".new"."""
    folder = tmp_path_factory.mktemp("models")
    query_weights = torch.rand(120, generator=torch.Generator().manual_seed(0))
    dense = Checkpoints(tmp_path_factory.mktemp)("bert", steps=[Dense(32, 32), Normalize()])
    sparse = save_splade(tmp_path_factory.mktemp("made"), query_weights=query_weights)
    for name, made in (("dense", dense), ("sparse", sparse)):
        shutil.copytree(remember_reference(made), folder / name)
    for name in ("weights", "heads", "query weights"):
        path = _file(folder, name)
        # In the other order, so that the sign of a whole model does not hide behind its norm.
        others = {name: tensor.flip(0).contiguous() for name, tensor in load_file(path).items()}
        save_file(others, path.with_name(f"{path.name}.new"), metadata={"format": "pt"})
    tokenizer = json.loads(_file(folder, "tokenizer").read_text())
    words = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {word: 121 - index if index > 1 else index for word, index in words.items()}
    _file(folder, "tokenizer").with_name("tokenizer.json.new").write_text(json.dumps(tokenizer))
    return folder


def _file(folder: Path, name: str) -> Path:
    [path] = folder.glob(FILES[name])
    return path


def _ask(server: Server, file: str, texts: list[str]) -> httpx.Response:
    url = f"{server.url}/m/{_name(file)}"
    if file == "query weights":
        return httpx.post(f"{url}/embed_sparse", json={"inputs": texts, "input_type": "query"}, timeout=60)
    return httpx.post(f"{url}/v1/embeddings", json={"input": texts}, timeout=60)


def _name(file: str) -> str:
    """Of the copy whose file this is."""
    return file.replace(" ", "-")


def _rows(answer: httpx.Response) -> np.ndarray:
    answered = answer.json()
    if isinstance(answered, dict):
        return np.array([item["embedding"] for item in answered["data"]])
    rows = np.zeros((len(answered), 120))
    for row, words in zip(rows, answered, strict=True):
        row[[word["index"] for word in words]] = [word["value"] for word in words]
    return rows


def _ask_all(server: Server, file: str) -> Iterator[tuple[slice, httpx.Response]]:
    """In large requests, which get leased cores, and in small ones, on connections of their own."""
    for size in (64, 32, 1, 5):
        for start in range(0, len(TEXTS), size * (1 if size > 5 else 4)):
            with suppress(httpx.TransportError):  # the gateway that had it has died
                texts = slice(start, start + size)
                yield texts, _ask(server, file, TEXTS[texts])


def _kill(server: Server, death: str) -> None:
    processes = {"nothing dies": [], "a worker dies": workers(server), "a gateway dies": gateways(server)}
    for process in processes[death]:
        process.kill()
        with suppress(psutil.NoSuchProcess):
            process.wait(10)


@pytest.mark.parametrize(("threads", "changes"), _CELLS)
def test_answers_are_of_the_loaded_model_or_errors(
    threads: str, changes: dict[str, str], models: Path, tmp_path: Path
) -> None:
    flags: list[str] = []
    for file in FILES:
        copy = shutil.copytree(models, tmp_path / _name(file))
        flags.append(f"{_name(file)}={copy / _file(copy, file).relative_to(copy).parts[0]}")
    with exact_server(*flags, *THREADS[threads]) as server:
        loaded = {}
        for file, change in changes.items():
            eventually(lambda file=file: "x-vecd-identity" in _ask(server, file, TEXTS[:1]).headers, 30)  # type: ignore[misc]
            answer = _ask(server, file, TEXTS)
            loaded[file] = _rows(answer), answer.headers["x-vecd-identity"]
            path = _file(tmp_path / _name(file), file)
            CHANGES[change](path, path.with_name(f"{path.name}.new"))
        for death in DEATHS:
            _kill(server, death)
            for file, change in changes.items():
                check(server, file, *loaded[file], death, f"{change}, {file}, {threads}, {death}")


def check(server: Server, file: str, expected: np.ndarray, identity: str, death: str, cell: str) -> None:
    deadline, num_right = time.monotonic() + _COMES_BACK_S, 0
    while num_right < _NUM_ROUNDS * 20 and time.monotonic() < deadline:
        for texts, answer in _ask_all(server, file):
            said = f"{cell}: {answer.text[:300]}"
            if answer.status_code == 200:
                np.testing.assert_allclose(_rows(answer), expected[texts], atol=1e-5, rtol=0, err_msg=said)
                assert answer.headers["x-vecd-identity"] == identity, said
                num_right += 1
            else:
                assert death != "nothing dies", said
                assert answer.status_code == 503 or "file" in answer.text, said
                assert "poison" not in answer.text, said
    assert num_right, f"{cell}: {server.stderr[-2000:]}"
