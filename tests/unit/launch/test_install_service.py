"""What `vecd install-service` writes, where, what it has systemd do, and what it refuses to touch."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vecd.launch.systemd.install_service import main

UNITS = "etc/systemd/system"
DEPLOY = Path(__file__).parents[3] / "deploy"


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """Installs below `tmp_path`; returns the exit code and the commands of systemctl."""

    def installed(*arguments: str, program: str = "/bin/true", status: int = 0) -> tuple[int, list[str]]:
        commands: list[str] = []

        def run(line: list[str]) -> int:
            commands.append(" ".join(line))
            return status

        code = main(["--run-as", "me", *arguments], tmp_path, [program], run)
        return code, [command.removeprefix("systemctl ") for command in commands]

    return installed


def test_the_units_of_deploy_are_installed_and_started(install, tmp_path, capsys):
    code, commands = install("--socket")
    assert code == 0
    assert commands == ["daemon-reload", "enable vecd.socket vecd.service", "restart vecd.socket vecd.service"]
    of_deploy = (DEPLOY / "vecd.service").read_text().replace("/opt/vecd/.venv/bin/vecd", "/bin/true")
    of_deploy = of_deploy.replace("DynamicUser=yes", "User=me").replace("=yes\nPrivateTmp", "=read-only\nPrivateTmp")
    installed = (tmp_path / UNITS / "vecd.service").read_text()
    assert installed.replace("ProtectHome=yes", "ProtectHome=read-only") == of_deploy
    assert (tmp_path / UNITS / "vecd.socket").read_text() == (DEPLOY / "vecd.socket").read_text()
    assert (tmp_path / "etc/vecd.toml").read_text() == ""
    assert install("--socket")[1][-1] == "restart vecd.service", "a socket that is there stays open"


def test_settings_stay(install, tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/vecd.toml").write_text("workers = 2\n")
    for flags in ([], ["--remove"]):
        assert install(*flags)[0] == 0
        assert (tmp_path / "etc/vecd.toml").read_text() == "workers = 2\n"


def test_nothing_is_written_where_it_is_printed(install, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.executable", "/usr/bin/python3")
    assert install("--print", program="/home/me/vecd") == (0, [])
    assert (printed := capsys.readouterr().out).count("[Service]") == printed.count("\nProtectHome=read-only\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_user_without_a_home_folder(install, monkeypatch, capsys):
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31)  # in no file of users
    assert install("--print") == (0, [])
    assert install("--user", "--print") == (3, [])
    assert "home directory" in capsys.readouterr().err


def test_a_socket_that_would_be_left_over(install, tmp_path, capsys):
    """Its service would be started with it, and refuse the port that it is given."""
    assert install("--socket")[0] == 0
    assert install() == (2, [])
    assert f"{tmp_path}/{UNITS}/vecd.socket: is there, and listens" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["of others", "latin-1", "masked", "leads nowhere"])
def test_units_of_others_are_not_touched(kind, install, tmp_path):
    path = tmp_path / UNITS / "vecd.service"
    path.parent.mkdir(parents=True)
    if kind in ("of others", "latin-1"):
        path.write_bytes(b"[Service]\n" if kind == "of others" else b"# \xe9")
    else:
        path.symlink_to("/dev/null" if kind == "masked" else "/nowhere")
    for flags in ([], ["--remove"]):
        assert install(*flags) == (2, [])
        assert os.path.lexists(path)
    assert not (tmp_path / "etc/vecd.toml").exists()


def test_remove(install, tmp_path):
    install("--socket")
    assert install("--remove") == (0, ["disable --now vecd.socket vecd.service", "daemon-reload"])
    assert not list((tmp_path / UNITS).iterdir())
    assert install("--remove") == (0, ["daemon-reload"])


def test_what_systemctl_cannot_do(install, tmp_path, capsys):
    assert install(status=1) == (3, ["daemon-reload"])
    assert "vecd install-service: failed: systemctl daemon-reload" in capsys.readouterr().err
    assert install("--remove", status=1)[0] == 3
    assert (tmp_path / UNITS / "vecd.service").exists()


def test_a_user_whose_name_is_more_than_one_line(install, capsys):
    assert install("--run-as", "x\nExecStartPre=/bin/evil") == (2, [])
    assert "a control character" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "text"),
    [("/opt/vecd", "/opt/vecd"), ("/opt/my vecd", '"/opt/my vecd"'), ("/opt/50%", "/opt/50%%"), ("/a;b", '"/a;b"')],
)
def test_programs_as_units_write_them(program, text, install, tmp_path):
    assert install(program=program)[0] == 0
    assert f"\nExecReload={text} reload $MAINPID\n" in (tmp_path / UNITS / "vecd.service").read_text()


@pytest.mark.parametrize("character", "$'\"\\\n\t")
def test_a_program_that_systemd_cannot_start(character, install, capsys):
    assert install(program=f"/opt/{character}/vecd") == (2, [])
    assert "has a quote, a backslash, a $ or a control character" in capsys.readouterr().err


def test_of_one_user(install, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", "/home/somebody/.config")
    code, commands = install("--user", "--socket")
    assert (code, commands[0]) == (0, "--user daemon-reload")
    unit = (tmp_path / "home/somebody/.config/systemd/user/vecd.service").read_text()
    assert "serve --config /home/somebody/.config/vecd/vecd.toml\n" in unit
    assert "WantedBy=default.target" in unit
    assert "DynamicUser" not in unit
    assert (tmp_path / "home/somebody/.config/vecd/vecd.toml").exists()


def test_a_program_that_the_made_up_user_cannot_read(tmp_path, capsys):
    (tmp_path / "closed").mkdir(mode=0o700)
    assert main([], tmp_path, [f"{tmp_path}/closed/vecd"], lambda line: 0) == 2
    assert "is closed to the service's user" in capsys.readouterr().err


def test_only_root_may_write_for_the_system(install, tmp_path, capsys):
    (tmp_path / "etc").write_text("")  # where nothing can be written, for root, too
    assert install() == (3, [])
    assert str(tmp_path / "etc") in capsys.readouterr().err
