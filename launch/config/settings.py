"""The settings of `vecd serve`: flags, environment, `.env` and TOML files, validated together.

Owns the names, defaults, ranges and help texts, from which `--help` and docs/operating.md's table are generated. A flag
wins over the environment (`VECD_*`), that over `.env`, that over the file named by `--config`, that over the default.
What the sources say about several models is only collected here (`GivenModels`).
"""

import argparse
import logging
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from dotenv import dotenv_values
from dotenv.parser import parse_stream
from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, SecretStr, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliPositionalArg,
    CliSettingsSource,
    DotEnvSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from vecd.base import logs
from vecd.base.failures import ConfigurationError
from vecd.base.files import JsonMapping, JsonObject
from vecd.base.flags import closest, flag_hints
from vecd.gateway.http.forwarded import TrustedProxies
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


ENV_PREFIX = "VECD_"

logging.getLogger("dotenv").setLevel(logging.ERROR)  # `_Merged.read_dotenv` names the lines that it cannot parse

# As browsers write it, in any case; some pages are of an app or an extension: app://obsidian.md.
_ORIGIN = re.compile(
    r"[a-z][a-z0-9+.-]*://(?:[a-z0-9_][a-z0-9._-]*|\[[0-9a-f:.]+\])(?::(?P<port>[0-9]{1,5}))?", re.ASCII | re.IGNORECASE
)


def _check_keep_alive(value: str) -> str:
    if value:
        parse_keep_alive(value)
    return value


def _check_budget(value: str) -> str:
    if value:
        read_memory_budget(value, 1 << 30)
    return value


def _as_text(value: object) -> object:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _check_origins(origins: str) -> str:
    names = [name.strip() for name in origins.split(",") if name.strip()]
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


def _check_proxies(names: str) -> str:
    if names.strip():
        TrustedProxies(names)
    return names.strip()


def _check_collector(url: str) -> str:
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


def _check_open(fd: int) -> int:
    try:
        os.fstat(fd)
    except OSError:
        raise ValueError("is not an open file descriptor") from None
    return fd


def _check_secret(key: SecretStr) -> SecretStr:
    if not key.get_secret_value().strip():
        raise ValueError("must not be blank")
    return key


def _check_source(model: str) -> str:
    if "\0" in model:
        raise ValueError("must not have a NUL character")
    return model


_Source = Annotated[str, AfterValidator(_check_source)]
_Path = Annotated[Path, AfterValidator(Path.absolute)]
_Port = Annotated[int, Field(ge=0, le=65535)]
_Positive = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(gt=0, le=86_400)]
_Secret = Annotated[SecretStr, AfterValidator(_check_secret)]


@dataclass(frozen=True, slots=True)
class GivenModels:
    """What the sources say about models, as it stands there."""

    sources: tuple[str, ...] = ()
    """SOURCE or NAME=SOURCE each; none: no source names a model outside of the tables."""
    origin: str = "MODEL"
    tables: object = None
    file: str = ""


MAX_GATEWAYS = 64
MAX_WORKERS = 1024
"""Of a model: each is a process, and three descriptors of the supervisor's."""


