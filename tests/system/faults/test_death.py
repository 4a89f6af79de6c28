"""Whatever dies, no accepted request goes unanswered and nothing is left behind."""

import asyncio
import json
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import numpy as np
import psutil
import pytest

from tests.support.serving import Load, clean_environment, eventually, exact_server, running_server, vecd
from tests.support.soak.form import only_long
from tests.support.texts import make_texts


@pytest.fixture(scope="module")
def corpus(reference):
    texts = [text[:400] for text in make_texts(96, seed=3)]
    return texts, reference(texts)


@pytest.fixture(scope="module")
def two_workers():
    """For tests after which all that has died lives again."""
    with exact_server() as server:
        yield server


@pytest.fixture(scope="module")
def one_worker():
    """As `two_workers`."""
    with exact_server("--workers", "1", "--batch-timeout", "3600") as server:
        yield server


def test_sigterm_under_load_answers_everything_accepted(corpus):
    async def stop_under_load(server) -> Load:
        async with Load(server.url, corpus, num_clients=16) as load:
            await load.answers(50)
            server.process.send_signal(signal.SIGTERM)
            await asyncio.gather(*load._clients)
        return load

    with exact_server("--drain-grace", "0.5") as server:
        load = asyncio.run(stop_under_load(server))
        assert server.process.wait(30) == 0
    assert load.failures == []
    assert load.num_answered >= 50


@only_long
def test_a_killed_idle_worker_is_not_noticed(corpus):
    texts, expected = corpus
    with exact_server() as server:
        for worker in server.workers():
            worker.kill()
        [vector] = server.embed(texts[0])
        assert np.abs(np.array(vector) - expected[0]).max() < 1e-5
        eventually(lambda: [w["life"] for w in server.info()["workers"]] == [2] * len(server.info()["workers"]), 30)
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_workers_killed_under_load_lose_no_request(corpus, two_workers):
    async def kill_under_load(server) -> Load:
        async with Load(server.url, corpus, num_clients=16) as load:
            for _ in range(4):
                await load.answers(20)
                workers = server.workers()
                if workers:
                    workers[-1].kill()
            await load.answers(50)
        return load

    load = asyncio.run(kill_under_load(two_workers))
    assert load.failures == []


def test_a_killed_gateway_is_replaced_and_finds_the_workers(corpus, two_workers):
    texts, expected = corpus
    server = two_workers
    eventually(lambda: len(server.info()["workers"]) == 2, 30)  # one may have died in the test before
    lives = [w["life"] for w in server.info()["workers"]]
    server.gateway().kill()
    [vector] = server.embed(texts[1])  # waits in the listening socket's backlog
    assert np.abs(np.array(vector) - expected[1]).max() < 1e-5
    assert [w["life"] for w in server.info()["workers"]] == lives


def test_a_killed_fork_server_is_replaced(corpus, one_worker):
    texts, expected = corpus
    psutil.Process(one_worker.workers()[0].ppid()).kill()
    [vector] = one_worker.embed(texts[2])
    assert np.abs(np.array(vector) - expected[2]).max() < 1e-5


@only_long
def test_a_stopped_worker_is_replaced_within_its_deadline(corpus):
    texts, expected = corpus
    with exact_server("--workers", "1", "--batch-timeout", "1") as server:
        server.workers()[0].suspend()
        [vector] = server.embed(texts[4])
        assert np.abs(np.array(vector) - expected[4]).max() < 1e-5


def test_a_worker_that_is_told_to_abort_says_where_it_is(corpus, one_worker):
    """As one that is stuck is told."""
    texts, expected = corpus
    server = one_worker
    before = len(server.stderr)
    [worker] = server.workers()
    worker.send_signal(signal.SIGABRT)
    [vector] = server.embed(texts[4])
    assert np.abs(np.array(vector) - expected[4]).max() < 1e-5
    eventually(lambda: "Fatal Python error: Aborted" in server.stderr[before:])
    assert "workers/process/loop.py" in server.stderr[before:]
    eventually(lambda: "was killed by SIGABRT" in server.stderr[before:])


def test_a_stopped_worker_is_replaced_long_before_the_batch_timeout_once_its_speed_is_known(corpus, one_worker):
    texts, expected = corpus
    server = one_worker
    server.embed(texts[3])
    life = server.info()["workers"][0]["life"]
    server.workers()[0].suspend()
    [vector] = server.embed(texts[4])  # within a minute, or this raises
    assert np.abs(np.array(vector) - expected[4]).max() < 1e-5
    assert f"worker 0 (life {life}) has had a batch of" in server.stderr
    assert server.info()["workers"][0]["life"] == life + 1


@pytest.mark.parametrize("uds", [False, True])
def test_nothing_is_left_when_the_supervisor_is_killed(tmp_path, uds):
    path = tmp_path / "sock"
    flags = ["--engine", "weightless", "--uds", str(path)] if uds else []
    with running_server("--workers", "2", *flags, must_exit_cleanly=False) as server:
        processes = server.processes()
        assert len(processes) == 5  # supervisor, gateway, fork server, two workers
        server.process.kill()
        server.process.wait(10)
        eventually(lambda: not any(is_alive(process) for process in processes), 5)
        assert not path.exists()
        assert os.listdir(server.folder / "tmp") == []


def test_nothing_is_left_when_everything_is_killed_at_once():
    with running_server("--engine", "weightless", "--workers", "1", must_exit_cleanly=False) as server:
        processes = server.processes()
        for process in processes:
            with suppress(psutil.NoSuchProcess):  # the death of those before it may have ended it
                process.kill()
        server.process.wait(10)
        eventually(lambda: not any(is_alive(process) for process in processes), 5)
        assert os.listdir(server.folder / "tmp") == []


