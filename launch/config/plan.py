"""From settings to plans: each model's folder and card, the devices, and the configuration of each child.

Owns the choice of defaults that depend on the machine and the model. Starts no process but those that fetch a hub model
and convert its weights or tokenizer.
"""

import importlib.metadata
import importlib.util
import os
import re
import resource
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISREG
from typing import Any

from vecd.base import logs
from vecd.base.failures import ConfigurationError, StartFailure
from vecd.base.programs import NEEDS_TORCH, are_installed, has_torch, not_installed
from vecd.gateway.config import ApiKey, ChatTemplateSpec, GatewayConfig
from vecd.gateway.http.tls import find_problems, why_unreadable
from vecd.launch.config.adapters import with_adapter
from vecd.launch.config.keys import load_keys
from vecd.launch.config.made_weights import with_made_weights
from vecd.launch.config.models import (
    BUNDLED_NAME,
    BUNDLED_PACKAGE,
    ModelEntry,
    check_defaults,
    folder_of,
    name_of,
    split_task,
    with_prompts,
)
from vecd.launch.config.templates import read_chat_template, with_pair_template, with_text_template
from vecd.launch.config.tokens import ordered_pair
from vecd.model.card import ModelCard, ModelError, card_of
from vecd.model.files import check_named, files_of, source_of
from vecd.model.folder import ModelFolder
from vecd.model.known import known_id, unknown_word
from vecd.model.tokenizer import with_tokenizer
from vecd.shm.arena import ArenaSpec, close_copy, copy_sealed
from vecd.shm.control import parse_keep_alive
from vecd.shm.job import Job
from vecd.shm.output import MAX_BATCH_TOKENS, MAX_BATCH_TOKENS_ON_GPU, span_of
from vecd.shm.settings import MAX_WORKERS, GivenSettings, Settings, names_of
from vecd.workers.config import REFERENCE_FILE, WorkerConfig
from vecd.workers.families import FAMILIES, WITHOUT_CLASS
from vecd.workers.machine import usable_cores

# Refuses architectures that neither vecd nor the installed transformers has, without importing that. If its files are
# not as expected, the worker reports the architecture.

# Where its names of architectures stand, in double quotes. Source: transformers 5.23.
_FILES = ("auto_mappings.py", "configuration_auto.py")


def refuse_unknown(card: ModelCard) -> None:
    package, names = importlib.util.find_spec("transformers"), ""  # finds without importing
    if package is not None and package.origin is not None:
        with suppress(OSError, UnicodeDecodeError):
            auto = Path(package.origin).parent / "models" / "auto"
            names = "".join((auto / name).read_text(encoding="utf-8") for name in _FILES)
    if '"bert"' in names and f'"{card.model_type}"' not in names and card.model_type not in WITHOUT_CLASS:
        version = importlib.metadata.version("transformers")
        raise ModelError(
            f"{card.weights_folder}/config.json: transformers {version} has no architecture {card.model_type!r} "
            "(model_type)"
        )


_LEAN_DTYPES = ("auto", "float32", "int8")
_NUM_SLOTS = 2  # of a gateway: a batch being computed, and one sent ahead
_MAX_ROWS_OF_TOKENS = 2048
"""Rows of one text whose tokens have vectors: with 1,024 floats each, 8 MiB of every slot."""
_MAX_ROWS_OF_LATE_CHUNKS = 8192
"""The same, of a model that makes late chunks of long texts: 32 MiB, of which a processor has what was ever written."""
_SPANNING_SEQUENCES = 64
"""Sequences in a slot with an output that spans several rows: 8 MiB for BERT's vocabulary."""
_MAX_ARENA_BYTES = 2**40
_KEEP_ALIVE_ON_DEMAND_S = 300.0
"""As Ollama's."""
_MAX_CHANGES_SAID = 5
_MAX_RANGES_BYTES = 16 * 2**20
"""Two float64s for each of a million dimensions."""
_MAX_OPEN_FILES = 65_536
_MIN_METRICS_WORKERS = 64  # a reload may have more than the start
_OTHER_OPEN_FILES = 512  # of the gateway: arenas, ZeroMQ, connections that are being refused
_MIN_OPEN_FILES = 256

_OTEL_PACKAGES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
_OF_SUPERVISOR: dict[str, Any] = {"given": GivenSettings(), "api_key": None, "api_keys": None, "ready_fd": None}
"""The settings that no child gets, in their place."""

