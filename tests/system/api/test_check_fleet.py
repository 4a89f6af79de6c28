"""`vecd check --fleet` with real servers: of the bundled model with and without another prompt, and of other kinds."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import Server, exact_server, running_server
from tests.support.sparse_checkpoints import save_splade
from tests.system.dialects.test_classify import classifier

NOWHERE = "unix:/tmp/there-is-no-such-server.sock"


@pytest.fixture(scope="module")
def fleet(minilm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Two servers under one name, of which the second puts a prompt before each text."""
    folder = tmp_path_factory.mktemp("fleet")
    prompts = ("", 'prompts = { q = "query: " }\ndefault_prompt = "q"\n')
    with ExitStack() as servers:
        started = []
        for index, prompt in enumerate(prompts):
            config = folder / f"{index}.toml"
            config.write_text(f'[models.m]\nsource = "{minilm_folder}"\n{prompt}')
            started.append(servers.enter_context(exact_server("--workers", "1", "--config", str(config))))
        yield started


def check(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vecd", "check", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_node_of_another_prompt_is_found_by_what_it_says_and_by_its_vectors(fleet: list[Server]) -> None:
    urls = [server.url for server in fleet]
    ended = check("--fleet", *urls)
    assert ended.returncode == 1, ended.stderr
    assert all(url in ended.stdout for url in urls)
    ended = check("--fleet", *urls, "--json")
    report: dict[str, Any] = json.loads(ended.stdout)
    assert (ended.returncode, report["is_uniform"], report["differing"]) == (1, False, urls)
    assert {each["what"] for each in report["differences"]} == {
        "identity", "prompt", "prompts", "the vectors of the texts",
    }  # fmt: skip
    said = [node["models"]["m"]["identity"] for node in report["nodes"]]
    assert said == [server.info()["model"]["identity"] for server in fleet]
    assert len(set(said)) == 2


def test_the_node_that_is_not_with_the_majority_is_named(fleet: list[Server], minilm_folder: Path) -> None:
    first, other = fleet
    with exact_server(str(minilm_folder), "--workers", "1", "--served-model-name", "m", "--gateways", "2") as third:
        assert check("--fleet", first.url, third.url).returncode == 0
        ended = check("--fleet", first.url, other.url, third.url, "--json")
        report = json.loads(ended.stdout)
        assert (ended.returncode, report["differing"]) == (1, [other.url])


@pytest.mark.parametrize("about", ["rerank cls one", "classify cls sad glad", "token-classify none O B-PER"])
def test_scores_of_a_server_that_has_two_addresses(about: str) -> None:
    with classifier(about) as server:
        assert_uniform(server)


def test_sparse_vectors_of_a_server_that_has_two_addresses(minilm_folder: Path, tmp_path: Path) -> None:
    folder = save_splade(tmp_path, "bert")
    with running_server(str(folder), "--engine", "dummy", "--workers", "1") as server:
        assert_uniform(server)


def assert_uniform(server: Server) -> None:
    ended = check("--fleet", server.url, f"http://localhost:{server.port}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "may be mixed" in ended.stdout


def test_a_node_that_cannot_be_reached(fleet: list[Server]) -> None:
    ended = check("--fleet", fleet[0].url, NOWHERE)
    assert ended.returncode == 2
    assert f"{NOWHERE}: cannot be reached" in ended.stdout
