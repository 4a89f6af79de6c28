"""Fixtures that several folders of tests use, how a run is divided among processes, and where its results are kept."""

import asyncio
import fcntl
import functools
import gc
import hashlib
import inspect
import json
import os
import ssl
from collections import defaultdict
from collections.abc import Generator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from httpx._transports import default as transports
from hypothesis import HealthCheck, settings

from tests.support.serving import CACHE_VARIABLE, RunningServer, bundled_model, cache_folder, num_starts
from tests.support.shared_servers import Keeper, shared_server
from tests.support.skipped import what_skipped_tests_need
from tests.support.soak.report import describe_machine

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Neither says anything of the code, and on a busy machine both come true.
settings.register_profile("vecd", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# For --hypothesis-profile=quick, which `make test` and `make test-fast` give: a quarter of the examples that `make
# test-all` tries. A test that asks for more than the default asks for a multiple of it.
settings.register_profile("quick", settings.get_profile("vecd"), max_examples=25)
settings.load_profile("vecd")

_MAX_PROCESSES = 8
"""Each may have the reference model and servers of its own."""
_FOLDERS = ("system", "process", "unit")
"""In the order in which they are run."""
_ASYNC_DEADLINE_S = 120.0
"""Of a test that is a coroutine, without its fixtures. The slowest takes 8 s alone and over 30 beside busy loops."""
_RESULT = "RESULT "
"""So begins a line of a test's output that is to be kept: one JSON object follows."""


_MOST_STARTS = 60
"""Of a server, in a run of all tests but those marked full."""
_DURATIONS = Path(__file__).parents[1] / "build" / "durations.json"
"""Seconds that each file of tests has taken when it was last run."""
_FULL = ("system/browser", "system/fleet", "system/benchmarks", "process/benchmarks")
"""Folders whose tests are all marked full."""

_keeper = pytest.StashKey[Keeper]()
_durations: dict[str, float] = defaultdict(float)


def pytest_configure(config: pytest.Config) -> None:
    is_first = CACHE_VARIABLE not in os.environ
    cache_folder()  # one for all processes of this run: those of xdist inherit the variable
    if is_first:
        config.stash[_keeper] = Keeper()
    _share_tls_context()


def _share_tls_context() -> None:
    """Read the certificates of all authorities once, and not in each of thousands of calls of `httpx.post`, whose
    client makes a TLS context for plain HTTP, too: 24 ms of processor time.
    """

    @cache
    def make_default(*files: str | None) -> ssl.SSLContext:
        return httpx.create_ssl_context()

    def create(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        if verify is True and cert is None and trust_env:
            return make_default(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
        return httpx.create_ssl_context(verify, cert, trust_env)

    transports.create_ssl_context = create  # type: ignore[attr-defined]


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """-n auto: one more than there are cores, because tests wait, too; -n logical, for tests that only compute: as many
    as there are cores, because each imports torch and every test file for itself.
    """
    num_spare = 1 if config.option.numprocesses == "auto" else 0
    return min(_MAX_PROCESSES, len(os.sched_getaffinity(0)) + num_spare)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the imported objects, half a million that live as long as the process, out of garbage collections."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first: where a run ends with short ones, all of its processes end together."""
    durations = _read_durations()

    def order(item: pytest.Item) -> tuple[float, int]:
        file = item.nodeid.partition("::")[0]
        return -round(durations.get(file, 0)), _FOLDERS.index(file.split("/")[1])

    items.sort(key=order)
    for item in items:
        if item.nodeid.startswith(tuple(f"tests/{folder}/" for folder in _FULL)):
            item.add_marker(pytest.mark.full)


def _read_durations() -> dict[str, float]:
    return json.loads(_DURATIONS.read_text()) if _DURATIONS.exists() else {}


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the servers that the tests have shared, and keep what a process of xdist alone cannot know."""
    keeper = session.config.stash.get(_keeper, None)
    if keeper is None:
        return
    keeper.close()
    is_whole = _is_whole(session.config)
    lines = [f"starts of a server: {num_starts()}" + (f" (≤ {_MOST_STARTS})" if is_whole else "")]
    if keeper.failure is not None:
        lines.append(f"a shared server: {keeper.failure}")
    if len(lines) > 1 or (is_whole and num_starts() > _MOST_STARTS):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if (reporter := session.config.pluginmanager.get_plugin("terminalreporter")) is not None:
        reporter.write_line("\n" + "\n".join(lines))
    if _durations:
        _DURATIONS.parent.mkdir(exist_ok=True)
        _DURATIONS.write_text(json.dumps(_read_durations() | _durations, indent=1))


def _is_whole(config: pytest.Config) -> bool:
    """Whether it is the run of `make test`."""
    return (
        config.args_source is pytest.Config.ArgsSource.TESTPATHS
        and config.option.markexpr == "not full"
        and not config.option.keyword
    )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add what trials have measured, and how each test has ended, to the file named by VECD_SOAK_RESULTS."""
    _durations[report.nodeid.partition("::")[0]] += report.duration
    path = os.environ.get("VECD_SOAK_RESULTS")
    if not path or (report.when != "call" and not report.failed):
        return
    results = [line[len(_RESULT) :] for line in report.capstdout.splitlines() if line.startswith(_RESULT)]
    record = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "test": report.nodeid,
        "outcome": report.outcome,
        "duration_s": round(report.duration, 1),
        "results": [json.loads(result) for result in results],
    }
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what skipped tests need. Each process of a run reports a file that is skipped as a whole."""
    reasons = {report.nodeid: report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])}
    for line in what_skipped_tests_need(reason.removeprefix("Skipped: ") for reason in reasons.values()):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Tests that are coroutines run in an event loop of their own, of the gateway's kind."""
    return "asyncio", {"use_uvloop": True}


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Give every test that is a coroutine a deadline, so that a hang is a failure with a traceback. A loop of virtual
    time finds that by itself."""
    test = pyfuncitem.obj
    if inspect.iscoroutinefunction(test) and "loop_factory" not in str(pyfuncitem.funcargs["anyio_backend"]):

        @functools.wraps(test)
        async def within_deadline(**fixtures: Any) -> None:
            async with asyncio.timeout(_ASYNC_DEADLINE_S):
                await test(**fixtures)

        pyfuncitem.obj = within_deadline
    return (yield)


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    return bundled_model()


@pytest.fixture(scope="session")
def server() -> RunningServer:
    """The server as a newcomer starts it: the bundled model, every default, a free port."""
    return shared_server()


@pytest.fixture(scope="session")
def float32_server() -> RunningServer:
    return shared_server("--dtype", "float32")


@pytest.fixture(scope="session")
def reference(minilm_folder):
    """sentence-transformers itself, on the same model: texts → float32 [B, 384].

    What one process of a run has computed, the others read: to import it takes seconds.
    """

    @cache
    def model():
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(1)  # more would only wait for each other beside the other processes of a run
        return SentenceTransformer(str(minilm_folder), device="cpu")

    def encode(texts: list[str]) -> np.ndarray:
        name = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
        path = Path(cache_folder(), f"reference-{name}.npy")
        with open(f"{path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                # A thousand texts took 25 s of processor time in batches of 4, 31 in those of 16, 37 in those of 32.
                vectors = model().encode(texts, batch_size=4, convert_to_numpy=True, show_progress_bar=False)
                np.save(path, vectors)
            return np.load(path)

    return encode