_GPU_FILE = re.compile(r"nvidia|nvhost|nvgpu|dxg|kfd")
"""Of NVIDIA's driver, of its Jetson boards, of WSL, of AMD's driver."""
_BATCH_BOUNDS = {"cpu": (MAX_BATCH_TOKENS, 512), "gpu": (MAX_BATCH_TOKENS_ON_GPU, 2048)}
"""The most tokens and sequences of a batch; how much of it is used depends on the worker's measured speed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything the supervisor will start. Owns the copies of the model's files that the gateways read, so that one
    which is restarted reads what the others have read."""

    settings: Settings
    card: ModelCard
    gateway: GatewayConfig
    workers: list[WorkerConfig]
    model_files: frozenset[tuple[str, int, int, int]]
    """What was in the model's folder when its card was read."""
    other_files: frozenset[tuple[str, int, int, int]] = frozenset()
    """The same of the certificate, its key and the ranges."""
    is_only_model: bool = True
    """The server has no other model when the plan is made: no zygote, and messages need not name this one."""

    def model_has_changed(self) -> bool:
        """Whether the files are no longer those that the plan was made of. Not for an event loop."""
        return _files_in(Path(self.card.folder)) != self.model_files

    def changed_files(self) -> str:
        """Which files that were loaded are no longer what they were, in words; "" if there is none. What was added
        counts for `model_has_changed` alone. Not for an event loop."""
        folder, ranges = source_of(self.card.folder), str(self.settings.quantization_ranges)
        loaded = {each for each in self.model_files if each[0] == source_of(each[0])}  # not those in the cache
        loaded |= {each for each in self.other_files if each[0] == ranges}
        now = _versions(Path(name) for name, *_ in loaded)
        changes = sorted(name for name, *_ in loaded - now)
        if changes and not os.path.isdir(folder):  # never raises, unlike Path.is_dir for a stale mount
            return "the model's folder is missing"
        there = {name for name, *_ in now}
        said = [
            f"{name.removeprefix(f'{folder}/') if name != ranges else Path(name).name} "
            f"{'has changed' if name in there else 'is missing'}"
            for name in changes[:_MAX_CHANGES_SAID]
        ]
        return ", ".join(said) + (", …" if len(changes) > len(said) else "")

    def has_read(self, path: Path) -> bool:
        """Whether this file, one of `other_files`, is the one that the plan was made with."""
        return _versions([path]) <= self.other_files

    def with_gateway(self, **changes: Any) -> "Plan":
        """The plan with `changes` of its gateway's configuration."""
        return replace(self, gateway=replace(self.gateway, **changes))

    def close(self) -> None:
        """Close the copies, once no gateway is started with this plan any more. To be called once."""
        _close_copies(self.gateway)


def _files_in(folder: Path) -> frozenset[tuple[str, int, int, int]]:
    """The versions of the model's files, also of those that were converted. Reference vectors do not count."""
    try:
        return _versions([*files_of(folder), *files_of(Path(source_of(str(folder))))])
    except OSError:
        return frozenset()


def _versions(paths: Iterable[Path | None]) -> frozenset[tuple[str, int, int, int]]:
    """Path, inode, size and time of change of each file that there is."""
    found = []
    for path in paths:
        if path is not None and path.name != REFERENCE_FILE:
            with suppress(OSError):
                status = path.stat()
                if S_ISREG(status.st_mode):
                    found.append((str(path), status.st_ino, status.st_size, status.st_mtime_ns))
    return frozenset(found)


def make_plan(settings: Settings, report: Callable[[str], None] = logs.say) -> Plan:
    """The plan of one model alone. Raises as `make_plans`."""
    [plan] = make_plans([ModelEntry(settings.served_model_name, settings, names_of(settings.model_aliases))], report)
    return plan


