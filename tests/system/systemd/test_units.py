"""The units are what `vecd install-service` writes, systemd understands them, and they give little away."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from vecd.launch.systemd.unit_files import quoted, service_unit, socket_unit

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


def test_the_units_in_deploy_are_those_that_are_installed():
    assert (DEPLOY / "vecd.service").read_text() == service_unit(["/opt/vecd/.venv/bin/vecd"], "/etc/vecd.toml")
    assert (DEPLOY / "vecd.socket").read_text() == socket_unit()


@needs_systemd
@pytest.mark.parametrize("variant", ["system", "run-as", "user", "drop-ins", "strange path"])
def test_systemd_finds_nothing_wrong(variant, tmp_path):
    folder = tmp_path / ("a 50% b;c" if variant == "strange path" else "plain")
    folder.mkdir()
    program = folder / "vecd"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = service_unit(
        [str(program)],
        f"""{folder}/"a" 'b' $c \\d/vecd.toml""" if variant == "strange path" else f"{folder}/vecd.toml",
        is_of_user=variant == "user",
        run_as="root" if variant == "run-as" else None,
    )
    (tmp_path / "vecd.service").write_text(unit)
    (tmp_path / "vecd.socket").write_text(socket_unit())
    if variant == "drop-ins":
        (tmp_path / "vecd.service.d").mkdir()
        for path in DEPLOY.glob("vecd-*.conf"):
            shutil.copy(path, tmp_path / "vecd.service.d")
    mode = ["--user"] if variant == "user" else []
    done = analyze("verify", *mode, tmp_path / "vecd.service", tmp_path / "vecd.socket", runtime=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not [line for line in done.stderr.splitlines() if "vecd" in line]


@needs_systemd
def test_the_exposure():
    done = analyze("security", "--offline=yes", f"--threshold={MAX_EXPOSURE * 10:.0f}", DEPLOY / "vecd.service")
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"exposure level for vecd.service: ([\d.]+)", done.stdout)
    assert found is not None
    assert float(found[1]) <= MAX_EXPOSURE


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("/opt/vecd", "/opt/vecd"),
        ("/opt/my vecd", '"/opt/my vecd"'),
        ("50%", "50%%"),
        ("$HOME", "$$HOME"),
        ('a"b', '"a\\"b"'),
        ("a'b", '"a\'b"'),
        ("a\\b", '"a\\\\b"'),
        (";", '";"'),
        ("", '""'),
    ],
)
def test_arguments_as_units_write_them(argument, text):
    assert quoted(argument) == text


@pytest.mark.parametrize("argument", ["a\nb", "a\x00b", "a\tb"])
def test_what_cannot_stand_in_a_unit(argument):
    with pytest.raises(ValueError, match="cannot stand in a unit"):
        quoted(argument)


@pytest.mark.parametrize("character", "$'\"\\")
def test_a_program_that_systemd_cannot_start(character):
    with pytest.raises(ValueError, match="systemd starts no program with"):
        service_unit([f"/opt/{character}/vecd"], "/etc/vecd.toml")