class Settings(BaseSettings):
    """Serve models over HTTP. Each flag is also VECD_FLAG in the environment and in .env,
    and a line of the --config file."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        extra="ignore",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        frozen=True,
        validate_default=False,
        hide_input_in_errors=True,
    )

    model: CliPositionalArg[_Source] = Field(
        "",
        description="folder of a model, or its id on the Hugging Face hub; default: the bundled all-MiniLM-L6-v2. "
        "Several are served together; NAME=MODEL gives one a name",
    )
    kind: Literal["auto", "dense", "rerank", "classify", "token-classify", "sparse", "multi-vector"] = Field(
        "auto",
        description="what the model is served as, where its files do not say it, or say it wrongly; auto: as its files "
        "say. A kind that the model has no head for is refused",
    )
    pooling: Literal["auto", "mean", "cls", "lasttoken"] = Field(
        "auto",
        description="how the tokens of a dense model become a vector, whatever its files say; auto: as its files say, "
        "else lasttoken for a causal language model and mean for others, with a warning",
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    port: _Port = Field(8000, description="port to listen on; 0 takes a free one")
    uds: _Path | None = Field(
        None, description="listen on this unix socket instead of host and port, which are ignored"
    )
    admin_host: str = Field("127.0.0.1", description="address of --admin-port")
    admin_port: _Port | None = Field(
        None, description="serve /metrics, /info and /admin on this port instead of the public one; 0 takes a free one"
    )
    admin_uds: _Path | None = Field(None, description="serve /metrics, /info and /admin on this unix socket instead")
    tls_cert: _Path | None = Field(None, description="serve HTTPS with this certificate chain (PEM)")
    tls_key: _Path | None = Field(None, description="private key of --tls-cert (PEM, without a passphrase)")
    workers: Annotated[int, Field(ge=1, le=MAX_WORKERS)] | Literal["auto"] = Field(
        "auto",
        description=f"worker processes; auto: one per core the process may use, or one per GPU. At most {MAX_WORKERS}",
    )
    gateways: Annotated[int, Field(ge=1, le=MAX_GATEWAYS)] = Field(
        1,
        description="gateway processes; use more than one if parsing and encoding take more than a core. "
        "They divide max-requests and max-connections among them",
    )
    threads_per_worker: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = Field(
        "auto",
        description="threads of one worker's forward pass; auto: one, and on a processor as many more as there are "
        "idle cores and measurably make a batch faster",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where the model runs; auto: on GPUs, if there are any and torch is not its CPU build"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = Field(
        "auto",
        description="number format of the forward pass; auto: bfloat16 where the processor or GPU has it, the "
        "vectors agree with float32's and, on a processor, it is measured at 1.1 times the speed of float32 or more; "
        "else float32. int8: faster, but less exact vectors",
    )
    engine: Literal["auto", "lean", "fused", "packed", "padded", "dummy"] = Field(
        "auto",
        description="implementation of the forward pass; auto: the first of lean, fused, packed and padded whose "
        "vectors agree with the reference model's. dummy: no model, made-up vectors, for tests",
    )
    dummy_ms_per_text: Annotated[float, Field(ge=0, le=60_000)] = Field(
        0.0,
        description="with --engine dummy: milliseconds that a worker sleeps for each sequence of a batch, so that a "
        "server without a model takes as long as one with it",
    )
    unverified: bool = Field(
        False,
        description="also serve a model whose reference vectors are not known and cannot be computed (without torch, "
        "or from an ONNX export), without comparing its vectors. No effect where they can be compared",
    )
    accept_unordered: bool = Field(
        False,
        description="also serve a reranker with a template that gives a question's answer no higher score than a text "
        "about something else, with a warning. Such a model is refused otherwise: its template may be another model's",
    )
    max_batch_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | Literal["auto"] = Field(
        "auto",
        description="maximum tokens in one forward pass. A worker gets fewer if it cannot compute them in a quarter of "
        f"a second. auto: {MAX_BATCH_TOKENS} on a processor, {MAX_BATCH_TOKENS_ON_GPU} on a GPU",
    )
    max_tokens: Annotated[int, Field(ge=3)] | None = Field(
        None, description="maximum tokens of an input, see --overflow; default: the model's own limit"
    )
    max_inputs: Annotated[int, Field(ge=1, le=100_000)] = Field(2048, description="maximum inputs in one request")
    max_body_bytes: Annotated[int, Field(ge=1024)] = Field(
        64 * 2**20, description="maximum bytes in the body of one request"
    )
    max_requests: _Positive = Field(4096, description="maximum embedding requests at a time; more get 429")
    max_wait: _Seconds = Field(
        30.0,
        description="maximum seconds that a request waits for a worker. A request whose wait, estimated from the "
        "measured speed of the workers, is longer gets 429",
    )
    max_priority: Literal["interactive", "normal", "bulk"] = Field(
        "interactive", description="highest priority of any request; a higher requested priority is lowered to it"
    )
    share_computed: Literal["tenant", "all"] = Field(
        "tenant",
        description="requests between which the computed vector of an input may be shared; tenant: those of one API "
        "key, or without keys of one address; all: every request, whose client can tell by a quick answer what others "
        "have sent",
    )
    max_connections: _Positive = Field(8192, description="maximum open connections; more get 503")
    max_connections_per_address: _Positive | None = Field(
        None, description="maximum open connections of one address or IPv6 /64; default: half of --max-connections"
    )
    trusted_proxies: Annotated[str, AfterValidator(_check_proxies)] = Field(
        "",
        description="proxies whose headers Forwarded and X-Forwarded-For say who the caller is: addresses, networks, "
        "and unix for peers on a unix socket, as 10.0.0.0/8,unix. A header of any other peer changes nothing. "
        "Default: none",
    )
    max_request_tokens: _Positive | None = Field(
        None, description="maximum tokens of all inputs of one request; default: no limit"
    )
    token_ids: Literal["auto", "model", "cl100k", "reject"] = Field(
        "auto",
        description="how to read inputs given as token ids; auto: as the model's own if framed by its special tokens, "
        "else as cl100k_base's, which are decoded to text; model: always as the model's own; cl100k: always as "
        "cl100k_base's; reject: refuse them",
    )
    overflow: Literal["error", "truncate", "truncate_left", "chunk"] = Field(
        "truncate",
        description="policy for inputs over the model's limit, unless the request sets one; error: 400; truncate: keep "
        "the beginning; truncate_left: keep the end; chunk: split the input and return the mean of its parts' vectors",
    )
    max_embed_len: _Positive | None = Field(
        None,
        description="maximum tokens of an input that --overflow chunk splits, as vLLM's setting; longer inputs get "
        "400; default: no limit but those on a request",
    )
    matryoshka: bool = Field(
        False,
        description="allow any number of dimensions up to the model's own, even if neither its files nor what is "
        "published about it say that it was trained for them",
    )
    quantization_ranges: _Path | None = Field(
        None,
        description="NumPy file, float32 [2, dimensions]: minimum and maximum of each dimension, for int8 and uint8",
    )
    literal_special_tokens: bool = Field(
        False,
        description="read special tokens in a text, such as [SEP], as plain characters. By default they are tokens, as "
        "in sentence-transformers",
    )
    vector_cache: Annotated[int, Field(ge=0)] = Field(
        0,
        description="bytes of memory for computed dense vectors, which are returned again for the same input without "
        "computing it; allocated at the start, for all gateways together. 0: none. Refused if no model has dense "
        "vectors",
    )
    request_timeout: _Seconds = Field(300.0, description="maximum seconds for a request; then it gets 503")
    batch_timeout: _Seconds = Field(
        60.0,
        description="maximum seconds for one batch, after which its worker is replaced; the limit is lower once the "
        "worker's speed is known. It is multiplied by the number of gateways, which take turns",
    )
    drain_grace: Annotated[float, Field(ge=0, le=3600)] = Field(
        0.5,
        description="seconds after SIGTERM in which vecd still serves requests, while /health returns 503 so that load "
        "balancers stop sending them",
    )
    drain_timeout: _Seconds = Field(30.0, description="maximum seconds for accepted requests to finish after SIGTERM")
    start_timeout: _Seconds = Field(300.0, description="maximum seconds to load the model and compare its engine")
    served_model_name: str = Field(
        "", description="name of the model in responses; default: its id or the name of its folder"
    )
    model_aliases: str = Field("", description="other names that requests may use for the model: NAME,NAME")
    unknown_model: Literal["any", "default", "refuse"] | None = Field(
        None,
        description="what a request gets that names a model which is not configured; any: the only model; default: the "
        "first model that can do what the request needs, which the response names; refuse: 404. Default: any with one "
        "model, default with several",
    )
    load: Literal["start", "demand"] = Field(
        "start",
        description="when a model is loaded; start: with the server; demand: for the first request that needs it",
    )
    keep_alive: Annotated[str, AfterValidator(_check_keep_alive)] = Field(
        "",
        description="how long a model stays loaded after its last request, in seconds or as 5m or 1h30m; -1: for ever. "
        "Default: for ever with --load start, 5m with --load demand",
    )
    pinned: bool = Field(False, description="never unload a model because another one needs its memory")
    memory_budget: Annotated[str, BeforeValidator(_as_text), AfterValidator(_check_budget)] = Field(
        "",
        description="memory for all processes of the server: bytes, as 2GiB or 500MB, or a share of the limit of its "
        "cgroup or else of the machine, as 80%. Models that are loaded on demand are unloaded for each other to stay "
        "within it. Default: no limit",
    )
    client_keep_alive: bool = Field(
        False, description="let Ollama's clients set how long a model stays loaded: the field keep_alive of a request"
    )
    strict_model: bool = Field(False, description="refuse requests that name another model: --unknown-model refuse")
    cors_origins: Annotated[str, AfterValidator(_check_origins)] = Field(
        "", description="origins whose web pages may call the server: ORIGIN,ORIGIN, or *; default: none"
    )
    ui: bool = Field(True, description="serve browsers a page with live figures and a playground at /; --no-ui: do not")
    revision: str = Field("", description="branch, tag or commit of a hub model")
    api_key: _Secret | None = Field(None, description="key that clients must send")
    api_keys: _Secret | None = Field(
        None, description="several keys, with names: NAME=KEY,NAME=KEY; see --keys-file for limits and scopes"
    )
    keys_file: _Path | None = Field(
        None, description="TOML file of keys with their limits and scopes; read again when it changes"
    )
    cache_dir: _Path | None = Field(
        None,
        description="cache directory for engine selections, converted tokenizers and converted weights; default: vecd "
        "in the user's cache",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest level that is logged")
    log_format: Literal["text", "json"] = Field("text", description="plain text, or one JSON object per line")
    log_requests: Annotated[float, Field(ge=0, le=1e6)] = Field(
        100.0,
        description="maximum request lines per second and gateway in the log; further requests are only counted. "
        "Requests that the server failed have a limit of their own",
    )
    otlp_endpoint: Annotated[str, AfterValidator(_check_collector)] = Field(
        "",
        description="URL of an OpenTelemetry collector to send spans to, by OTLP over HTTP (needs vecd[otel]); "
        "http://localhost:4318, for example",
    )
    trace_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        0.01,
        description="with --otlp-endpoint: share of the requests without a traceparent that are traced. For a request "
        "with one, its sampled flag decides",
    )
    config: _Path | None = Field(
        None, description="TOML file with any of these settings, and a table [models.NAME] for each of several models"
    )
    ready_fd: Annotated[int, Field(ge=3), AfterValidator(_check_open)] | None = Field(
        None, description="file descriptor to which one line of JSON is written when the server is ready"
    )
    _given_models: GivenModels = PrivateAttr(default=GivenModels())

    @property
    def given_models(self) -> GivenModels:
        return self._given_models

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

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # `load_settings` reads the sources one by one, to know which of them a bad value came from.
        return (init_settings,)


def load_settings(argv: Sequence[str], *, without: Sequence[str] = (), other_flags: Sequence[str] = ()) -> Settings:
    """Settings from flags, environment, `.env` and TOML, but for those named in `without`. Prints help and exits 0 for
    `--help`. `other_flags` are the caller's own, which may have been meant, too. Raises ConfigurationError with every
    problem."""
    found = _Merged(other_flags)
    flags = found.read_flags(argv)
    # An empty variable counts as unset: a compose file passes on unset variables as empty ones.
    environment = EnvSettingsSource(Settings, env_ignore_empty=True)()
    dotenv = found.read_dotenv()
    config = flags.get("config") or environment.get("config") or dotenv.get("config")
    if config:
        found.add(found.read_toml(Path(config)), lambda name: f"{config}: {name}")
    found.add(dotenv, lambda name: f".env: {_variable(name)}")
    found.add({k: v for k, v in environment.items() if not _is_service_link(k, v)}, _variable)
    found.add(flags, _flag)
    found.check_variables("", os.environ)
    return found.validate(without)


def with_values(settings: Settings, values: JsonMapping, origin: Callable[[str], str]) -> Settings:
    """`settings` with other `values`, whose names `origin` writes as their source does. Raises ConfigurationError."""
    found = _Merged(())
    found.add({name: getattr(settings, name) for name in settings.model_fields_set}, _flag)
    found.add(values, origin)
    changed = found.validated()
    changed._given_models = settings.given_models
    return changed


class _Merged:
    def __init__(self, other_flags: Sequence[str]) -> None:
        self._other_flags = other_flags
        self._values: JsonObject = {}
        self._origins: dict[str, str] = {}
        self._problems: list[str] = []
        self._tables: object = None
        self._file = ""

    def add(self, values: JsonMapping, origin: Callable[[str], str]) -> None:
        self._values |= values
        self._origins |= {name: origin(name) for name in values}

    def read_flags(self, argv: Sequence[str]) -> JsonObject:
        """The flags that can be read. argparse stops at a problem: that flag is removed, and the rest parsed again."""
        rest, ignore_unknown = list(argv), False
        for _ in range(len(argv) + 2):
            try:
                return _read_flags(rest, ignore_unknown=ignore_unknown)
            except SettingsError as error:
                problem = str(error).removeprefix("error parsing CLI: ")
                self._problems.append(problem + _hints(problem, self._other_flags))
                named = re.match(r"argument (--[\w-]+)", problem)
                if named and named[1] in rest:
                    rest.remove(named[1])
                else:
                    ignore_unknown = True
        return {}

    def read_toml(self, path: Path) -> JsonObject:
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            self._problems.append(f"{path}: cannot be read: {error}")
            return {}
        self._file, self._tables = str(path), values.pop("models", None)
        values = {name.replace("-", "_"): value for name, value in values.items()}
        for name in values.keys() - Settings.model_fields.keys():
            self._problems.append(f"{path}: {name}: there is no such setting{_guess(name, str)}")
        return {name: value for name, value in values.items() if name in Settings.model_fields}

    def read_dotenv(self) -> JsonObject:
        """A line that is not NAME=VALUE is named, but not quoted, because it may have a key: a problem if it may be
        meant for vecd, else a warning."""
        try:
            text = Path(".env").read_text(encoding="utf-8")
        except (FileNotFoundError, IsADirectoryError):
            return {}
        except (OSError, UnicodeDecodeError) as error:
            why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
            self._problems.append(f".env: cannot be read: {why}")
            return {}
        for binding in parse_stream(StringIO(text)):
            if binding.error:
                statement = binding.original.string
                num_blank = statement[: -len(statement.lstrip())].count("\n")
                where = f".env: line {binding.original.line + num_blank}: is not NAME=VALUE"
                if ENV_PREFIX in statement:
                    self._problems.append(where)
                else:
                    logs.say(f"warning: {where}, and is ignored", logging.WARNING)
        self.check_variables(".env: ", {name: value or "" for name, value in dotenv_values(".env").items()})
        return DotEnvSettingsSource(Settings, env_file=".env", env_ignore_empty=True)()

    def check_variables(self, origin: str, environ: Mapping[str, str]) -> None:
        for variable, value in environ.items():
            name = variable.removeprefix(ENV_PREFIX).lower()
            if name in _SECRETS and not value:
                # Not the same as unset: an operator who wanted to set a key must not get an open server.
                self._problems.append(f"{origin}{variable}: is empty; give it a key, or remove it")
            if (
                variable.startswith(ENV_PREFIX)
                and name not in Settings.model_fields
                and name not in _OF_CLIENTS
                and not _is_service_link(name, value)
            ):
                self._problems.append(f"{origin}{variable}: there is no such setting{_guess(name, _variable)}")

    def validate(self, without: Sequence[str] = ()) -> Settings:
        settings = self.validated(without)
        for used, unused in _UNUSED_BESIDE.items():
            for name in unused if getattr(settings, used) is not None else ():
                if name in settings.model_fields_set:
                    origin, reason = self._origins[name], self._origins[used]
                    logs.say(f"warning: {origin} is ignored, because {reason} is given", logging.WARNING)
        return settings

    def validated(self, without: Sequence[str] = ()) -> Settings:
        sources = self._take_sources()
        try:
            settings = Settings(**{name: value for name, value in self._values.items() if name not in without})
        except ValidationError as error:
            self._problems += self._describe(error.errors(include_url=False, include_input=False))
        if self._problems:
            raise ConfigurationError(*self._problems)
        origin = self._origins.get("model", "")
        settings._given_models = GivenModels(
            sources, "MODEL" if origin == _flag("model") else origin, self._tables, self._file
        )
        return settings

    def _take_sources(self) -> tuple[str, ...]:
        """Side effect: where the setting is a list, its first takes the list's place."""
        given = self._values.get("model")
        if not isinstance(given, list | tuple):
            return (given,) if given and isinstance(given, str) else ()
        if not all(source and isinstance(source, str) and "\0" not in source for source in given):
            self._problems.append(
                f"{self._origins['model']}: must be the folder or id of a model, or a list of such (given: {given!r})"
            )
        self._values["model"] = str(given[0]) if given and not self._problems else ""
        return tuple(given)

    def _describe(self, errors: list[ErrorDetails]) -> list[str]:
        """One line per setting: a setting that may have several types has an error for each."""
        of_settings: dict[str, list[ErrorDetails]] = {}
        for error in errors:
            of_settings.setdefault(str(error["loc"][0]), []).append(error)
        return [
            f"{self._origins.get(name, name)}: {_sentence(name, theirs)}{self._given(name)}{self._instead(name)}"
            for name, theirs in of_settings.items()
        ]

    def _instead(self, name: str) -> str:
        instead = RETIRED_FLAGS.get(f"{_flag(name)} {self._values.get(name)}")
        return f"; {instead}" if instead else ""

    def _given(self, name: str) -> str:
        value = self._values.get(name)
        is_secret = name in _SECRETS or (name == "otlp_endpoint" and "@" in str(value))
        return "" if is_secret or name not in self._values else f" (given: {value!r})"