def make_plans(entries: Sequence[ModelEntry], report: Callable[[str], None] = logs.say) -> list[Plan]:
    """Read the models' cards and compose the children's configurations, with the place of each model's workers among
    those of all. `report` is called with each stage that may take long. Raises ConfigurationError with the problems of
    all settings, which do not fit the models or the machine; ModelError for the models; StartFailure for a machine that
    allows too little. A problem of one of several models begins with its name. Side effect: opens the plans'
    descriptors, unless it raises."""
    plans: list[Plan] = []
    faults: list[str] = []
    keys: tuple[ApiKey, ...] = ()
    settings, is_only_model = entries[0].settings, len(entries) == 1
    problems = server_problems(settings)
    try:
        keys = load_keys(settings)
    except ConfigurationError as error:
        problems += error.problems
    try:
        for index, entry in enumerate(entries):
            prefix = "" if is_only_model else f"{entry.name}: "
            if problems and entry.settings.model and folder_of(entry.settings.model) is None:
                continue  # it may have to be fetched, for a server that cannot start
            try:
                plan = _plan_model(entry, keys, report)
            except ConfigurationError as error:
                problems += [f"{prefix}{problem}" for problem in error.problems]
            except ModelError as error:
                faults.append(f"{prefix}{error}")
            except StartFailure as error:
                if not problems:
                    raise
                faults.append(f"{prefix}{error}")
            else:
                first_worker = sum(before.gateway.num_workers for before in plans)
                plan = plan.with_gateway(model_index=index, first_worker=first_worker)
                plans.append(replace(plan, is_only_model=is_only_model))
        kinds = [plan.card.capabilities for plan in plans]
        if settings.vector_cache and len(plans) == len(entries) and not any("dense" in each for each in kinds):
            why = f"this model is for {' and '.join(kinds[0])}" if is_only_model else "no model has such"
            problems.append(f"--vector-cache: {settings.vector_cache} bytes given, which keep dense vectors; {why}")
        if problems:
            raise ConfigurationError(*problems, *faults)
        if faults:
            raise ModelError("; ".join(faults))
    except BaseException:
        for plan in plans:
            plan.close()
        raise
    return plans


def server_problems(settings: Settings) -> list[str]:
    """What is wrong with the certificate and the packages that the settings need."""
    cert, key, problems = settings.tls_cert, settings.tls_key, list[str]()
    if cert is not None and key is not None:
        problems = [f"--tls-cert, --tls-key: {problem}" for problem in find_problems(str(cert), str(key))]
    elif cert is not None or key is not None:
        given, missing = ("--tls-key", "--tls-cert") if cert is None else ("--tls-cert", "--tls-key")
        problems = [f"{given}: given without {missing}; TLS needs both"]
    if settings.otlp_endpoint and not are_installed(*_OTEL_PACKAGES):
        problems.append(f"--otlp-endpoint: needs OpenTelemetry, which is {not_installed('vecd[otel]')}")
    return problems


