"""What `vecd install-service` writes, where, and what it refuses to touch."""

import os
import sys
import tomllib
from pathlib import Path

import pytest

from vecd.launch.base.exit_codes import ConfigurationError
from vecd.launch.config.settings import Settings, load_flags
from vecd.launch.systemd import install_service as service
from vecd.launch.systemd.placement import contents, own_command, paths_of, to_toml
from vecd.launch.systemd.unit_files import MADE_BY

UNITS = "etc/systemd/system"
NAME = 'a "b" \\ \u007f ü'


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to install into, for a program that any user can read."""
    monkeypatch.setattr(service, "own_command", lambda: ["/bin/true"])
    monkeypatch.setattr("vecd.launch.systemd.placement._needed", lambda given, command: [Path(command[0])])
    return tmp_path


def install(root: Path, *arguments: str) -> int:
    return service.main(["--root", str(root), *arguments])


def test_the_units_and_the_settings(root, capsys):
    assert install(root, "--socket", "--port", "9000", "--workers", "2", "--log-level", "warning") == 0
    unit = (root / UNITS / "vecd.service").read_text()
    assert "\nExecStart=/bin/true serve --config /etc/vecd.toml\n" in unit
    assert "\nExecReload=/bin/true reload $MAINPID\n" in unit
    assert "\nListenStream=127.0.0.1:9000\n" in (root / UNITS / "vecd.socket").read_text()
    assert tomllib.loads((root / "etc/vecd.toml").read_text()) == {"workers": 2, "log-level": "warning"}
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "Next:",
        "  systemctl daemon-reload",
        "  systemctl enable vecd.socket vecd.service",
        "  systemctl restart vecd.socket vecd.service",
    ]
    assert not list(root.glob("**/*.new"))


def test_what_was_written_can_be_read_as_settings():
    flags = ["--strict-model", "--max-wait", "2.5", "--served-model-name", NAME]
    given = load_flags(flags)
    lines = to_toml({name: getattr(given, name) for name in given.model_fields_set})
    assert tomllib.loads(lines) == {
        "strict-model": True,
        "max-wait": 2.5,
        "served-model-name": NAME,
    }


def test_several_models_are_written(root, monkeypatch):
    (root / "a=b/c").mkdir(parents=True)
    (root / "model").mkdir()
    monkeypatch.chdir(root)
    assert install(root, "org/m", "--workers", "2", "B=./model", "a=b/c") == 0
    written = tomllib.loads((root / "etc/vecd.toml").read_text())
    assert written == {"model": ["org/m", f"B={root}/model", f"{root}/a=b/c"], "workers": 2}
    assert install(root, "B=./model", "--force") == 0
    assert tomllib.loads((root / "etc/vecd.toml").read_text()) == {"model": f"B={root}/model"}


def test_models_that_cannot_be_served_are_not_written(root, capsys):
    assert install(root, "B=org/m", "b=/no/folder") == 2
    assert "MODEL 'b=/no/folder': the name 'b' is that of MODEL 'B=org/m', too" in capsys.readouterr().err
    assert install(root, "B=org/m", "C=/no/folder") == 2
    assert "MODEL: there is no folder /no/folder" in capsys.readouterr().err
    assert not (root / "etc").exists()


def test_nothing_is_printed_twice_or_written(root, capsys):
    assert install(root, "--print") == 0
    out = capsys.readouterr().out
    assert out.count("[Service]") == 1
    assert "# /etc/systemd/system/vecd.service\n" in out
    assert not list(root.iterdir())


def test_what_is_there_and_differs_is_not_touched(root, capsys):
    path = root / UNITS / "vecd.service"
    path.parent.mkdir(parents=True)
    path.write_text("precious\n")
    assert install(root, "--workers", "2") == 2
    assert f"{path}: is there, and differs (--force replaces it)" in capsys.readouterr().err
    assert path.read_text() == "precious\n"
    assert not (root / "etc/vecd.toml").exists()
    assert install(root, "--workers", "2", "--force") == 0
    assert path.read_text().startswith(MADE_BY)


def test_again_is_no_change_and_without_flags_settings_stay(root, capsys):
    assert install(root, "--workers", "2") == 0
    assert install(root, "--workers", "2") == 0
    assert "wrote" not in capsys.readouterr().out.splitlines()[-6:]
    assert install(root) == 0
    assert (root / "etc/vecd.toml").read_text() == "workers = 2\n"
    assert install(root, "--workers", "3") == 2


def test_a_socket_that_is_as_before_stays_open(root, capsys):
    assert install(root, "--socket", "--workers", "2") == 0
    assert install(root, "--socket", "--workers", "3", "--force") == 0
    assert capsys.readouterr().out.endswith("systemctl restart vecd.service\n")


def test_a_socket_that_would_be_left_over(root, capsys):
    """Its service would be started with it, and refuse the port that it is given."""
    assert install(root, "--socket") == 0
    assert install(root, "--port", "9000", "--force") == 2
    assert f"{root}/{UNITS}/vecd.socket: is there, and listens for the service" in capsys.readouterr().err
    assert not tomllib.loads((root / "etc/vecd.toml").read_text())


@pytest.mark.parametrize("kind", ["latin-1", "masked", "leads nowhere"])
def test_strange_units_are_not_touched(kind, root, capsys):
    path = root / UNITS / "vecd.service"
    path.parent.mkdir(parents=True)
    if kind == "latin-1":
        path.write_bytes(b"# \xe9")
    else:
        path.symlink_to("/dev/null" if kind == "masked" else "/nowhere")
    assert install(root) == 2
    assert install(root, "--remove") == 2
    assert os.path.lexists(path)
    assert not (root / "etc/vecd.toml").exists()
    assert install(root, "--force") == 0
    assert not path.is_symlink()
    assert path.read_text().startswith(MADE_BY)


def test_remove(root, capsys):
    assert install(root, "--socket", "--workers", "2") == 0
    assert install(root, "--remove") == 0
    assert not list((root / UNITS).iterdir())
    assert (root / "etc/vecd.toml").exists()
    assert install(root, "--remove") == 0
    assert "there is nothing to remove" in capsys.readouterr().out


def test_somebody_elses_unit_is_not_removed(root, capsys):
    path = root / UNITS / "vecd.service"
    path.parent.mkdir(parents=True)
    path.write_text("[Service]\n")
    assert install(root, "--remove") == 2
    assert path.exists()
    assert install(root, "--remove", "--force") == 0
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--api-key", "x" * 20], "--api-key: would stand in /etc/vecd.toml"),
        (["--api-keys", "a=" + "x" * 20], "--api-keys: would stand in /etc/vecd.toml"),
        (["--ready-fd", "2"], "ready-fd"),
        (["--config", "/etc/other.toml"], "--config: is the service's own"),
        (["--workers", "0"], "--workers: "),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["./no-such-folder"], "MODEL: there is no folder"),
        (["--socket", "--port", "0"], "--port: a socket unit needs a port of its own"),
        (["--socket", "--host", "localhost"], "--host: systemd listens on addresses, not on names"),
        (["--socket", "--uds", "/run/a\nService=other.service"], "cannot stand in a unit"),
        (["--socket", "--uds", "/run/a\\"], "cannot stand in a unit"),
        (["--socket", "--uds", "/run/" + "ü" * 52], "a unix socket's path has at most 107 bytes"),
        (["--remove", "--usr"], "--remove: takes no MODEL and no flags"),
        (["--now"], "--now: not with --root"),
        (["--user", "--run-as", "x"], "--run-as: not with --user"),
        (["--run-as", "a b"], "--run-as: is no user's name"),
        (["--run-as", "x\nExecStartPre=/bin/evil"], "--run-as: is no user's name"),
    ],
)
def test_what_cannot_be_done(arguments, problem, root, capsys):
    assert install(root, *arguments) == 2
    assert problem in capsys.readouterr().err
    assert not list(root.iterdir())


def test_what_is_no_text_is_not_written(root, capsys):
    assert install(root, "--served-model-name", os.fsdecode(b"\xff")) == 3
    assert "can't encode" in capsys.readouterr().err


def test_no_secret_is_repeated(root, capsys):
    assert install(root, "--api-key", "correct-horse-battery") == 2
    assert "correct-horse-battery" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "listen"),
    [
        ([], "127.0.0.1:8000"),
        (["--host", "0.0.0.0"], "0.0.0.0:8000"),
        (["--host", "::1", "--port", "9"], "[::1]:9"),
        (["--uds", "/run/my 100%/s"], "/run/my 100%%/s"),
    ],
)
def test_where_the_socket_listens(flags, listen, root):
    assert install(root, "--socket", *flags) == 0
    unit = (root / UNITS / "vecd.socket").read_text()
    assert f"\nListenStream={listen}\n" in unit
    assert ("SocketMode=0600" in unit) == ("--uds" in flags)
    assert not tomllib.loads((root / "etc/vecd.toml").read_text())


def test_of_one_user(root, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", "/home/somebody/.config")
    assert install(root, "--user", "--workers", "1") == 0
    unit = (root / "home/somebody/.config/systemd/user/vecd.service").read_text()
    assert "serve --config /home/somebody/.config/vecd/vecd.toml\n" in unit
    assert "WantedBy=default.target" in unit
    assert "DynamicUser" not in unit
    assert (root / "home/somebody/.config/vecd/vecd.toml").exists()


def test_only_root_may_write_for_the_system(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert service.main(["--workers", "1"]) == 2
    assert "only root may write /etc/systemd/system" in capsys.readouterr().err
    assert service.main(["--remove"]) == 2


def test_a_program_that_the_made_up_user_cannot_read(tmp_path):
    program = tmp_path / "vecd"
    program.write_text("#!/bin/sh\n")
    tmp_path.chmod(0o700)
    paths = paths_of(is_of_user=False)
    with pytest.raises(ConfigurationError) as raised:
        contents(paths, Settings.model_construct(set()), has_socket=False, run_as=None, command=[str(program)])
    [problem] = [problem for problem in raised.value.problems if problem.startswith(str(program))]
    assert "is closed to others (mode 0700)" in problem
    files = contents(paths, Settings.model_construct(set()), has_socket=False, run_as="me", command=[str(program)])
    unit = files[Path("/etc/systemd/system/vecd.service")]
    assert "\nUser=me\n" in unit
    assert "DynamicUser" not in unit


def test_the_binary(monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert own_command() == [sys.executable]