def test_health_tells_the_truth_while_no_worker_lives():
    with running_server("--engine", "weightless", "--workers", "1") as server:
        [worker] = server.workers()
        fork_server = psutil.Process(worker.ppid())
        fork_server.suspend()  # no new worker can be forked
        worker.kill()
        eventually(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        body = httpx.get(f"{server.url}/health").json()
        assert "worker 0 (life 1) died" in body["reason"]
        assert httpx.get(f"{server.url}/live").status_code == 200
        fork_server.resume()
        eventually(lambda: httpx.get(f"{server.url}/health").status_code == 200, 30)


def test_while_no_worker_lives_requests_wait_until_their_deadline():
    with running_server("--engine", "weightless", "--workers", "1") as server, ThreadPoolExecutor(1) as threads:
        [worker] = server.workers()
        fork_server = psutil.Process(worker.ppid())
        fork_server.suspend()  # no new worker can be forked
        worker.kill()
        eventually(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        url, body = f"{server.url}/v1/embeddings", {"input": "patient"}
        patient = threads.submit(httpx.post, url, json=body, timeout=60)
        hasty = httpx.post(url, json={"input": "hasty"}, headers={"x-vecd-timeout-ms": "500"}, timeout=60)
        assert hasty.status_code == 503
        assert int(hasty.headers["retry-after"]) >= 1
        assert "worker 0 (life 1)" in hasty.json()["error"]["message"]
        fork_server.resume()
        assert patient.result(60).status_code == 200


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
    keeps_dying = "worker 0 keeps dying (3 times): at last it could not be forked: the fork server "
    # The second, where it is killed before it has been told anything.
    assert keeps_dying + "was killed by SIG" in last or keeps_dying + "does not start: [Errno 32]" in last


@only_long
def test_a_worker_that_keeps_dying_later_does_not_end_the_server():
    with running_server("--engine", "weightless", "--workers", "1") as server:
        killed = 0
        deadline = time.monotonic() + 60
        while killed < 7:  # after the fifth it takes 4 s to be back, after the sixth 8
            assert time.monotonic() < deadline
            with suppress(psutil.NoSuchProcess, ValueError):
                for worker in server.workers():
                    worker.kill()
                    killed += 1
            time.sleep(0.02)
        assert server.process.poll() is None
        eventually(lambda: httpx.get(f"{server.url}/health").status_code == 200, 60)
        assert len(server.embed("back, after all")) == 1


def test_a_drain_past_its_deadline_answers_503_to_who_still_waits():
    with running_server("--engine", "weightless", "--workers", "1", "--drain-timeout", "2") as server:
        server.workers()[0].suspend()
        with ThreadPoolExecutor(1) as threads:
            url = f"{server.url}/v1/embeddings"
            answer = threads.submit(httpx.post, url, json={"input": "a"}, timeout=30)
            eventually(lambda: server.info()["queue"]["requests"] == 1)
            server.process.send_signal(signal.SIGTERM)
            assert answer.result(30).status_code == 503
            assert "shutting down" in answer.result().json()["error"]["message"]
        assert server.process.wait(20) == 0


@only_long
def test_a_worker_that_hangs_while_the_gateway_is_replaced_is_replaced_too(corpus):
    texts, expected = corpus
    with exact_server("--workers", "1", "--batch-timeout", "1") as server:
        server.workers()[0].suspend()
        server.gateway().kill()
        [vector] = server.embed(texts[5])
        assert np.abs(np.array(vector) - expected[5]).max() < 1e-5


@only_long
def test_every_process_gets_sigterm_and_the_requests_are_still_answered(corpus):
    """As a process group's signal does, or a careless pkill."""
    texts, expected = corpus
    with exact_server("--workers", "2") as server, ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(server.embed, texts[n:]) for n in range(4)]
        # All four: one that had not connected yet would come too late.
        eventually(lambda: server.info()["queue"]["requests"] == 4)
        for process in server.processes():
            process.terminate()
        for n, answer in enumerate(answers):
            assert np.abs(np.array(answer.result(60)) - expected[n:]).max() < 1e-5
        assert server.process.wait(30) == 0
        assert "killed" not in server.stderr


def test_a_server_does_not_remove_its_successors_socket(tmp_path):
    path = tmp_path / "sock"
    flags = ["--engine", "weightless", "--workers", "1", "--uds", str(path)]
    with running_server(*flags) as old:
        path.unlink()
        with running_server(*flags):
            old.process.send_signal(signal.SIGTERM)
            assert old.process.wait(20) == 0
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as http:
                assert http.get("http://server/health").status_code == 200


def test_a_closed_stderr_does_not_end_the_server(tmp_path):
    (tmp_path / "tmp").mkdir()
    reader, writer = os.pipe()
    process = subprocess.Popen(
        vecd("--port", "0", "--engine", "weightless", "--workers", "1", "--ready-fd", str(writer)),
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


def test_a_second_signal_does_not_wait():
    flags = ("--engine", "weightless", "--workers", "1", "--drain-timeout", "60")
    with running_server(*flags, must_exit_cleanly=False) as server:
        server.workers()[0].suspend()
        with httpx.Client(timeout=0.5) as http, pytest.raises(httpx.ReadTimeout):
            http.post(f"{server.url}/v1/embeddings", json={"input": "a"})
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: "draining" in server.stderr)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(10)


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
