"""The settings of `vecd serve`: their names, defaults, ranges and help texts.

Owns what a value must be. `vecd.launch.config.settings` reads them; every process gets them as they are.
"""

# ruff: noqa: RUF009 (a flag is a dataclasses.field)

import os
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from vecd.base.flags import Secret, flag
from vecd.shm.control import parse_keep_alive
from vecd.shm.output import MAX_BATCH_TOKENS, MAX_BATCH_TOKENS_ON_GPU

# The reading of `--memory-budget`: bytes, or a share of the memory that the server may use.

_AMOUNT = re.compile(r"(\d{1,18}(?:\.\d{1,6})?)\s*(%|B|[KMGT]i?B|[KMGT]i)?", re.ASCII | re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_FORMS = "must be above 0: bytes, as 2GiB or 500MB, or a share of the memory limit of at most 100%, as 80%"


def read_memory_budget(text: str, memory_nbytes: int) -> int:
    """In bytes, 1 or more. `memory_nbytes`: what a share is of. Raises ValueError, which says what it must be."""
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise ValueError(_FORMS)
    number, unit = float(match[1]), (match[2] or "").lower()
    if unit == "%":
        if not 0 < number <= 100:
            raise ValueError(_FORMS)
        return max(1, int(memory_nbytes * number / 100))
    nbytes = int(number * (1024 if "i" in unit else 1000) ** _POWERS[unit.rstrip("b").removesuffix("i")])
    if nbytes < 1:
        raise ValueError(_FORMS)
    return nbytes


# As browsers write it, in any case; some pages are of an app or an extension: app://obsidian.md.
_ORIGIN = re.compile(
    r"[a-z][a-z0-9+.-]*://(?:[a-z0-9_][a-z0-9._-]*|\[[0-9a-f:.]+\])(?::(?P<port>[0-9]{1,5}))?", re.ASCII | re.IGNORECASE
)


def _keep_alive(value: str) -> str:
    if value:
        parse_keep_alive(value)
    return value


def _budget(value: str) -> str:
    if value:
        read_memory_budget(value, 1 << 30)
    return value


def _origins(origins: str) -> str:
    names = names_of(origins)
    for name in names:
        match = _ORIGIN.fullmatch(name)
        if not (name in ("*", "null") or (match and int(match["port"] or 0) < 65536)):
            raise ValueError(
                f"{name!r} is not an origin: a scheme and a host, and a port if there is one, as in "
                "https://example.com or http://localhost:3000; no path, and no * within it"
            )
    if "*" in names and len(names) > 1:
        raise ValueError("* allows every origin: name no other beside it")
    return origins


def names_of(setting: str) -> tuple[str, ...]:
    """Of a setting that has names with commas between them."""
    return tuple(name.strip() for name in setting.split(",") if name.strip())


def _collector(url: str) -> str:
    if not url:
        return url
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        is_right = False
    if not is_right or parts.query or parts.fragment:
        raise ValueError("is not the URL of a collector: http or https, a host, and a port if there is one")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must not have a password in it: OTEL_EXPORTER_OTLP_HEADERS is for credentials")
    return url


def _open(fd: int) -> int:
    try:
        os.fstat(fd)
    except OSError:
        raise ValueError("is not an open file descriptor") from None
    return fd


def _key(key: Secret) -> Secret:
    if not key.value.strip():
        raise ValueError("must not be blank")
    return key


def _source(model: str) -> str:
    if "\0" in model:
        raise ValueError("must not have a NUL character")
    return model


MAX_GATEWAYS = 64
MAX_WORKERS = 1024
"""Of a model: each is a process, and three descriptors of the supervisor's."""

_models = partial(flag, group="models")
_listening = partial(flag, group="listening")
_port = partial(_listening, at_least=0, at_most=65535, word="PORT")
_computing = partial(flag, group="computing", is_per_model=True)
_inputs = partial(flag, group="inputs", is_per_model=True)
_limits = partial(flag, group="limits")
_of_model = partial(_limits, is_per_model=True)
_vectors = partial(flag, group="vectors")
_times = partial(flag, group="times")
_seconds = partial(_times, above=0, at_most=86_400, unit="seconds")
_several = partial(flag, group="several models")
_keys = partial(flag, group="keys")
_logs = partial(flag, group="files and logs")


@dataclass(frozen=True, slots=True)
class GivenSettings:
    """What the sources say, as it stands there."""

    names: tuple[str, ...] = ()
    """The settings that have not their defaults."""
    models: tuple[str, ...] = ()
    """SOURCE or NAME=SOURCE each; none: no source names a model outside of the tables."""
    origin: str = "MODEL"
    tables: object = None
    file: str = ""


@dataclass(frozen=True, kw_only=True)
class Settings:
    model: str = _models(
        "",
        "folder of a model, its id on the Hugging Face hub, or a name that vecd check --known lists; default: "
        "the bundled all-MiniLM-L6-v2. Several are served together; NAME=MODEL gives one a name",
        is_basic=True,
        names=("model",),
        word="MODEL",
        read=_source,
    )
    kind: Literal["auto", "dense", "rerank", "classify", "token-classify", "sparse", "multi-vector"] = _models(
        "auto",
        "what the model is served as, where its files do not say it, or say it wrongly; auto: as its files "
        "say. A kind that the model has no head for is refused",
        is_per_model=True,
    )
    pooling: Literal["auto", "mean", "cls", "lasttoken"] = _models(
        "auto",
        "how the tokens of a dense model become a vector, whatever its files say; auto: as its files say, "
        "else lasttoken for a causal language model and mean for others, with a warning",
        is_per_model=True,
    )
    file: str = _models(
        "",
        "file of the weights: an ONNX export (onnx/model_quantized.onnx) or GGUF (NAME.gguf). Default: the first of "
        "safetensors, pickles, exports and GGUF that is there, of several the most exact one",
        is_per_model=True,
        word="FILE",
    )
    host: str = _listening("127.0.0.1", "address to listen on", is_basic=True, word="ADDRESS")
    port: int = _port(8000, "port to listen on; 0 takes a free one", is_basic=True)
    uds: Path | None = _listening(None, "listen on this unix socket instead of host and port, which are ignored")
    admin_host: str = _listening("127.0.0.1", "address of --admin-port", word="ADDRESS")
    admin_port: int | None = _port(
        None,
        "serve /metrics, /info and /admin on this port instead of the public one; 0 takes a free one",
    )
    admin_uds: Path | None = _listening(None, "serve /metrics, /info and /admin on this unix socket instead")
    tls_cert: Path | None = _listening(None, "serve HTTPS with this certificate chain (PEM)")
    tls_key: Path | None = _listening(None, "private key of --tls-cert (PEM, without a passphrase)")
    workers: int | Literal["auto"] = _computing(
        "auto",
        f"worker processes; auto: one per core the process may use, or one per GPU. At most {MAX_WORKERS}",
        is_basic=True,
        at_least=1,
        at_most=MAX_WORKERS,
    )
    gateways: int = _computing(
        1,
        "gateway processes; use more than one if parsing and encoding take more than a core. "
        "They divide max-requests and max-connections among them",
        is_per_model=False,
        at_least=1,
        at_most=MAX_GATEWAYS,
    )
    threads_per_worker: int | Literal["auto"] = _computing(
        "auto",
        "threads of one worker's forward pass; auto: one, and on a processor as many more as there are "
        "idle cores and measurably make a batch faster",
        at_least=1,
        at_most=1024,
    )
    device: Literal["auto", "cpu", "cuda"] = _computing(
        "auto",
        "where the model runs; auto: on GPUs, if there are any and torch is not its CPU build",
        is_basic=True,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = _computing(
        "auto",
        "number format of the forward pass; auto: bfloat16 where the processor or GPU has it, the "
        "vectors agree with float32's and, on a processor, it is measured at 1.1 times the speed of float32 or more; "
        "else float32. int8: faster, but less exact vectors",
        is_basic=True,
    )
    engine: Literal["auto", "lean", "fused", "packed", "padded", "dummy"] = _computing(
        "auto",
        "implementation of the forward pass; auto: the first of lean, fused, packed and padded whose "
        "vectors agree with the reference model's. dummy: no model, made-up vectors, for tests",
    )
    dummy_ms_per_text: float = _computing(
        0.0,
        "with --engine dummy: milliseconds that a worker sleeps for each sequence of a batch, so that a "
        "server without a model takes as long as one with it",
        at_least=0,
        at_most=60_000,
        unit="milliseconds",
    )
    unverified: bool = _computing(
        False,
        "also serve a model whose reference vectors are not known and cannot be computed (without torch, "
        "or from an ONNX export), without comparing its vectors. No effect where they can be compared",
    )
    accept_unordered: bool = _computing(
        False,
        "also serve a reranker with a template that gives a question's answer no higher score than a text "
        "about something else, with a warning. Such a model is refused otherwise: its template may be another model's",
    )
    max_batch_tokens: int | Literal["auto"] = _computing(
        "auto",
        "maximum tokens in one forward pass. A worker gets fewer if it cannot compute them in a quarter of "
        f"a second. auto: {MAX_BATCH_TOKENS} on a processor, {MAX_BATCH_TOKENS_ON_GPU} on a GPU",
        at_least=1,
        at_most=1_000_000,
    )
    max_tokens: int | None = _inputs(
        None,
        "maximum tokens of an input, see --overflow; default: the model's own limit",
        is_basic=True,
        at_least=3,
        unit="tokens",
    )
    max_inputs: int = _of_model(2048, "maximum inputs in one request", at_least=1, at_most=100_000)
    max_body_bytes: int = _limits(64 * 2**20, "maximum bytes in the body of one request", at_least=1024, unit="bytes")
    max_requests: int = _of_model(4096, "maximum embedding requests at a time; more get 429", at_least=1)
    max_wait: float = _seconds(
        30.0,
        "maximum seconds that a request waits for a worker. A request whose wait, estimated from the "
        "measured speed of the workers, is longer gets 429",
        is_per_model=True,
    )
    max_priority: Literal["interactive", "normal", "bulk"] = _of_model(
        "interactive", "highest priority of any request; a higher requested priority is lowered to it"
    )
    share_computed: Literal["tenant", "all"] = _limits(
        "tenant",
        "requests between which the computed vector of an input may be shared; tenant: those of one API "
        "key, or without keys of one address; all: every request, whose client can tell by a quick answer what others "
        "have sent",
    )
    max_connections: int = _limits(8192, "maximum open connections; more get 503", at_least=1)
    max_connections_per_address: int | None = _limits(
        None, "maximum open connections of one address or IPv6 /64; default: half of --max-connections", at_least=1
    )
    trusted_proxies: str = _listening(
        "",
        "proxies whose headers Forwarded and X-Forwarded-For say who the caller is: addresses, networks, "
        "and unix for peers on a unix socket, as 10.0.0.0/8,unix. A header of any other peer changes nothing. "
        "Default: none",
        read=str.strip,
        word="ADDRESS,…",
    )
    max_request_tokens: int | None = _of_model(
        None,
        "maximum tokens of all inputs of one request; default: no limit",
        at_least=1,
        unit="tokens",
    )
    token_ids: Literal["auto", "model", "cl100k", "reject"] = _inputs(
        "auto",
        "how to read inputs given as token ids; auto: as the model's own if framed by its special tokens, "
        "else as cl100k_base's, which are decoded to text; model: always as the model's own; cl100k: always as "
        "cl100k_base's; reject: refuse them",
    )
    overflow: Literal["error", "truncate", "truncate_left", "chunk"] = _inputs(
        "truncate",
        "policy for inputs over the model's limit, unless the request sets one; error: 400; truncate: keep "
        "the beginning; truncate_left: keep the end; chunk: split the input and return the mean of its parts' vectors",
    )
    max_embed_len: int | None = _inputs(
        None,
        "maximum tokens of an input that --overflow chunk splits, as vLLM's setting; longer inputs get "
        "400; default: no limit but those on a request",
        at_least=1,
        unit="tokens",
    )
    matryoshka: bool = _vectors(
        False,
        "allow any number of dimensions up to the model's own, even if neither its files nor what is "
        "published about it say that it was trained for them",
        is_per_model=True,
    )
    quantization_ranges: Path | None = _vectors(
        None,
        "NumPy file, float32 [2, dimensions]: minimum and maximum of each dimension, for int8 and uint8",
        is_per_model=True,
    )
    literal_special_tokens: bool = _inputs(
        False,
        "read special tokens in a text, such as [SEP], as plain characters. By default they are tokens, as "
        "in sentence-transformers",
    )
    vector_cache: int = _vectors(
        0,
        "bytes of memory for computed dense vectors, which are returned again for the same input without "
        "computing it; allocated at the start, for all gateways together. 0: none. Refused if no model has dense "
        "vectors",
        at_least=0,
        unit="bytes",
    )
    request_timeout: float = _seconds(300.0, "maximum seconds for a request; then it gets 503")
    batch_timeout: float = _seconds(
        60.0,
        "maximum seconds for one batch, after which its worker is replaced; the limit is lower once the "
        "worker's speed is known. It is multiplied by the number of gateways, which take turns",
        is_per_model=True,
    )
    drain_grace: float = _times(
        0.5,
        "seconds after SIGTERM in which vecd still serves requests, while /health returns 503 so that load "
        "balancers stop sending them",
        at_least=0,
        at_most=3600,
        unit="seconds",
    )
    drain_timeout: float = _seconds(30.0, "maximum seconds for accepted requests to finish after SIGTERM")
    start_timeout: float = _seconds(300.0, "maximum seconds to load the model and compare its engine")
    served_model_name: str = _models(
        "", "name of the model in responses; default: its id or the name of its folder", is_basic=True, word="NAME"
    )
    model_aliases: str = _models("", "other names that requests may use for the model: NAME,NAME", word="NAME,…")
    unknown_model: Literal["any", "default", "refuse"] | None = _models(
        None,
        "what a request gets that names a model which is not configured; any: the only model; default: the "
        "first model that can do what the request needs, which the response names; refuse: 404. Default: any with one "
        "model, default with several",
    )
    load: Literal["start", "demand"] = _several(
        "start",
        "when a model is loaded; start: with the server; demand: for the first request that needs it",
        is_per_model=True,
    )
    keep_alive: str = _several(
        "",
        "how long a model stays loaded after its last request, in seconds or as 5m or 1h30m; -1: for ever. "
        "Default: for ever with --load start, 5m with --load demand",
        is_per_model=True,
        unit="seconds",
        word="DURATION",
        read=_keep_alive,
    )
    pinned: bool = _several(False, "never unload a model because another one needs its memory", is_per_model=True)
    memory_budget: str = _several(
        "",
        "memory for all processes of the server: bytes, as 2GiB or 500MB, or a share of the limit of its "
        "cgroup or else of the machine, as 80%. Models that are loaded on demand are unloaded for each other to stay "
        "within it. Default: no limit",
        unit="bytes",
        word="AMOUNT",
        read=_budget,
    )
    client_keep_alive: bool = _several(
        False, "let Ollama's clients set how long a model stays loaded: the field keep_alive of a request"
    )
    strict_model: bool = _models(False, "refuse requests that name another model: --unknown-model refuse")
    cors_origins: str = _listening(
        "",
        "origins whose web pages may call the server: ORIGIN,ORIGIN, or *; default: none",
        word="ORIGIN,…",
        read=_origins,
    )
    ui: bool = _listening(True, "serve browsers a page with live figures and a playground at /; --no-ui: do not")
    revision: str = _models("", "branch, tag or commit of a hub model", is_per_model=True, word="REVISION")
    api_key: Secret | None = _keys(None, "key that clients must send", is_basic=True, word="KEY", read=_key)
    api_keys: Secret | None = _keys(
        None,
        "several keys, with names: NAME=KEY,NAME=KEY; see --keys-file for limits and scopes",
        word="NAME=KEY,…",
        read=_key,
    )
    keys_file: Path | None = _keys(None, "TOML file of keys with their limits and scopes; read again when it changes")
    cache_dir: Path | None = _logs(
        None,
        "cache directory for engine selections, converted tokenizers and converted weights; default: vecd "
        "in the user's cache",
    )
    log_level: Literal["debug", "info", "warning", "error"] = _logs("info", "lowest level that is logged")
    log_format: Literal["text", "json"] = _logs("text", "plain text, or one JSON object per line")
    log_requests: float = _logs(
        100.0,
        "maximum request lines per second and gateway in the log; further requests are only counted. "
        "Requests that the server failed have a limit of their own",
        at_least=0,
        at_most=1e6,
    )
    otlp_endpoint: str = _logs(
        "",
        "URL of an OpenTelemetry collector to send spans to, by OTLP over HTTP (needs vecd[otel]); "
        "http://localhost:4318, for example",
        word="URL",
        read=_collector,
    )
    trace_ratio: float = _logs(
        0.01,
        "with --otlp-endpoint: share of the requests without a traceparent that are traced. For a request "
        "with one, its sampled flag decides",
        at_least=0,
        at_most=1,
    )
    config: Path | None = _logs(
        None,
        "TOML file with any of these settings, and a table [models.NAME] for each of several models",
        is_basic=True,
    )
    ready_fd: int | None = _logs(
        None, "file descriptor to which one line of JSON is written when the server is ready", at_least=3, read=_open
    )
    given: GivenSettings = field(default=GivenSettings(), compare=False)

    @property
    def cache_folder(self) -> Path:
        """--cache-dir, else systemd's CacheDirectory=, else `vecd` in the user's cache. Absolute; may not exist yet.
        Everything in it can be deleted at any time."""
        if self.cache_dir is not None:
            return self.cache_dir
        # systemd separates several folders by colons; a unit of vecd has one.
        of_service = os.environ.get("CACHE_DIRECTORY", "").partition(":")[0]
        if of_service:
            return Path(of_service).absolute()
        of_user = os.environ.get("XDG_CACHE_HOME", "")
        if of_user.startswith("/"):  # the specification says that a relative path is to be ignored
            return Path(of_user) / "vecd"
        try:
            home = Path.home()
        except RuntimeError:  # a user without a home directory, as some containers have
            home = Path("/var/cache")
        return home / ".cache" / "vecd"