def _plan_model(entry: ModelEntry, keys: tuple[ApiKey, ...], report: Callable[[str], None]) -> Plan:
    settings = entry.settings
    source, name, file = _find_model(settings, report)
    path = with_made_weights(source, file, name, settings.cache_folder, report)
    _, task = split_task(settings.model)
    of_task, route = None, task
    if not ModelFolder(path).routes:
        path, of_task = with_adapter(path, task, file, name, settings.cache_folder, report, _fetch)
        route = ""
    scoring = {"yes": entry.yes, "no": entry.no, "template": entry.template}
    folder = ModelFolder(path, settings.kind, settings.pooling, file, **scoring, task=route)
    model_files = _files_in(folder.path)
    card = with_text_template(with_pair_template(card_of(folder), folder), folder)
    if card.sparse is not None and route:
        raise ModelError(f"{path}: a sparse model takes queries and documents under one name: without /{route}")
    if card.sparse is None and folder.roles:
        of_task = folder.role
        others = [f"{settings.model}/{role}" for role in folder.roles if role != of_task]
        if not route:
            report(f"{name} is served for each {of_task}; models of their own are {', '.join(others)}")
    card = replace(card, task=of_task)
    if card.export_file and not file and len(folder.exports) > 1:
        first = folder.exports[0].relative_to(folder.weights_folder)
        report(f"{name} is served from {first}, the first of {len(folder.exports)} exports: --file names another")
    if settings.matryoshka:
        card = replace(card, matryoshka_dims=())
    if not (card.is_static or card.export_file):
        refuse_unknown(card)
    devices = ["cpu"] if _own_engine(card) else devices_for(settings.device)
    card_with_prompts, problems = with_prompts(card, entry.prompts, entry.default_prompt)  # for gateways alone
    for defaults in entry.alias_defaults:
        problems += check_defaults(defaults, card_with_prompts, settings)
    if problems := [*problems, *_model_problems(settings, card, devices)]:
        raise ConfigurationError(*problems)
    if _needs_torch(settings, card) and card.model_type not in FAMILIES:
        raise ModelError(f"{card.weights_folder}/config.json: a model of type {card.model_type!r} {NEEDS_TORCH}")
    chat_template = None if settings.literal_special_tokens else read_chat_template(folder)
    gateway = _gateway_config(entry, name, card, devices, keys, chat_template)
    least = gateway.vector_cache_spec.least_nbytes(card.dim)
    if "dense" in card.capabilities and 0 < gateway.vector_cache < least:
        raise ConfigurationError(
            f"--vector-cache: {gateway.vector_cache} bytes given, this model needs at least {least} for "
            f"{gateway.gateways} gateway(s), and a multiple of that to be of use; 0: no cache"
        )
    other_files = _versions([settings.tls_cert, settings.tls_key, settings.quantization_ranges])
    # Last, because it opens descriptors. For the gateway alone: the paths differ from start to start, and workers
    # remember by card what they found out.
    gateway = replace(gateway, card=with_tokenizer(card_with_prompts, name, settings.cache_folder, report))
    try:
        if card.sparse is not None and card.sparse.query_weights:
            gateway = replace(gateway, query_weights=_copy(f"{card.folder}/{card.sparse.query_weights}"))
        if gateway.quantization_ranges is not None:
            gateway = replace(gateway, ranges=_copy(str(gateway.quantization_ranges)))
        pair = None if settings.engine == "dummy" else ordered_pair(gateway.card, gateway.max_tokens)
    except BaseException:
        _close_copies(gateway)
        raise
    leases_cores = settings.threads_per_worker == "auto" and devices == ["cpu"]
    decided: dict[str, Any] = {**vars(settings), **_OF_SUPERVISOR, "cache_dir": settings.cache_folder}
    worker = WorkerConfig(
        **{**decided, "device": devices[0]},
        card=card,
        arena=gateway.arena,
        num_threads=_num_threads(settings),
        max_threads=usable_cores() if leases_cores else 1,
        ordered_pair=pair,
    )
    workers = [replace(worker, device=devices[index % len(devices)]) for index in range(gateway.num_workers)]
    return Plan(settings, card_with_prompts, gateway, workers, model_files, other_files)


def _own_engine(card: ModelCard) -> str:
    """What has an engine of its own, on the processor: gathering rows costs less than a transfer to a GPU."""
    return "static embeddings" if card.is_static else "ONNX exports" if card.export_file else ""


def _needs_torch(settings: Settings, card: ModelCard) -> bool:
    return not (_own_engine(card) or settings.engine == "dummy" or has_torch())


def _model_problems(settings: Settings, card: ModelCard, devices: Sequence[str]) -> list[str]:
    """What does not fit the model, the devices that it is computed on, or another setting."""
    engine, dtype, own_engine = settings.engine, settings.dtype, _own_engine(card)
    is_lean, is_lean_dtype, is_on_cpu = engine in ("auto", "lean"), dtype in _LEAN_DTYPES, devices == ["cpu"]
    lacks_torch = _needs_torch(settings, card)
    ranges = _why_no_ranges(settings.quantization_ranges)
    rules = (
        (ranges, f"--quantization-ranges: {settings.quantization_ranges}: {ranges}"),
        (lacks_torch and not is_lean_dtype, f"--dtype: {dtype} given, which {NEEDS_TORCH}"),
        (lacks_torch and not is_lean, f"--engine: {engine} given, which {NEEDS_TORCH}"),
        (
            settings.max_tokens is not None and settings.max_tokens > card.max_tokens,
            f"--max-tokens: {settings.max_tokens} given, the model takes at most {card.max_tokens}",
        ),
        (
            settings.max_embed_len is not None and settings.overflow != "chunk",
            "--max-embed-len: given without --overflow chunk; it limits what that splits",
        ),
        (
            settings.dummy_ms_per_text and engine != "dummy",
            f"--dummy-ms-per-text: {settings.dummy_ms_per_text:g} given without --engine dummy, whose time it is",
        ),
        (
            own_engine and settings.device == "cuda",
            f"--device: cuda given, but {own_engine} are computed on the processor",
        ),
        (
            own_engine and engine not in ("auto", "dummy"),
            f"--engine: {engine} given, but {own_engine} have an engine of their own",
        ),
        (
            dtype == "int8" and not (is_on_cpu and is_lean),
            "--dtype: int8 given, which needs --device cpu and --engine auto or lean",
        ),
        (
            engine == "lean" and not (is_on_cpu and is_lean_dtype),
            "--engine: lean given, which needs --device cpu and --dtype auto, float32 or int8",
        ),
    )
    return [problem for is_wrong, problem in rules if is_wrong]


