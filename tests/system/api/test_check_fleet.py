"""`vecd check --fleet` with real servers: of models of each kind, and of one with and without another prompt."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.every_kind import every_kind_server
from tests.support.serving import RunningServer, cache_folder
from tests.support.shared_servers import DUMMY, shared_server

NAME = "all-MiniLM-L6-v2"
NOWHERE = "unix:/tmp/there-is-no-such-server.sock"


@pytest.fixture(scope="module")
def fleet(minilm_folder: Path) -> list[RunningServer]:
    """Two servers of one model, of which the second puts a prompt before each text."""
    config = Path(cache_folder(), "another-prompt.toml")
    config.write_text(
        f'[models.{NAME}]\nsource = "{minilm_folder}"\nprompts = {{ q = "query: " }}\ndefault_prompt = "q"\n'
    )
    return [shared_server(*DUMMY), shared_server(*DUMMY, "--config", str(config))]


def check(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vecd", "check", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def also_as(server: RunningServer) -> str:
    return f"http://localhost:{server.port}"


def test_a_node_of_another_prompt_is_found_by_what_it_says_and_by_its_vectors(fleet: list[RunningServer]) -> None:
    urls = [server.url for server in fleet]
    ended = check("--fleet", *urls, "--json")
    report: dict[str, Any] = json.loads(ended.stdout)
    assert (ended.returncode, report["is_uniform"], report["differing"]) == (1, False, urls)
    assert {each["what"] for each in report["differences"]} == {
        "identity", "prompt", "prompts", "the vectors of the texts",
    }  # fmt: skip
    said = [node["models"][NAME]["identity"] for node in report["nodes"]]
    assert said == [server.info()["model"]["identity"] for server in fleet]
    assert len(set(said)) == 2


def test_the_node_that_is_not_with_the_majority_is_named(fleet: list[RunningServer]) -> None:
    first, other = fleet
    ended = check("--fleet", first.url, other.url, also_as(first))
    assert ended.returncode == 1, ended.stderr
    assert f"{other.url}: {NAME}: the vectors of the texts" in ended.stdout
    assert ended.stdout.count(": the vectors of the texts") == 1


def test_models_of_each_kind_of_a_server_that_has_two_addresses() -> None:
    server = every_kind_server()
    ended = check("--fleet", server.url, also_as(server))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "may be mixed" in ended.stdout


def test_a_node_that_cannot_be_reached(fleet: list[RunningServer]) -> None:
    ended = check("--fleet", fleet[0].url, NOWHERE)
    assert ended.returncode == 2
    assert f"{NOWHERE}: cannot be reached" in ended.stdout
