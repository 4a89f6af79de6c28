"""vecd as a service of a real systemd, in a container that is booted for it: `make test-systemd`.

The tests go on where the one before has ended, as the life of a machine does, and each begins with the service running.
Figures are in docs/systemd.md.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.soak.form import record
from tests.support.systemd import load as load_script
from tests.support.systemd.load import NUM_CLIENTS
from tests.support.systemd.machine import Machine, booted

pytestmark = [
    pytest.mark.skipif(not os.environ.get("VECD_SYSTEMD"), reason="boots a container: make test-systemd"),
    pytest.mark.timeout(600),
]

VECD = "/opt/vecd/.venv/bin/vecd"
URL = "http://127.0.0.1:8000"
SERVING = f"Serving all-MiniLM-L6-v2 at {URL}, 2 workers"
WATCHDOG_S = 30
SHORT_START_S = 5
LOAD = Path(load_script.__file__)


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with booted() as running:
        yield running


@pytest.fixture
def service(machine: Machine) -> Machine:
    """The machine, with the service installed and running, by its socket."""
    if machine.run("systemctl", "is-active", "vecd.service").returncode:
        install(machine)
    return machine


def install(machine: Machine) -> None:
    machine.write("/etc/vecd.toml", "workers = 2\n")
    machine.must(VECD, "install-service", "--socket")


@contextmanager
def load(machine: Machine, seconds: float) -> Iterator[dict[str, object]]:
    """Clients for so long; what came of them is there after the block."""
    command = ["nsenter", "-t", str(machine.leader), "-n", sys.executable, str(LOAD), "8000", str(seconds)]
    found: dict[str, object] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as clients:
        time.sleep(2)  # they are all under way
        yield found
        assert clients.stdout is not None
        found.update(json.loads(clients.stdout.read()))


def processes(machine: Machine, name: str) -> list[psutil.Process]:
    """By their names, as they are seen out here."""
    everybody = psutil.Process(machine.leader).children(recursive=True)
    return [process for process in everybody if process.name().startswith(name)]


def supervisor(machine: Machine) -> psutil.Process:
    inside = machine.show("MainPID")
    everybody = psutil.Process(machine.leader).children(recursive=True)
    [found] = [process for process in everybody if _pid_inside(process) == inside]
    return found


def _pid_inside(process: psutil.Process) -> str:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return next(line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:"))


def test_it_starts_and_says_what_it_serves(machine: Machine):
    began_at = time.monotonic()
    install(machine)
    installed_s = time.monotonic() - began_at
    assert machine.show("StatusText") == SERVING
    assert machine.show("SubState") == "running"
    assert len(machine.embed("Hello, world")) == 384
    log = machine.log()
    assert " is ready" in log
    ready_s = float(next(line for line in log.splitlines() if "  ready in " in line).split()[-2])
    facts = json.loads(machine.must("curl", "-sS", f"{URL}/info"))["workers"][0]
    # Behind ProcSubset=pid torch would not find the processor's instructions.
    assert facts["cpu_capability"] == _cpu_capability()
    owner = supervisor(machine).uids().real
    assert owner >= 61184, "not the user that systemd has made up"
    record("systemd start", install_and_first_start_s=round(installed_s, 1), ready_s=ready_s)
    began_at = time.monotonic()
    machine.must("systemctl", "restart", "vecd.service")
    record("systemd restart without load", start_to_ready_s=round(time.monotonic() - began_at, 1))


def _cpu_capability() -> str:
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_a_start_that_goes_on_may_take_longer_than_is_allowed(service: Machine):
    """It asks for more time. The cache is empty, so that the engine is chosen anew."""
    drop_in = "/etc/systemd/system/vecd.service.d/short.conf"
    service.write(drop_in, f"[Service]\nTimeoutStartSec={SHORT_START_S}\n")
    service.must("systemctl", "daemon-reload")
    service.must("systemctl", "stop", "vecd.socket", "vecd.service")
    service.must("sh", "-c", "rm -r /var/cache/private/vecd/*")
    began_at = time.monotonic()
    service.must("systemctl", "start", "vecd.service")
    record(
        "systemd start, empty cache", allowed_s=SHORT_START_S, start_to_ready_s=round(time.monotonic() - began_at, 1)
    )
    service.must("rm", drop_in)
    service.must("systemctl", "daemon-reload")


def test_a_killed_worker_is_the_supervisors_affair(service: Machine):
    before = service.show("MainPID")
    [worker] = processes(service, "vecd-worker-0")
    with load(service, 5) as found:
        worker.kill()
    assert found["failed"] == {}
    service.until(f"systemctl status vecd.service | grep -q '{SERVING}'")
    assert (service.show("MainPID"), service.show("NRestarts")) == (before, "0")


def test_a_reload_under_load_fails_no_request(service: Machine):
    with load(service, 25) as found:
        began_at = time.monotonic()
        service.must("systemctl", "reload", "vecd.service")
        reload_s = time.monotonic() - began_at
        # It returns when the reload is done, not when it has been asked for.
        assert service.log().count("reloaded: ") == 1
        assert service.show("SubState") == "running"
    record("systemctl reload", reload_s=round(reload_s, 1), **found)
    assert found["failed"] == {}


def test_vecd_reload_finds_the_service(service: Machine):
    """By its process id, by its port, and as the only server. It is of a user that systemd has made up."""
    num_reloads = service.log().count("reloaded: ")
    for number, server in enumerate(([str(service.supervisor)], ["--port", "8000"], []), num_reloads + 1):
        assert service.must(VECD, "reload", *server) == ""
        assert service.log().count("reloaded: ") == number
    refused = service.run(VECD, "reload", "--port", "8001")
    assert refused.returncode == 3
    assert f"  vecd reload {service.supervisor}    {URL}\n" in refused.stderr


def test_a_reload_that_cannot_be_used_fails_and_changes_nothing(service: Machine):
    settings = service.must("cat", "/etc/vecd.toml")
    service.write("/etc/vecd.toml", settings + "max-tokens = 9999\n")
    assert service.run("systemctl", "reload", "vecd.service").returncode != 0
    assert service.show("ActiveState") == "active"
    assert service.show("StatusText").startswith(f"{SERVING}; not reloaded: --max-tokens: 9999 given")
    assert len(service.embed("still served")) == 384
    service.write("/etc/vecd.toml", settings)
    service.must("systemctl", "reload", "vecd.service")
    assert service.show("StatusText") == SERVING


def test_a_restart_under_load_refuses_nobody(service: Machine):
    before = service.show("MainPID")
    with load(service, 30) as found:
        began_at = time.monotonic()
        service.must("systemctl", "restart", "vecd.service")
        restart_s = time.monotonic() - began_at
    record("systemctl restart", restart_s=round(restart_s, 1), **found)
    assert service.show("MainPID") != before
    assert found["failed"] == {}


def test_a_supervisor_that_hangs_is_replaced(service: Machine):
    restarts = int(service.show("NRestarts"))
    with load(service, 2 * WATCHDOG_S) as found:
        began_at = time.monotonic()
        supervisor(service).send_signal(signal.SIGSTOP)
        killed_s = service.until(f'[ "$(systemctl show --value --property NRestarts vecd.service)" -gt {restarts} ]')
        service.until(f"systemctl status vecd.service | grep -q '{SERVING}'")
        recovered_s = time.monotonic() - began_at
        assert len(service.embed("served again")) == 384
    record("watchdog", restarted_s=round(killed_s, 1), serving_again_s=round(recovered_s, 1), **found)
    log = service.log()
    assert "Watchdog timeout" in log
    assert "Fatal Python error: Aborted" in log  # and where
    # Who had sent a request loses it; who connects waits.
    failed = found["failed"]
    assert isinstance(failed, dict)
    assert sum(failed.values()) <= NUM_CLIENTS
    assert not failed.keys() - {"RemoteDisconnected", "ConnectionResetError"}


def test_a_bad_configuration_is_not_tried_again(service: Machine):
    settings = service.must("cat", "/etc/vecd.toml")
    service.write("/etc/vecd.toml", settings + "port = 9000\n")
    assert service.run("systemctl", "restart", "vecd.service").returncode != 0
    assert (service.show("ActiveState"), service.show("ExecMainStatus")) == ("failed", "2")
    assert "port: given, but the public socket is systemd's" in service.show("StatusText")
    service.write("/etc/vecd.toml", settings)
    service.must("systemctl", "restart", "vecd.service")


def test_it_stops_and_leaves_nothing(service: Machine):
    children = [supervisor(service), *supervisor(service).children(recursive=True)]
    began_at = time.monotonic()
    service.must("systemctl", "stop", "vecd.socket", "vecd.service")
    record("systemctl stop", stop_s=round(time.monotonic() - began_at, 1))
    assert (service.show("Result"), service.show("ExecMainStatus")) == ("success", "0")
    assert not [process for process in children if process.is_running()]
    assert service.must("ls", "-A", "/dev/shm") == ""
    assert service.run("ls", "/run/vecd").returncode != 0
    assert "draining" in service.log()


def test_it_is_removed(machine: Machine):
    machine.must(VECD, "install-service", "--remove")
    assert machine.run("systemctl", "cat", "vecd.service").returncode != 0
    assert machine.run("ls", "/etc/systemd/system/vecd.socket").returncode != 0
    assert machine.run("ls", "/etc/vecd.toml").returncode == 0
