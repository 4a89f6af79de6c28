"""How environments are made: once, whoever else wants one, and never half."""

import subprocess
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.clients import environments
from tests.support.clients.driving import Client, ClientError, running_client
from tests.support.clients.environments import Unavailable, command, prepare


def redirect(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Take pins from below `folder`, and make environments there. Returns the folder of pins."""
    for name in ("pins", "run"):
        (folder / name).mkdir(exist_ok=True)
    monkeypatch.setattr(environments, "PINS", folder / "pins")
    monkeypatch.setattr(environments, "cache_folder", lambda: str(folder / "run"))
    monkeypatch.setenv("VECD_TEST_ENVIRONMENTS", str(folder / "made"))
    return folder / "pins"


@pytest.fixture
def pins(tmp_path, monkeypatch) -> Path:
    """A folder of pins of our own; what is made of them is made below it."""
    return redirect(tmp_path, monkeypatch)


@pytest.fixture
def installs(monkeypatch) -> list[str]:
    """Names of environments that have been installed, or tried."""
    names: list[str] = []
    install = environments._install

    def counted(name: str, folder: Path) -> None:
        names.append(name)
        install(name, folder)

    monkeypatch.setattr(environments, "_install", counted)
    return names


def make_wheel(folder: Path) -> str:
    """A package of one line, which needs no registry. Returns what names it in a file of pins."""
    path = folder / "tinyclient-1.0-py3-none-any.whl"
    about = "tinyclient-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tinyclient.py", "ANSWER = 42\n")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tinyclient\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "tinyclient.py,,\n")
    return f"tinyclient @ file://{path}\n"


def test_an_environment_is_made_once_by_whoever_comes_first(pins, installs, tmp_path):
    (pins / "tiny.txt").write_text(make_wheel(tmp_path))
    with ThreadPoolExecutor(3) as pool:
        [folder] = set(pool.map(prepare, ["tiny"] * 3))
    assert prepare("tiny") == folder
    assert installs == ["tiny"]
    code = "import sys, tinyclient; print(tinyclient.ANSWER, sys.prefix)"
    run = [*command("tiny", folder), "-c", code]
    out = subprocess.run(run, check=True, capture_output=True, text=True, timeout=60).stdout
    assert out.split() == ["42", str(folder)]


def test_other_pins_and_what_was_begun_and_not_ended_are_made_anew(pins, installs, tmp_path):
    (pins / "tiny.txt").write_text(make_wheel(tmp_path))
    first = prepare("tiny")
    (first / "installed").unlink()
    (first / "rest").touch()
    assert prepare("tiny") == first
    assert not (first / "rest").exists()
    (pins / "tiny.txt").write_text("# other\n" + make_wheel(tmp_path))
    assert prepare("tiny") != first
    assert installs == ["tiny"] * 3


def test_what_cannot_be_installed_is_told_and_not_tried_again(pins, installs, tmp_path):
    (pins / "broken.txt").write_text(f"tinyclient @ file://{tmp_path}/tinyclient-2.0-py3-none-any.whl\n")
    with pytest.raises(Unavailable, match=r"'broken' was not installed: .*No such file or directory"):
        prepare("broken")
    with pytest.raises(pytest.skip.Exception, match="'broken' was not"), running_client("broken", "documented"):
        pass
    assert installs == ["broken"]
    assert [path.suffix for path in (tmp_path / "made").iterdir()] == [".lock"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder for `redirect`, with the environment "tiny", which has a package of one line."""
    folder: Path = tmp_path_factory.mktemp("installed")
    with pytest.MonkeyPatch.context() as monkeypatch:
        (redirect(folder, monkeypatch) / "tiny.txt").write_text(make_wheel(folder))
        prepare("tiny")
    return folder


@pytest.fixture
def script(installed, monkeypatch) -> Iterator[Client]:
    """`documented.py`, which runs any code."""
    redirect(installed, monkeypatch)
    with running_client("tiny", "documented") as client:
        yield client
    assert client._process.returncode is not None, "it outlives its test"


def test_a_script_that_prints_raises_and_returns(script: Client):
    assert script.call("run", code="print('noise'); vectors = [[1.5]]") == [[1.5]]
    with pytest.raises(ClientError) as caught:
        script.call("run", code="raise FileNotFoundError('no such thing')")
    assert caught.value.classes[:2] == ["FileNotFoundError", "OSError"]
    assert caught.value.message == "no such thing"
    assert script.call("run", code="vectors = [[0.1]]") == [[0.1]]
