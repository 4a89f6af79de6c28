"""Children that are started ahead: they know no secret, have our limits once they are taken, and do not stay behind."""

import resource

import psutil
import pytest

from tests.support.serving import command_line, eventually
from vecd.launch import prestart


@pytest.fixture(autouse=True)
def none_stays():
    yield
    prestart.end_rest()
    assert not [child for child in psutil.Process().children() if "vecd.child" in command_line(child)]


def test_a_child_that_is_taken_has_our_limits_and_no_secret(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VECD_API_KEY", "secret")
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/systemd/notify")
    prestart.begin("forkserver")
    soft, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        found = prestart.take("forkserver")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert found is not None
    popen, ours = found
    child = psutil.Process(popen.pid)
    assert child.rlimit(psutil.RLIMIT_NOFILE) == (soft - 1, hard)
    assert not {"VECD_API_KEY", "NOTIFY_SOCKET"} & set(child.environ())
    assert prestart.take("forkserver") is None
    ours.close()
    assert popen.wait(30) == 0


def test_a_child_that_has_died_is_not_given():
    prestart.begin("forkserver")
    [child] = [child for child in psutil.Process().children() if "vecd.child" in command_line(child)]
    child.kill()
    eventually(lambda: child.status() == psutil.STATUS_ZOMBIE)
    assert prestart.take("forkserver") is None
