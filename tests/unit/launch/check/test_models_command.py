"""`vecd models`, without a server."""

import json
from pathlib import Path

import pytest

from vecd.launch.check import models_command
from vecd.launch.check.models_command import main
from vecd.launch.config.settings import load_settings


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # which the command sets, and this sets back
    monkeypatch.setenv("VECD_CACHE_DIR", str(tmp_path))


@pytest.fixture
def config(minilm_folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "vecd.toml"
    path.write_text(
        f"""
        port = 0
        engine = "dummy"
        memory-budget = "60MB"
        [models.first]
        source = "{minilm_folder}"
        aliases = ["one", "uno"]
        pinned = true
        [models.second]
        source = "{minilm_folder}"
        load = "demand"
        weight = 2.5
        """
    )
    return path


def test_it_lists_what_is_configured(config: Path, minilm_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(config), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    first, second = report["models"]
    assert (first["name"], first["aliases"], first["load"], first["pinned"]) == ("first", ["one", "uno"], "start", True)
    assert (second["load"], second["weight"], second["keep_alive_s"]) == ("demand", 2.5, 300.0)
    assert first["source"] == str(minilm_folder)
    assert first["kind"] == "dense"
    assert first["keep_alive_s"] is None
    assert first["expected_bytes"] > 1_000_000
    assert (first["state"], report["url"], report["budget_bytes"]) == (None, None, 60_000_000)
    assert any("--memory-budget: 60MB given" in problem for problem in report["problems"])


def test_the_table_has_a_line_for_each(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(config)]) == 0
    heading, first, second, server, *problems = capsys.readouterr().out.splitlines()
    columns = [heading.index(name) for name in ("name", "aliases", "kind", "source", "load", "weight", "memory")]
    assert first[columns[1] :].startswith("one, uno  dense")
    assert first[columns[4] :].startswith("start, pinned  1 ")
    assert second[columns[5] :].startswith("2.5 ")
    assert first[columns[6] :].startswith("about ")
    assert server.endswith("the budget is 60 MB")
    assert problems


def test_a_model_that_cannot_be_served_has_a_line(
    minilm_folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--port", "0", "--engine", "dummy"]
    assert main([f"good={minilm_folder}", f"bad={tmp_path / 'nothing'}", *flags]) == 3
    out = capsys.readouterr().out
    assert "good  -        dense" in out
    assert "bad: " in out


def test_settings_that_cannot_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--memory-budget", "101%", "--port", "0"]) == 2
    assert "vecd models: --memory-budget: must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "url"),
    [
        ([], "http://127.0.0.1:8000"),
        (["--port", "0"], ""),
        (["--host", "0.0.0.0", "--port", "9"], "http://127.0.0.1:9"),
        (["--host", "::1", "--port", "9"], "http://[::1]:9"),
        (["--admin-port", "9"], "http://127.0.0.1:9"),
        (["--uds", "/run/a"], "unix:/run/a"),
        (["--uds", "/run/a", "--admin-uds", "/run/b"], "unix:/run/b"),
        (["--tls-cert", "/a", "--tls-key", "/b"], "https://127.0.0.1:8000"),
    ],
)
def test_the_server_is_looked_for_where_the_configuration_listens(flags: list[str], url: str) -> None:
    assert models_command._url_of(load_settings(flags)) == url


def test_what_a_server_says_is_told_by_name(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = {
        "model": {"id": "First"},
        "models": [{"id": "First", "state": "ready", "bytes": 5_000_000, "loads": 3}, {"id": "other", "bytes": "x"}],
    }
    running = models_command._read_info(info)
    assert running["first"] == {"state": "ready", "bytes": 5_000_000, "loads": 3}
    assert running["other"] == {"state": "ready", "bytes": None, "loads": None}
    assert models_command._read_info({"model": {"id": "a"}}) == {"a": running["other"]}
    monkeypatch.setattr(models_command, "_ask", lambda *given: (running, ""))
    assert main(["--config", str(config), "--url", "http://h:1"]) == 0
    _, first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.split()[-4:] == ["ready", "5", "MB", "3"]
    assert second.split()[-4:] == ["not", "there", "-", "-"]
