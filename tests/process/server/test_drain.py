"""The grace period after SIGTERM: load balancers are told first, and nobody is refused meanwhile."""

import signal
import time

import httpx

from tests.support.serving import eventually, running_server


def test_health_turns_before_anything_is_refused():
    with running_server("--engine", "weightless", "--workers", "1", "--drain-grace", "2") as server:
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        asked_at = time.monotonic()
        assert httpx.get(f"{server.url}/health").json()["reason"] == "the server is shutting down"
        for path, named in (("health", {}), ("models/all-MiniLM-L6-v2", {"name": "all-MiniLM-L6-v2"})):  # KServe's
            ready = httpx.get(f"{server.url}/v2/{path}/ready")
            assert ready.status_code == 503
            assert ready.json() == {**named, "ready": False, "reason": "the server is shutting down"}
        assert httpx.get(f"{server.url}/v2/health/live").json() == {"live": True}
        for _ in range(5):  # each on a connection of its own
            assert len(server.embed("still served")) == 1
        assert server.process.wait(30) == 0
        assert time.monotonic() - asked_at > 1
