"""systemd understands the units that `vecd install-service` writes, and they give little away."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from vecd.launch.systemd.install_service import main

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
MAX_EXPOSURE = 2.0

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def analyze(*arguments: str | Path, runtime: Path | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["systemd-analyze", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
    )


@needs_systemd
@pytest.mark.parametrize("variant", ["system", "user", "drop-ins", "strange path"])
def test_systemd_finds_nothing_wrong(variant, tmp_path, monkeypatch):
    program = tmp_path / ("a 50% b;c" if variant == "strange path" else "plain") / "vecd"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/config")
    flags = ["--user"] if variant == "user" else ["--run-as", "root"]
    assert main(["--socket", *flags], tmp_path, [str(program)], lambda line: 0) == 0
    units = tmp_path / ("config/systemd/user" if variant == "user" else "etc/systemd/system")
    if variant == "drop-ins":
        (units / "vecd.service.d").mkdir()
        for path in DEPLOY.glob("vecd-*.conf"):
            shutil.copy(path, units / "vecd.service.d")
    mode = ["--user"] if variant == "user" else []
    done = analyze("verify", *mode, units / "vecd.service", units / "vecd.socket", runtime=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not [line for line in done.stderr.splitlines() if "vecd" in line]


@needs_systemd
def test_the_exposure():
    done = analyze("security", "--offline=yes", f"--threshold={MAX_EXPOSURE * 10:.0f}", DEPLOY / "vecd.service")
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"exposure level for vecd.service: ([\d.]+)", done.stdout)
    assert found is not None
    assert float(found[1]) <= MAX_EXPOSURE
