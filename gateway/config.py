"""The configuration of a gateway, which the supervisor composes and sends over the control channel as JSON.

Reads no environment and no file. Imports neither numpy nor uvloop: the supervisor imports it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from vecd.base.files import JsonObject
from vecd.base.flags import flag
from vecd.model.card import ModelCard
from vecd.shm.arena import ArenaSpec
from vecd.shm.settings import Settings
from vecd.shm.shared_metrics import SharedMetricsSpec
from vecd.shm.vector_cache import VectorCacheSpec

MAX_PROMPT_CHARACTERS = 4096
"""As `vecd.gateway.request.MAX_PROMPT_CHARS`, whose module imports numpy."""
SCOPES = ("embed", "metrics", "admin")


def _in_order(scopes: Sequence[str]) -> tuple[str, ...]:
    return tuple(scope for scope in SCOPES if scope in scopes)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What a client with a certain key may do. Has the key's digest, never the key. The flags are fields of the file of
    keys."""

    name: str
    """The tenant's name in fair queueing; shown to no other client."""
    digest: str
    """SHA-256 of the key, in hexadecimal."""
    scopes: tuple[Literal["embed", "metrics", "admin"], ...] = flag(
        SCOPES, "what it may do", read=_in_order, must=f"must be a list of one or more of {', '.join(SCOPES)}"
    )
    """They open: "embed" embeddings and models, "metrics" /metrics and /info, "admin" /admin."""
    max_priority: Literal["interactive", "normal", "bulk"] = flag("interactive", "the highest of its requests")
    tokens_per_s: float | None = flag(None, "at most", at_least=1e-3, at_most=1e12)
    """Averaged over seconds, over all gateways; None: no limit."""
    max_requests: int | None = flag(None, "at a time", at_least=1, at_most=10**9)
    """Embedding requests, at all gateways."""
    models: tuple[str, ...] | None = flag(
        None, "that it reaches", must='must be a list of one or more names of models, ["NAME"]'
    )
    """Their configured names; None: all."""


@dataclass(frozen=True, slots=True)
class ChatTemplateSpec:
    source: str
    tokens: dict[str, str]
    """The special tokens that it may name, by names such as `eos_token`."""


def _prompt(text: str) -> str:
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise ValueError(f"must have at most {MAX_PROMPT_CHARACTERS} characters, has {len(text)}")
    return text


@dataclass(frozen=True, slots=True)
class AliasDefaults:
    """What requests by an alias get where they do not say otherwise. None: as by the model's name."""

    alias: str
    prompt: str | None = flag(None, '"": no prompt, not even the model\'s own', read=_prompt)
    prompt_name: str | None = flag(None, "of one of the model's prompts, in place of `prompt`")
    role: Literal["query", "document"] | None = flag(
        None, "chooses the prompt, where neither `prompt` nor `prompt_name` does"
    )
    dimensions: int | None = flag(None, "number of dimensions of dense vectors", at_least=1)
    dtype: Literal["float32", "float16", "bfloat16", "int8", "uint8", "binary", "ubinary"] | None = flag(
        None, "type of the elements of dense vectors"
    )
    overflow: Literal["error", "truncate", "truncate_left", "chunk"] | None = flag(None, "as --overflow")
    raw_scores: bool | None = flag(None, "scores of a ranking are the model's own numbers")

    def given(self) -> JsonObject:
        """Those that are not None, by name, without the alias."""
        return {name: value for name, value in asdict(self).items() if value is not None and name != "alias"}


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(Settings):
    """The settings of a model, with what they leave open decided, and what else every gateway needs to serve it. A new
    one is a new generation. Has no key. `share` divides limits on the whole server."""

    version: str
    model: str
    """The served model's name, reported in every response."""
    aliases: tuple[str, ...] = ()
    alias_defaults: tuple[AliasDefaults, ...] = ()
    card: ModelCard
    arena: ArenaSpec
    num_workers: int
    num_cores: int
    """Processor cores that the server may use."""
    compute_type: str
    """"cpu" or "gpu"."""
    keys: tuple[ApiKey, ...]
    """Every request needs one of them, unless there are none."""
    chat_template: ChatTemplateSpec | None
    """None: the model has none, or special tokens in a text are read as characters."""
    max_tokens: int
    """Longest sequence in tokens, special ones included; at most the card's."""
    max_batch_tokens: int
    max_connections_per_address: int
    """Connections by unix sockets and of trusted proxies have no limit."""
    unknown_model: Literal["any", "default", "refuse"]
    ranges: str | None = None
    """Path of a copy of --quantization-ranges; see `vecd.gateway.encoding.forms`."""
    query_weights: str | None = None
    """The same of the file with the weights of queries; None: the model has none."""
    keep_alive_s: float | None
    """Seconds that the model stays loaded after its last request; None: for ever."""
    has_admin_listener: bool
    """/metrics, /info and /admin are served on a socket of their own, and not on the public one."""
    metrics_workers: int
    """Workers that the shared metrics have cells for: the most that a later configuration may have."""
    metrics_models: int = 1
    model_index: int = 0
    """Its index among the models that the server has had, 0 for the first of the configuration."""
    first_worker: int = 0
    """The index of the model's first worker: those of all models are numbered together."""
    weight: float = 1.0
    """The model's share of the cores while other models need them, above 0."""
    keeps_listening: bool = False
    """Another process keeps the public socket open: its backlog is left to the next gateway."""
    keeps_admin_listening: bool = False

    @property
    def is_matryoshka(self) -> bool:
        """Smaller `dimensions` are allowed, by the model or by the operator."""
        return self.matryoshka or self.card.is_matryoshka

    @property
    def is_loaded_on_demand(self) -> bool:
        return self.load == "demand"

    @property
    def batch_timeout_s(self) -> float:
        """From the reply to the previous batch, with a batch of every other gateway in between; then the worker counts
        as stuck. Less, once the worker's speed is known."""
        return self.batch_timeout * self.gateways

    @property
    def shared_metrics(self) -> SharedMetricsSpec:
        return SharedMetricsSpec(self.gateways, self.metrics_workers, self.metrics_models)

    @property
    def vector_cache_spec(self) -> VectorCacheSpec:
        return VectorCacheSpec(self.vector_cache, self.gateways)

    def share(self, limit: int) -> int:
        """One gateway's part of a limit of the whole server, rounded up."""
        return -(-limit // self.gateways)