_SECRETS = {"api_key", "api_keys"}
_OF_CLIENTS = ("url",)
_UNUSED_BESIDE = {"uds": ("host", "port"), "admin_uds": ("admin_host", "admin_port")}


_NAMES_OF_MODEL = ("--model", "--model-id", "--model-name", "--model-name-or-path", "--model-path")
RETIRED_FLAGS = {
    "--engine weightless": "the engine is called dummy",
    "--gateways auto": "give a number; 1 suffices until its process takes most of a core",
    "--proxy-protocol": "have the proxy send Forwarded or X-Forwarded-For, and see --trusted-proxies",
    "--tei-metrics": "deploy/tei-recording-rules.yaml has rules for Prometheus",
}
_INSTEAD = dict.fromkeys(_NAMES_OF_MODEL, "MODEL is positional: vecd serve MODEL") | RETIRED_FLAGS


def _hints(problem: str, other_flags: Sequence[str]) -> str:
    _, is_unknown, given = problem.partition("unrecognized arguments: ")
    if not is_unknown:
        return ""
    words = [word.partition("=")[0] for word in given.split()]
    known = [f"; {word}: {_INSTEAD[word]}" for word in words if word in _INSTEAD]
    others = [word for word in words if word not in _INSTEAD]
    return "".join(known) + flag_hints(others, [*other_flags, *map(_flag, Settings.model_fields)])


