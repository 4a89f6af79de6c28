"""The environment of Ray Serve, as `python -m vecd.client.ray.start` has it."""

import os
import shlex
import stat

from vecd.client.ray import start
from vecd.client.ray.environment import environment, missing


def test_variables_that_are_not_set_are_named():
    assert missing(environment()) == []
    assert missing({}) == list(environment())
    assert missing({**environment(), "RAY_SERVE_HAPROXY_RETRIES": "9"}) == []


def test_files_of_haproxy_lie_in_the_folder_that_is_named(tmp_path):
    added = {name: value for name, value in environment(tmp_path).items() if name not in environment()}
    assert len(added) == 5
    assert all(value.startswith(str(tmp_path)) for value in added.values())


def test_printed_for_a_shell(capsys):
    assert start.main(["--print"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[::2] == ["export"] * len(environment())
    assert words[1::2] == [f"{name}={value}" for name, value in environment().items()]


def test_ray_is_started_with_them_but_what_is_set_wins(monkeypatch, tmp_path):
    ray = tmp_path / "ray"
    ray.write_text("#!/bin/sh\n")
    ray.chmod(stat.S_IRWXU)
    started = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("RAY_SERVE_HAPROXY_RETRIES", "9")
    start.main(["--head", "--port=1"])
    [(path, argv, variables)] = started
    assert (path, argv) == (str(ray), [str(ray), "start", "--head", "--port=1"])
    assert variables["RAY_SERVE_HAPROXY_RETRIES"] == "9"
    assert variables["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert variables["PATH"] == os.environ["PATH"]


def test_without_ray_it_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert start.main(["--head"]) == 2
    assert "pip install 'vecd[ray]'" in capsys.readouterr().err
