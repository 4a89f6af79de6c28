"""How a server ends, and how what hangs or dies in it is found out: without a model. Several tests share a server, and
the last of them ends it."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from tests.support.serving import Load, Server, clean_environment, eventually, is_alive, running_server, vecd
from tests.support.shared_servers import DUMMY
from tests.support.soak.faults import fork_servers
from tests.support.soak.form import only_long
from tests.support.texts import make_texts
from tests.system.faults.test_start import fail_to_start


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """For tests after which all that has died or hung lives again."""
    with running_server(*DUMMY, "--drain-timeout", "2", "--batch-timeout", "3600") as running:
        yield running


def is_ready(server: Server) -> bool:
    return httpx.get(f"{server.url}/health").status_code == 200


# --- while it serves --------------------------------------------------------------------------------------------


def test_while_no_worker_lives_health_says_so_and_requests_wait_until_their_deadline(server):
    [worker] = server.workers()
    fork_server = server.fork_server()
    fork_server.suspend()  # no new worker can be forked
    worker.kill()
    eventually(lambda: not is_ready(server))
    assert "worker 0 (life 1) was killed by SIGKILL" in httpx.get(f"{server.url}/health").json()["reason"]
    assert httpx.get(f"{server.url}/live").status_code == 200
    url, body = f"{server.url}/v1/embeddings", {"input": "patient"}
    with ThreadPoolExecutor(1) as threads:
        patient = threads.submit(httpx.post, url, json=body, timeout=60)
        hasty = httpx.post(url, json={"input": "hasty"}, headers={"x-vecd-timeout-ms": "500"}, timeout=60)
        assert hasty.status_code == 503
        assert int(hasty.headers["retry-after"]) >= 1
        assert "worker 0 (life 1)" in hasty.json()["error"]["message"]
        fork_server.resume()
        assert patient.result(60).status_code == 200
    eventually(lambda: is_ready(server), 30)


def test_a_gateway_that_hangs_is_replaced(server):
    gateway = server.gateway()
    gateway.suspend()
    [vector] = server.embed("waits in the backlog")
    assert len(vector) == 384
    assert server.gateway().pid != gateway.pid
    assert "has not sent a heartbeat" in server.stderr


def test_a_stopped_worker_is_replaced_long_before_the_batch_timeout_once_its_speed_is_known(server):
    expected = server.embed(["a", "b"])
    [worker] = server.info()["workers"]
    server.workers()[0].suspend()
    assert server.embed(["a", "b"]) == expected  # within a minute, or this raises
    assert f"worker 0 (life {worker['life']}) has had a batch of" in server.stderr
    assert server.info()["workers"][0]["life"] == worker["life"] + 1


def test_a_drain_past_its_deadline_answers_503_to_who_still_waits(server):
    server.workers()[0].suspend()
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(httpx.post, f"{server.url}/v1/embeddings", json={"input": "a"}, timeout=30)
        eventually(lambda: server.info()["queue"]["requests"] == 1)
        server.process.send_signal(signal.SIGTERM)
        assert answer.result(30).status_code == 503
        assert "shutting down" in answer.result().json()["error"]["message"]
    assert server.process.wait(20) == 0


# --- several gateways -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_gateways() -> Iterator[Server]:
    # Without a grace, a connection that is idle when the server ends is closed on a request that is on its way.
    with running_server(*DUMMY, "--gateways", "2", "--batch-timeout", "1", "--drain-grace", "0.5") as running:
        yield running


def test_a_stuck_worker_is_replaced_once_though_both_complain(two_gateways):
    server = two_gateways
    with ThreadPoolExecutor(2) as threads, server.client_of(0) as first, server.client_of(1) as second:
        server.workers()[0].suspend()
        suspended_at = time.monotonic()
        answers = [
            threads.submit(client.post, "/v1/embeddings", json={"input": text})
            for client, text in ((first, "a"), (second, "b"))
        ]
        vectors = [answer.result(30).json()["data"][0]["embedding"] for answer in answers]
        assert time.monotonic() - suspended_at >= 2, "twice the time, for two gateways"
    assert vectors == server.embed(["a", "b"])
    assert server.stderr.count("is stopped and is killed") == 1


def test_sigterm_under_load_answers_everything_that_any_gateway_has_accepted(two_gateways):
    server, texts = two_gateways, make_texts(16, seed=4)

    async def stop_under_load() -> Load:
        corpus = texts, np.array(server.embed(texts), dtype=np.float32)
        async with Load(server.url, corpus, num_clients=16) as load:
            await load.answers(200)
            server.process.send_signal(signal.SIGTERM)
            await asyncio.gather(*load._clients)
        return load

    load = asyncio.run(stop_under_load())
    assert server.process.wait(30) == 0
    assert [f"gateway {index} ended with exit code 0" in server.stderr for index in range(2)] == [True, True]
    assert load.failures == []


# --- killed, and told twice -------------------------------------------------------------------------------------


def test_a_unix_socket_is_taken_from_the_dead_alone_and_nothing_is_left_when_the_supervisor_is_killed(tmp_path):
    path = tmp_path / "sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    flags = (*DUMMY, "--uds", str(path))
    with running_server(*flags) as old:
        code, stderr = fail_to_start(tmp_path, "--uds", str(path))
        assert code == 3
        assert "Address already in use" in stderr
        path.unlink()
        with running_server(*flags, must_exit_cleanly=False) as successor:
            old.process.send_signal(signal.SIGTERM)
            assert old.process.wait(20) == 0
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as http:
                assert http.get("http://server/health").status_code == 200
            processes = successor.processes()
            assert len(processes) == 4  # supervisor, gateway, fork server, worker
            successor.process.kill()
            successor.process.wait(10)
            eventually(lambda: not any(is_alive(process) for process in processes), 5)
            assert not path.exists()
            assert os.listdir(successor.folder / "tmp") == []


def test_nothing_is_left_when_everything_is_killed_at_once():
    with running_server(*DUMMY, must_exit_cleanly=False) as server:
        processes = server.processes()
        for process in processes:
            with suppress(psutil.NoSuchProcess):  # the death of those before it may have ended it
                process.kill()
        server.process.wait(10)
        eventually(lambda: not any(is_alive(process) for process in processes), 5)
        assert os.listdir(server.folder / "tmp") == []


def test_a_second_signal_does_not_wait():
    with running_server(*DUMMY, "--drain-timeout", "60", must_exit_cleanly=False) as server:
        server.workers()[0].suspend()
        with httpx.Client(timeout=0.5) as http, pytest.raises(httpx.ReadTimeout):
            http.post(f"{server.url}/v1/embeddings", json={"input": "a"})
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: "draining" in server.stderr)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(10)


def test_a_closed_stderr_does_not_end_the_server(tmp_path):
    (tmp_path / "tmp").mkdir()
    reader, writer = os.pipe()
    process = subprocess.Popen(
        vecd("--port", "0", *DUMMY, "--ready-fd", str(writer)),
        pass_fds=[writer],
        env=clean_environment(tmp_path, {}),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
    )
    os.close(writer)
    assert process.stderr is not None
    process.stderr.close()
    with open(reader) as ready:
        url = json.loads(ready.readline())["url"]
    assert httpx.get(f"{url}/health").status_code == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def test_a_fork_server_that_never_gets_ready_ends_the_server_with_its_error(tmp_path):
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        vecd("--port", "0", "--workers", "1"),
        env=clean_environment(tmp_path, {"VECD_CACHE_DIR": str(tmp_path / "cache")}),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 100
        while process.poll() is None:
            assert time.monotonic() < deadline
            with suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children():
                    if "forkserver" in child.cmdline():
                        child.kill()
            time.sleep(0.005)
    finally:
        process.kill()
        process.wait()
    assert process.stderr is not None
    last = process.stderr.read().splitlines()[-1]
    assert process.returncode == 3
    assert "worker 0 keeps dying (3 times): at last it could not be forked: the fork server was killed by SIG" in last


# --- only in make soak ------------------------------------------------------------------------------------------


@only_long
def test_a_supervisor_that_was_stopped_accuses_nobody():
    with running_server(*DUMMY) as server:
        gateway = server.gateway()
        psutil.Process(server.pid).suspend()
        try:
            for _ in range(12):
                assert is_ready(server)
                time.sleep(1)
        finally:
            psutil.Process(server.pid).resume()
        time.sleep(2)
        assert server.gateway().pid == gateway.pid
        assert "killed" not in server.stderr


@only_long
def test_a_worker_that_never_stays_alive_makes_a_broken_model_and_not_a_spin():
    with running_server(*DUMMY) as server:
        seen: set[int] = set()

        def is_broken() -> bool:
            for worker in server.workers():
                seen.add(worker.pid)
                worker.kill()
            return "no worker stays alive" in server.stderr

        eventually(is_broken, 60)
        assert 6 <= len(seen) <= 10
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 503
        assert "dies again and again" in health.json()["reason"]
        answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}, timeout=5)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "model_broken"
        assert int(answer.headers["retry-after"]) > 0
        eventually(lambda: is_ready(server), 60)
        assert len(server.embed("and back again")) == 1


@only_long
def test_no_zombie_stays_of_a_fork_server_that_is_killed_while_it_chooses(tmp_path: Path):
    """It has started another process, to compare engines in, which is left to the supervisor."""
    cache = tmp_path / "cache"
    with running_server("--workers", "1", env={"VECD_CACHE_DIR": str(cache)}) as server:
        shutil.rmtree(cache)
        fork_servers(server)[0].kill()
        eventually(lambda: is_selecting(server), 60)
        fork_servers(server)[0].kill()
        eventually(lambda: is_ready(server), 120)
        eventually(lambda: all(map(is_alive, server.processes())))


def is_selecting(server: Server) -> bool:
    for process in server.processes():
        with suppress(psutil.Error):
            if "select" in process.cmdline():
                return True
    return False