def _guess(name: str, write: Callable[[str], str]) -> str:
    """What serves instead of the setting `name`, or which may have been meant; empty if it is like none."""
    if (instead := RETIRED_FLAGS.get(_flag(name))) is not None:
        return f"; {instead}"
    meant = closest(name, Settings.model_fields)
    return f"; did you mean {write(meant)}?" if meant else ""


_BOUNDS = {"greater_than_equal": "of at least {ge}", "less_than_equal": "of at most {le}"}
_PREFIXES = {"Value error, ": "", "Input should be a valid number": "must be a number", "Input should be ": "must be "}


def _sentence(name: str, errors: Sequence[ErrorDetails]) -> str:
    """`errors`: one for each of the setting's types, names such as `auto` last."""
    *others, last = (_requirement(name, error) for error in errors)
    return ", or ".join([last, *(other.removeprefix("must be ") for other in others)])


def _requirement(name: str, error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    is_whole = "float" not in str(Settings.model_fields[name].annotation)
    if kind == "int_parsing" or (is_whole and kind in _BOUNDS):
        return f"must be a whole number {_BOUNDS.get(kind, '').format(**context)}".rstrip()
    message = error["msg"].partition(", unable to parse")[0]
    prefix = next((prefix for prefix in _PREFIXES if message.startswith(prefix)), "")
    return _PREFIXES.get(prefix, "") + message.removeprefix(prefix)


def _read_flags(argv: Sequence[str], *, ignore_unknown: bool) -> JsonObject:
    models: list[str] = []

    def add_argument(parser: argparse.ArgumentParser, *names: str, **options: Any) -> argparse.Action:
        return parser.add_argument(*names, **(options | {"nargs": "*"} if names == ("model",) else options))

    def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> JsonObject:
        namespace, rest = parser.parse_known_args(arguments)
        further = [word for word in rest if not word.startswith("-")]
        if not ignore_unknown and further != rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        flags = vars(namespace)
        first = flags.pop("model")  # those before the next flag
        models.extend([*(first if isinstance(first, list) else ()), *further])
        return flags

    source = CliSettingsSource[Any](
        Settings,
        cli_prog_name="vecd serve",
        cli_parse_args=list(argv),
        cli_exit_on_error=False,
        parse_args_method=parse,
        add_argument_method=add_argument,
    )
    flags: JsonObject = source()
    return flags | {"model": models if len(models) > 1 else models[0]} if models else flags


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper()


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_service_link(name: str, value: Any) -> bool:
    """Kubernetes puts VECD_PORT=tcp://… and VECD_SERVICE_… into every pod beside a Service that is called vecd."""
    return (name == "port" and str(value).startswith("tcp://")) or name.startswith(("service_", "port_"))


def flag_table() -> str:
    lines = ["| flag | default | meaning |", "| --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        flag = "MODEL" if name == "model" else _flag(name)
        default = "" if field.default in (None, "") else f"`{field.default}`"
        lines.append(f"| `{flag}` | {default} | {field.description} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(flag_table())
