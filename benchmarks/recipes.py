"""Every server that is compared, as data: how it is started, with which settings and why, and whether it is here.

Owns the list. Starts no server, but installs the environments of those that have one. Called by `benchmarks.compare`,
and for the rerankers by `benchmarks.rerank`.

All serve the same folder, all-MiniLM-L6-v2 or what is made of it, on the cores that this process may use, in float32
unless their name says otherwise. Settings are the best that each was found to have here, not its defaults.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks import environments
from benchmarks.machine import num_cores
from benchmarks.servers import Recipe, bundled_model, program

_APPS = Path(__file__).parent / "apps"
_PATIENCE_S = 120
"""How long peers let a request wait: longer than the load generator does, so that slow is not counted as failed."""
_MAX_CLIENTS = 2048
"""More than any load has, for peers that limit what may wait."""


class Unavailable(Exception):
    """Raised when a server cannot be run here. One line: why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kitchen:
    """What recipes are made from."""

    vecd_arguments: Sequence[str] = ()
    gguf: Path | None = None
    """The model in llama.cpp's format, which nobody but its owner can name."""


def _vecd(name: str, dtype: str, kitchen: Kitchen) -> Recipe:
    command = (program("vecd"), "serve", bundled_model(), "--port", "{port}", "--workers", "auto", "--dtype", dtype)
    remark = "one worker per core, which has idle cores lent" + (
        ", the number format left to it" if dtype == "auto" else ""
    )
    arguments = tuple(kitchen.vecd_arguments)
    return Recipe(name=name, command=command + arguments, is_ours=True, version=version("vecd"), remark=remark)


def vecd_float32(kitchen: Kitchen) -> Recipe:
    return _vecd("vecd float32", "float32", kitchen)


def vecd_default(kitchen: Kitchen) -> Recipe:
    return _vecd("vecd", "auto", kitchen)


def fastapi(_: Kitchen) -> Recipe:
    """In this environment, as `apps/fastapi_app.py` says."""
    command = (
        *(program("gunicorn"), "fastapi_app:app", "--chdir", str(_APPS)),
        *("--worker-class", "uvicorn.workers.UvicornWorker", "--workers", str(num_cores())),
        *("--bind", "127.0.0.1:{port}", "--timeout", str(_PATIENCE_S)),
    )
    return Recipe(
        name="fastapi",
        command=command,
        environment=_app_environment(),
        started_line=b"Application startup complete",
        num_started=num_cores(),
        version=f"{version('fastapi')}, sentence-transformers {version('sentence-transformers')}",
        remark="`benchmarks/apps/fastapi_app.py` under gunicorn, a process and a torch thread per core",
    )


def infinity(_: Kitchen) -> Recipe:
    return infinity_of(bundled_model())


def infinity_of(*models: str, names: Sequence[str] = ()) -> Recipe:
    """`models`: their folders. `names`: one for each, as requests have it; without them infinity chooses."""
    command = (
        *(str(_environment("infinity") / "infinity_emb"), "v2"),
        *(part for model in models for part in ("--model-id", model)),
        *(part for name in names for part in ("--served-model-name", name)),
        *("--engine", "torch", "--device", "cpu", "--dtype", "float32"),
        # Its default. With 64 clients and short texts, 2 cores: 160 requests/s; of 64: 148-170, no more than noise.
        # BetterTransformer, its default too, made no difference either: 157 without it.
        *("--batch-size", "32"),
        *("--host", "127.0.0.1", "--port", "{port}", "--url-prefix", "/v1"),
        *("--log-level", "warning"),  # no line for each request
    )
    environment = {
        "INFINITY_ANONYMOUS_USAGE_STATS": "0",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        # It is one process, so torch has to take all cores for one forward pass: its own choice, said aloud. One
        # thread was no faster with 64 clients (149-162 against 160 requests/s). A second replica (--device-id 0,1)
        # never answered its first request.
        "OMP_NUM_THREADS": str(num_cores()),
    }
    return Recipe(
        name="infinity",
        command=command,
        environment=environment,
        version=environments.pinned_version("infinity", "infinity_emb"),
        remark="torch engine with BetterTransformer, one process with a torch thread per core",
    )


def cross_encoder(model: str, num_processes: int, num_threads: int) -> Recipe:
    """In this environment, as `apps/rerank_app.py` says. `model`: its folder. `num_threads`: of torch, in each
    process."""
    command = (
        *(program("gunicorn"), "rerank_app:app", "--chdir", str(_APPS)),
        *("--worker-class", "uvicorn.workers.UvicornWorker", "--workers", str(num_processes)),
        # Its arbiter would take a process that sleeps between its turns for one that hangs.
        *("--bind", "127.0.0.1:{port}", "--timeout", "0"),
    )
    threads = {"BENCH_THREADS": str(num_threads), "OMP_NUM_THREADS": str(num_threads)}
    return Recipe(
        name="fastapi",
        command=command,
        environment=_app_environment(model) | threads,
        started_line=b"Application startup complete",
        num_started=num_processes,
        version=f"{version('fastapi')}, sentence-transformers {version('sentence-transformers')}",
        remark=f"`benchmarks/apps/rerank_app.py` under gunicorn, {num_processes} × {num_threads} torch threads",
    )


