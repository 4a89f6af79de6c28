"""Four models of four kinds in one server, asked for a quarter of an hour: the gateway's memory stays."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.serving import running_server
from tests.support.soak.faults import own_memory_bytes
from tests.support.soak.form import only_long, record
from tests.system.faults.test_kinds import KINDS, same

pytestmark = [only_long, pytest.mark.timeout(1200)]

NAMES = ("dense", "rerank", "sparse", "multi-vector")
DURATION_S, WARM_S, SAMPLED_S = 900, 300, 5
MOST_GROWTH_MB = 3.0


def test_a_quarter_of_an_hour_of_four_models(tmp_path: Path) -> None:
    tables = [f'[models."{name}"]\nmodel = "{KINDS[name].save(tmp_path / name)}"\n' for name in NAMES]
    (tmp_path / "vecd.toml").write_text("".join(tables))
    with running_server("--config", str(tmp_path / "vecd.toml"), "--workers", "1", "--gateways", "1") as server:
        over_at = time.monotonic() + DURATION_S

        def ask(name: str) -> int:
            kind, num_right = KINDS[name], 0
            with httpx.Client(timeout=60) as http:
                asked = [(body, kind.ask(f"{server.url}/m/{name}", body, http)) for body in kind.bodies()]
                while time.monotonic() < over_at:
                    for body, expected in asked:
                        found = kind.ask(f"{server.url}/m/{name}", body, http)
                        assert found is not None
                        assert expected is not None
                        assert same(found, expected)
                        num_right += 1
            return num_right

        gateway, sampled = server.gateway(), []
        with ThreadPoolExecutor(len(NAMES)) as clients:
            asking = [clients.submit(ask, name) for name in NAMES]
            while time.monotonic() < over_at:
                time.sleep(SAMPLED_S)
                sampled.append(own_memory_bytes(gateway) / 1e6)
            num_right = {name: future.result() for name, future in zip(NAMES, asking, strict=True)}
        assert server.gateway().pid == gateway.pid
    window = 60 // SAMPLED_S
    first, warm, last = (
        max(part) for part in (sampled[:window], sampled[WARM_S // SAMPLED_S :][:window], sampled[-window:])
    )
    record(
        "growth: four models",
        right=num_right,
        first_mb=round(first, 1),
        warm_mb=round(warm, 1),
        last_mb=round(last, 1),
    )
    assert last - warm <= MOST_GROWTH_MB
