"""Children that are started ahead: they know no secret, have our limits once they are taken, and do not stay behind."""

import resource

import psutil
import pytest

from tests.support.serving import command_line, eventually
from vecd.base.programs import ahead, end_ahead, start_ahead, start_child


@pytest.fixture(autouse=True)
def none_stays():
    yield
    end_ahead()
    assert not [child for child in psutil.Process().children() if "vecd.child" in command_line(child)]


def test_a_child_that_is_taken_has_our_limits_and_no_secret(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VECD_API_KEY", "secret")
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/systemd/notify")
    start_ahead("forkserver")
    started, _ = ahead["forkserver"]
    soft, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        popen, ours = start_child("forkserver")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert popen is started
    child = psutil.Process(popen.pid)
    assert child.rlimit(psutil.RLIMIT_NOFILE) == (soft - 1, hard)
    assert not {"VECD_API_KEY", "NOTIFY_SOCKET"} & set(child.environ())
    assert not ahead
    ours.close()
    assert popen.wait(30) == 0


def test_a_child_that_has_died_is_replaced():
    start_ahead("forkserver")
    [child] = [child for child in psutil.Process().children() if "vecd.child" in command_line(child)]
    child.kill()
    eventually(lambda: child.status() == psutil.STATUS_ZOMBIE)
    popen, ours = start_child("forkserver")
    assert popen.pid != child.pid
    ours.close()
    assert popen.wait(30) == 0
