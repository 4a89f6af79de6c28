"""A supervisor that is killed leaves nothing: no process, no socket, no shared memory."""

import asyncio
import os
from pathlib import Path

import pytest

from tests.support.serving import running_server
from tests.support.soak.connection import connect
from tests.support.soak.faults import is_alive, processes_in, wait_until
from tests.support.soak.form import LONG, pick, record
from tests.support.soak.traffic import Traffic

GONE_WITHIN_S = 5.0


@pytest.mark.parametrize("gateways", pick(short=[2], long=[1, 2]))
def test_nothing_is_left_of_a_server_whose_supervisor_is_killed_under_load(tenants, gateways: int):
    async def trial(server) -> tuple[Traffic, float]:
        processes = processes_in(server.folder)
        assert len(processes) == 1 + gateways + 1 + 2, "supervisor, gateways, fork server, workers"
        async with Traffic(server.url, tenants, pick(short=8, long=64), pause_s=0.01) as traffic:
            await traffic.answers(20)
            server.process.kill()
            server.process.wait(10)
            gone_after_s = await wait_until(lambda: not any(map(is_alive, processes)), 30)
        return traffic, gone_after_s

    shm_before = set(os.listdir("/dev/shm"))
    with running_server(
        "--dtype", "float32", "--workers", "2", "--gateways", str(gateways), must_exit_cleanly=False
    ) as server:
        traffic, gone_after_s = asyncio.run(trial(server))
        assert processes_in(server.folder) == []
        assert memfds_of(server.folder) == []
        assert os.listdir(server.folder / "tmp") == []
        with pytest.raises(OSError, match=r"refused|Connect call failed"):
            asyncio.run(connect(server.url))
    assert not [name for name in set(os.listdir("/dev/shm")) - shm_before if "vecd" in name]
    record("supervisor killed", gateways=gateways, gone_after_s=round(gone_after_s, 2), **traffic.tally.figures())
    traffic.tally.assert_none_wrong()
    if LONG:
        assert gone_after_s <= GONE_WITHIN_S


def memfds_of(folder: Path) -> list[str]:
    """Of processes that belong to this folder's server."""
    found = []
    for process in processes_in(folder):
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            target = os.readlink(descriptor)
            if target.startswith("/memfd:"):
                found.append(f"{process.pid}: {target}")
    return found


def test_the_search_for_what_is_left_finds_what_is_there():
    with running_server("--engine", "weightless", "--workers", "1") as server:
        assert {process.pid for process in processes_in(server.folder)} == {p.pid for p in server.processes()}
        assert len(memfds_of(server.folder)) >= 2, "an arena, and the board"
