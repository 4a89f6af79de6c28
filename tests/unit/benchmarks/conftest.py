from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.notebook import Measured, Run, Session


def make_figures(rate: float, **others: Any) -> dict[str, Any]:
    figures = {
        "offered": 100,
        "requests_per_s": rate,
        "texts_per_s": rate,
        "p50_ms": 1.0,
        "p99_ms": 2.0,
        "max_ms": 3.0,
        "errors": {},
        "cpu_share": 0.1,
        "bulk": None,
    }
    return figures | others


@pytest.fixture
def make_run() -> Callable[..., Run]:
    def make(server: str, workload: str, rate: float, round_number: int = 1, **others: Any) -> Run:
        is_ours = server.startswith("vecd")
        dtype = "float32" if server == "vecd-float32" else "bfloat16"
        info = {"limits": {"max_batch_tokens": 2000}, "workers": [{"dtype": dtype}, {"dtype": dtype}]}
        memory_mb, others_cores = others.pop("memory_mb", 100.0), others.pop("others_cores", 0.0)
        return Run(
            server=server,
            round=round_number,
            workload=workload,
            figures=make_figures(rate, **others),
            info=info if is_ours else {},
            server_cores=1.9,
            others_cores=others_cores,
            memory_mb=memory_mb,
        )

    return make


@pytest.fixture
def session() -> Session:
    machine = {
        "cpu": "a processor",
        "cores": 2,
        "memory_gib": 8.0,
        "kernel": "6.1",
        "commit": "abc1234",
        "python": "3.11.7",
        "packages": {"vecd": "0.1.0", "openvino": None},
    }
    plan = {"num_rounds": 2, "duration_s": 5.0, "is_quick": False}
    session = Session("2026-11-21T12:00:00+00:00", "python -m benchmarks.compare", plan, machine)
    for server in ("vecd-float32", "vecd", "infinity"):
        session.add(Measured(server=server, version="1", command=f"{server} serve", environment={}, remark=""))
    return session