def _why_no_ranges(path: Path | None) -> str:
    """What is in the file is checked by the gateway, which has numpy."""
    if path is None:
        return ""
    if why := why_unreadable(str(path)):
        return f"cannot be read: {why}"
    size = path.stat().st_size
    return f"has {size:,} bytes, ranges have at most {_MAX_RANGES_BYTES:,}" if size > _MAX_RANGES_BYTES else ""


def _copy(path: str) -> str:
    """Raises ModelError."""
    try:
        return copy_sealed(path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None


def _close_copies(gateway: GatewayConfig) -> None:
    for path in (gateway.card.tokenizer_file, gateway.query_weights, gateway.ranges):
        close_copy(path)


def _gateway_config(
    entry: ModelEntry,
    model: str,
    card: ModelCard,
    devices: list[str],
    keys: tuple[ApiKey, ...],
    chat_template: ChatTemplateSpec | None,
) -> GatewayConfig:
    """Raises StartFailure if too few files may be open, ModelError if the rows of a batch need too much memory."""
    settings = entry.settings
    compute_type = "cpu" if devices == ["cpu"] else "gpu"
    max_batch_tokens, max_sequences = _BATCH_BOUNDS[compute_type]
    max_tokens = settings.max_tokens or card.max_tokens
    if settings.max_batch_tokens != "auto":
        max_batch_tokens = settings.max_batch_tokens
    rows_per_slot = _rows_per_slot(card, max_sequences, max_batch_tokens, max_tokens)
    arena = ArenaSpec(_NUM_SLOTS, rows_per_slot, card.row_dim, settings.gateways)
    if arena.nbytes > _MAX_ARENA_BYTES:
        raise ModelError(
            f"{card.folder}: {rows_per_slot:,} rows of {card.row_dim:,} floats are too many for a batch; --max-tokens "
            "limits the rows of a text"
        )
    num_workers = _num_workers(settings, devices)
    unasked_keep_alive_s = _KEEP_ALIVE_ON_DEMAND_S if settings.load == "demand" else None
    max_connections = min(settings.max_connections, settings.gateways * connections_of_gateway())
    decided: dict[str, Any] = {
        "model": settings.served_model_name or model,
        "max_tokens": max_tokens,
        "max_batch_tokens": max_batch_tokens,
        "max_connections": max_connections,
        "max_connections_per_address": settings.max_connections_per_address or -(-max_connections // 2),
        "unknown_model": "refuse" if settings.strict_model else settings.unknown_model or "any",
    }
    return GatewayConfig(
        **{**vars(settings), **_OF_SUPERVISOR, **decided},
        version=version(),
        aliases=entry.aliases,
        alias_defaults=entry.alias_defaults,
        weight=entry.weight,
        card=card,
        arena=arena,
        num_workers=num_workers,
        num_cores=usable_cores(),
        compute_type=compute_type,
        keys=keys,
        chat_template=chat_template,
        keep_alive_s=parse_keep_alive(settings.keep_alive) if settings.keep_alive else unasked_keep_alive_s,
        has_admin_listener=settings.admin_port is not None or settings.admin_uds is not None,
        metrics_workers=max(num_workers, _MIN_METRICS_WORKERS),
    )


def _num_workers(settings: Settings, devices: list[str]) -> int:
    if settings.workers != "auto":
        return settings.workers
    return len(devices) if devices != ["cpu"] else min(MAX_WORKERS, max(1, usable_cores() // _num_threads(settings)))


def _num_threads(settings: Settings) -> int:
    return 1 if settings.threads_per_worker == "auto" else settings.threads_per_worker


def _rows_per_slot(card: ModelCard, max_sequences: int, max_batch_tokens: int, max_tokens: int) -> int:
    """Enough for the sequences of a batch, and for the rows of one text."""
    num_sequences = min(max_sequences, max_batch_tokens)
    if card.main_output.is_per_token:
        return max(num_sequences, max_tokens)
    is_by_token = any(output.is_per_token for output in card.outputs)
    most = _MAX_ROWS_OF_LATE_CHUNKS if card.pools_states else _MAX_ROWS_OF_TOKENS
    rows_of_tokens = min(max_tokens, most) if is_by_token else 0
    rows_of_span = _SPANNING_SEQUENCES * span_of(card) if card.main_output.spans_rows else 0
    return max(num_sequences, rows_of_tokens, rows_of_span)


def _find_model(settings: Settings, report: Callable[[str], None]) -> tuple[Path, str, str]:
    """The model's folder, its name for people, and which file of weights is named. Raises ModelError, too."""
    model, file = settings.model, settings.file
    if not model:
        spec = importlib.util.find_spec(BUNDLED_PACKAGE)  # finds without importing: the package would import torch
        if spec is None or spec.origin is None:
            raise ConfigurationError(f"MODEL: none is named, and the bundled one is {not_installed('vecd[minilm]')}")
        return Path(spec.origin).parent / "model", BUNDLED_NAME, file
    folder = folder_of(model)
    hub_id = _named_by(split_task(model)[0], folder, report)
    folder = folder or _fetch(hub_id, settings.revision, file, report)
    if folder.suffix == ".gguf" and folder.is_file() and not file:
        folder, file = folder.parent, folder.name
    if folder.is_dir():
        check_named(folder, file)
    return folder, name_of(model), file


def _named_by(model: str, folder: Path | None, report: Callable[[str], None]) -> str:
    """The id on the hub, also of a word. `folder`: what `model` is, if that is there."""
    hub_id = known_id(model)
    if hub_id and folder is None:
        report(f"{model}: there is no such folder, so {hub_id} of the hub is taken, which is known by this name")
    elif hub_id:
        report(f"{model}: the folder {folder} is taken, not {hub_id} of the hub, which is known by this name")
    return hub_id or model


def _fetch(model: str, revision: str, file: str, report: Callable[[str], None]) -> Path:
    report(f"finding {model} in the hub's cache or on the hub")
    with Job("fetch", f"{model}: the process that fetches it") as job:  # whose stderr shows the progress
        job.start(model=model, revision=revision, file=file)
        try:
            return Path(dict(job.results())["folder"])
        except ModelError as error:
            if hint := unknown_word(model):
                raise ModelError(f"{error}; {hint}") from None
            raise


def devices_for(wanted: str) -> list[str]:
    """["cpu"], or one "cuda:N" per visible GPU."""
    if not has_torch():
        if wanted == "cuda":
            raise ConfigurationError(f"--device: cuda given, which {NEEDS_TORCH}")
        return ["cpu"]
    gpus = num_visible_gpus()
    has_cuda_build = "+cpu" not in importlib.metadata.version("torch")
    if wanted == "cuda" and not (gpus and has_cuda_build):
        why = "no GPU is visible" if not gpus else "the installed torch is a CPU build"
        raise ConfigurationError(f"--device: cuda given, but {why}")
    if wanted == "cpu" or not (gpus and has_cuda_build):
        return ["cpu"]
    return [f"cuda:{index}" for index in range(gpus)]


def num_visible_gpus(dev: Path = Path("/dev")) -> int:
    """Counted without touching CUDA, which must not be initialised before the workers are forked. CUDA_VISIBLE_DEVICES
    selects among GPUs, of which there are none without a device file."""
    files = [path.name for path in dev.glob("*") if _GPU_FILE.match(path.name)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and files:
        return len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")])
    return len([name for name in files if re.fullmatch(r"nvidia\d+", name)])


def connections_of_gateway() -> int:
    """Raises StartFailure when its descriptors suffice for nearly none."""
    limit = max_open_files()
    if limit < _MIN_OPEN_FILES:
        raise StartFailure(f"open files: the limit is {limit}, at least {_MIN_OPEN_FILES} are needed (ulimit -n)")
    return limit - min(_OTHER_OPEN_FILES, limit // 2)


def max_open_files() -> int:
    """Descriptors that a process may open: what the system allows, within reason."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)


def version() -> str:
    return importlib.metadata.version("vecd")
