from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks import environments, recipes
from benchmarks.recipes import SERVERS, Kitchen, Unavailable
from benchmarks.servers import Recipe

ON_PATH = ("tei", "vllm", "llama")


def test_what_is_not_on_path_is_unavailable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ON_PATH:
        with pytest.raises(Unavailable, match="not on PATH"):
            SERVERS[name](Kitchen())


@pytest.fixture
def all_recipes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Mapping[str, Recipe]:
    """As if every server was installed; the packages of the extra `bench`, whose versions recipes tell, have to be."""
    pytest.importorskip("fastapi", reason="needs vecd[bench]")
    for name in ("text-embeddings-router", "vllm", "llama-server"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(environments, "prepare", lambda name: tmp_path / name / "bin")
    monkeypatch.setattr(recipes, "program", lambda name: name)
    kitchen = Kitchen(vecd_arguments=["--max-batch-tokens", "512"], gguf=tmp_path / "model.gguf")
    return {name: recipe(kitchen) for name, recipe in SERVERS.items()}


def test_every_server_is_told_its_port(all_recipes: Mapping[str, Recipe]) -> None:
    for recipe in all_recipes.values():
        assert sum("{port}" in part for part in recipe.command) == 1
        assert "12345" in " ".join(part.format(port=12345) for part in recipe.command)


def test_only_vecd_is_ours(all_recipes: Mapping[str, Recipe]) -> None:
    assert {name for name, recipe in all_recipes.items() if recipe.is_ours} == {"vecd", "vecd-float32"}
    assert all_recipes["vecd"].command[-2:] == ("--max-batch-tokens", "512")


def test_llama_needs_a_model_in_its_format(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "llama-server").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="--gguf"):
        SERVERS["llama"](Kitchen())


def test_an_installation_that_fails_makes_a_server_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Path:
        raise environments.NotInstalled("no disk")

    monkeypatch.setattr(environments, "prepare", fail)
    with pytest.raises(Unavailable, match="not installed: no disk"):
        SERVERS["mosec"](Kitchen())


@pytest.mark.parametrize("name", ["infinity", "mosec", "litserve"])
def test_requirements_are_pinned_and_have_one_torch(name: str) -> None:
    lines = (environments.REQUIREMENTS / f"{name}.txt").read_text().splitlines()
    packages = [line for line in lines if not line.startswith("#")]
    assert all("==" in line and "+" not in line for line in packages)
    assert "torch==2.13.0" in packages
    assert environments.pinned_version(name, "torch") == "2.13.0"


def test_an_environment_is_made_once_for_its_requirements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []

    def run(command: list[str]) -> None:
        commands.append(command)
        (tmp_path / "mosec").mkdir(exist_ok=True)

    monkeypatch.setattr(environments, "_run", run)
    assert environments.prepare("mosec", tmp_path) == tmp_path / "mosec" / "bin"
    assert environments.prepare("mosec", tmp_path) == tmp_path / "mosec" / "bin"
    assert len(commands) == 2  # the environment, and what is in it
    (tmp_path / "mosec" / "requirements.sha256").write_text("of other requirements")
    environments.prepare("mosec", tmp_path)
    assert len(commands) == 4


def test_nothing_is_left_of_an_installation_that_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(command: list[str]) -> None:
        (tmp_path / "mosec").mkdir(exist_ok=True)
        if "install" in command:
            raise environments.NotInstalled("no wheel")

    monkeypatch.setattr(environments, "_run", run)
    with pytest.raises(environments.NotInstalled):
        environments.prepare("mosec", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_reason_names_no_folder_and_no_host() -> None:
    output = "WARNING: x\nERROR: Could not find mosec==9 at https://host.example/simple or /srv/wheels, sorry\n"
    assert environments.why_failed(output) == "Could not find mosec==9 at … or … sorry"
    assert environments.why_failed("") == "pip failed without an error"