def mosec(_: Kitchen) -> Recipe:
    command = (
        *(str(_environment("mosec") / "python"), str(_APPS / "mosec_app.py")),
        *("--address", "127.0.0.1", "--port", "{port}"),
        *("--timeout", str(_PATIENCE_S * 1000), "--capacity", str(_MAX_CLIENTS), "--log-level", "warning"),
    )
    return Recipe(
        name="mosec",
        command=command,
        environment=_app_environment(),
        health_path="/",
        started_line=b"embedder ready",
        num_started=num_cores(),
        version=environments.pinned_version("mosec", "mosec"),
        remark="`benchmarks/apps/mosec_app.py`: a sentence-transformers worker per core, batches of up to 64 requests",
    )


def litserve(_: Kitchen) -> Recipe:
    return Recipe(
        name="litserve",
        command=(str(_environment("litserve") / "python"), str(_APPS / "litserve_app.py"), "{port}"),
        environment=_app_environment(),
        started_line=b"embedder ready",
        num_started=num_cores(),
        version=environments.pinned_version("litserve", "litserve"),
        remark="`benchmarks/apps/litserve_app.py`: a sentence-transformers worker per core, batches of up to 64 "
        "requests; not its `OpenAIEmbeddingSpec`, which takes no lists when it batches",
    )


def text_embeddings_inference(_: Kitchen) -> Recipe:
    """Written from its documentation (1.9.3) and never run by us: no binary was at hand."""
    command = (
        *(_on_path("text-embeddings-router"), "--model-id", bundled_model(), "--dtype", "float32"),
        *("--hostname", "127.0.0.1", "--port", "{port}"),
        # A permit for each text, and a bulk request has 512 of them.
        *("--max-client-batch-size", "512", "--max-concurrent-requests", str(4 * _MAX_CLIENTS)),
    )
    remark = "never tried by us before this run: read from its documentation"
    return Recipe(name="text-embeddings-inference", command=command, version="on PATH", remark=remark)


def vllm(_: Kitchen) -> Recipe:
    """Written from its documentation (0.33) and never run by us. It refuses texts over its limit unless each request
    says otherwise, so the mixed lengths may not be measured."""
    command = (
        *(_on_path("vllm"), "serve", bundled_model(), "--runner", "pooling", "--dtype", "float32"),
        *("--served-model-name", "all-MiniLM-L6-v2", "--max-model-len", "256", "--enforce-eager"),
        *("--host", "127.0.0.1", "--port", "{port}"),
    )
    remark = "never tried by us before this run: read from its documentation"
    return Recipe(name="vllm", command=command, version="on PATH", remark=remark)


def llama_cpp(kitchen: Kitchen) -> Recipe:
    """Written from its documentation and never run by us. An input must fit one micro-batch (`--ubatch-size`)."""
    program_path = _on_path("llama-server")
    if kitchen.gguf is None:
        raise Unavailable("llama-server is on PATH, but no --gguf names all-MiniLM-L6-v2 in its format")
    command = (
        *(program_path, "--model", str(kitchen.gguf), "--embeddings", "--pooling", "mean"),
        *("--threads", str(num_cores()), "--batch-size", "2048", "--ubatch-size", "2048", "--ctx-size", "8192"),
        *("--host", "127.0.0.1", "--port", "{port}"),
    )
    remark = "never tried by us before this run: read from its documentation"
    return Recipe(name="llama.cpp", command=command, version="on PATH", remark=remark)


SERVERS: Mapping[str, Callable[[Kitchen], Recipe]] = {
    "vecd-float32": vecd_float32,
    "vecd": vecd_default,
    "fastapi": fastapi,
    "infinity": infinity,
    "mosec": mosec,
    "litserve": litserve,
    "tei": text_embeddings_inference,
    "vllm": vllm,
    "llama": llama_cpp,
}
"""In this order they take turns. Each raises Unavailable when its server is not here."""


def _environment(name: str) -> Path:
    try:
        return environments.prepare(name)
    except environments.NotInstalled as error:
        raise Unavailable(f"not installed: {error}") from error


def _on_path(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise Unavailable(f"{name} is not on PATH")
    return path


def _app_environment(model: str | None = None) -> dict[str, str]:
    """`model`: its folder; None for the bundled one."""
    return {"BENCH_MODEL": model or bundled_model(), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
