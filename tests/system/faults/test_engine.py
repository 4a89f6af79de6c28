"""A model that gives what is not a vector or kills who touches it, memory that does not suffice, and files that are cut
off: one server of it for all."""

import json
import resource
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.every_kind import remember_reference
from tests.support.serving import Server, eventually, running_server
from tests.support.soak.faults import injecting
from tests.support.soak.injection.sitecustomize import CRASH
from tests.support.texts import make_texts

_WORDS = "embeddings.word_embeddings.weight"


def post(server: Server, texts: list[str]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/embeddings", json={"input": texts}, timeout=120)


def assert_right(server: Server, texts: list[str], expected: np.ndarray) -> None:
    assert np.abs(np.array(server.embed(texts)) - expected).max() < 1e-5


def lives(server: Server) -> list[int]:
    return [worker["life"] for worker in server.info()["workers"]]


def metric(server: Server, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"vecd_{name}_total "))


@pytest.fixture(scope="module")
def sick_model(minilm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """all-MiniLM-L6-v2 whose vector of the word "panda" is not a number, and whose word "zebra" has an id that ends its
    worker (`tests.support.soak.injection`).

    "zebra" changes places with another word of the vocabulary, in the tokenizer and among the vectors: but for "panda"
    it is the same model.
    """
    folder = tmp_path_factory.mktemp("model") / "sick"
    shutil.copytree(minilm_folder, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    [other] = [token for token, number in vocabulary.items() if number == CRASH]
    places = [vocabulary["zebra"], vocabulary[other]]
    vocabulary["zebra"], vocabulary[other] = reversed(places)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    weights = load_file(folder / "model.safetensors")
    embeddings = weights.pop(_WORDS).copy()
    embeddings[places] = embeddings[places[::-1]]
    embeddings[vocabulary["panda"]] = np.nan
    save_file({**weights, _WORDS: embeddings}, folder / "new", metadata={"format": "pt"})
    (folder / "new").rename(folder / "model.safetensors")
    return remember_reference(folder)


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with which "zebra" begins to kill."""
    return tmp_path_factory.mktemp("switch") / "on"


@pytest.fixture(scope="module")
def sick_server(sick_model: Path, switch: Path) -> Iterator[Server]:
    with running_server("--dtype", "float32", str(sick_model), "--workers", "2", env=injecting(switch)) as server:
        yield server


def test_nan_fails_its_own_request_and_no_other(sick_server, reference):
    server = sick_server
    with httpx.Client(timeout=60) as http:
        answer = http.post(f"{server.url}/v1/embeddings", json={"input": ["a horse", "a panda"]})
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "not_finite")
    assert "input[1]" in error["message"]
    for path in ("/embed", "/embed_all"):  # of an API that has another status for it
        answer = httpx.post(server.url + path, json={"inputs": ["a horse", "a panda"]}, timeout=60)
        assert (answer.status_code, answer.json()["error_type"]) == (424, "Backend")
        assert "'inputs[1]'" in answer.json()["error"]
    assert "panda" not in json.dumps(error) + server.stderr
    assert np.abs(np.array(server.embed("a horse")) - reference(["a horse"])).max() < 1e-5


def test_a_worker_whose_memory_runs_out_fails_nothing_that_another_can_compute(sick_server, reference):
    """It ends, by itself or by what a library does then, and is replaced; or what is too large for memory is computed
    in parts, or fails by that name. Which of these, is up to the allocator."""
    texts = [" ".join(make_texts(6, seed=n))[: 60 * (n + 1)] for n in range(10)]
    short, expected = ["a horse"], reference(texts)
    server = sick_server
    assert_right(server, short, reference(short))
    for worker in server.workers():
        worker.rlimit(psutil.RLIMIT_AS, (worker.memory_info().vms, resource.RLIM_INFINITY))
    for text, row in zip(texts, expected, strict=True):
        answer = post(server, [text])
        if answer.status_code == 200:
            assert np.abs(np.array(answer.json()["data"][0]["embedding"]) - row).max() < 1e-5
        else:
            assert answer.json()["error"]["code"] == "out_of_memory", answer.text
    assert_right(server, short, reference(short))
    for each in server.workers():
        each.rlimit(psutil.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert_right(server, texts, expected)
    assert httpx.get(f"{server.url}/health").status_code == 200


# --- a word that kills ------------------------------------------------------------------------------------------


def test_an_input_that_kills_is_given_up_and_then_refused_and_no_other_is_harmed(sick_server, switch, reference):
    good = [text[:200] for text in make_texts(24, seed=11)]
    expected = reference(good)
    server = sick_server
    assert_right(server, ["a zebra"], reference(["a zebra"]))
    eventually(lambda: len(lives(server)) == 2, 60)
    at_first = lives(server)
    switch.touch()
    with ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(post, server, [text]) for text in good[:12]]
        killing = threads.submit(post, server, ["a horse", "a zebra"])
        answers += [threads.submit(post, server, [text]) for text in good[12:]]
        for answer, row in zip(answers, expected, strict=True):
            assert answer.result().status_code == 200, answer.result().text
            vector = np.array(answer.result().json()["data"][0]["embedding"])
            assert np.abs(vector - row).max() < 1e-5
        assert_given_up(killing.result(), server)
    assert "was killed by SIGSEGV" in server.stderr
    assert "Fatal Python error: Segmentation fault" in server.stderr
    eventually(lambda: len(lives(server)) == 2, 60)
    before = lives(server)
    assert sum(before) == sum(at_first) + 3, "it ended three workers"
    assert_given_up(post(server, ["a zebra"]), server, index=0, is_again=True)
    assert_given_up(post(server, ["a horse", "a zebra"]), server, is_again=True)
    assert_right(server, good, expected)
    assert lives(server) == before
    assert metric(server, "inputs_poisonous") == 1
    assert metric(server, "sequences_retried") >= 2


def assert_given_up(answer: httpx.Response, server: Server, index: int = 1, is_again: bool = False) -> None:
    assert answer.status_code == 500, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "poison_input")
    assert f"'input[{index}]'" in error["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert "zebra" not in answer.text + server.stderr
    assert httpx.get(f"{server.url}/health").status_code == 200 or not is_again


# --- a revision that is cut off ---------------------------------------------------------------------------------


def test_a_revision_that_cannot_be_loaded_changes_nothing(sick_model, sick_server):
    server = sick_server
    num_before, lives_before = len(server.processes()), lives(server)
    [before] = server.embed("a text")
    (sick_model / "new").write_bytes((sick_model / "model.safetensors").read_bytes()[:1000])
    (sick_model / "new").rename(sick_model / "model.safetensors")
    assert "nothing has changed" in server.reload_outcome()
    assert server.embed("a text") == [before]
    assert lives(server) == lives_before
    eventually(lambda: len(server.processes()) == num_before)
