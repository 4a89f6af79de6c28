"""The configuration of a gateway, which the supervisor composes and sends over the control channel as JSON.

Reads no environment and no file. Imports neither numpy nor uvloop: the supervisor imports it.
"""

from dataclasses import asdict, dataclass

from vecd.base.files import JsonFields, JsonObject
from vecd.model.card import ModelCard
from vecd.shm.arena import ArenaSpec
from vecd.shm.shared_metrics import SharedMetricsSpec
from vecd.shm.vector_cache import VectorCacheSpec

PRIORITIES = ("interactive", "normal", "bulk")
OVERFLOWS = ("error", "truncate", "truncate_left", "chunk")
ROLES = ("query", "document")
DTYPES = ("float32", "float16", "bfloat16", "int8", "uint8", "binary", "ubinary")
SCOPES = ("embed", "metrics", "admin")


@dataclass(frozen=True, slots=True)
class ApiKey(JsonFields):
    """What a client with a certain key may do. Has the key's digest, never the key."""

    name: str
    """The tenant's name in fair queueing; shown to no other client."""
    digest: str
    """SHA-256 of the key, in hexadecimal."""
    scopes: tuple[str, ...] = SCOPES
    """Of SCOPES: "embed" for embeddings and models, "metrics" for /metrics and /info, "admin" for /admin."""
    max_priority: str = "interactive"
    """One of PRIORITIES."""
    tokens_per_s: float | None = None
    """Averaged over seconds, over all gateways; None: no limit."""
    max_requests: int | None = None
    """Embedding requests at a time, at all gateways."""
    models: tuple[str, ...] | None = None
    """The configured names of the models that it reaches; None: all."""


@dataclass(frozen=True, slots=True)
class ChatTemplateSpec(JsonFields):
    source: str
    tokens: dict[str, str]
    """The special tokens that it may name, by names such as `eos_token`."""
    command: tuple[str, ...]
    """Starts `vecd.gateway.tokenization.chat_template`."""


@dataclass(frozen=True, slots=True)
class AliasDefaults:
    """What requests by an alias get where they do not say otherwise. None: as by the model's name."""

    alias: str
    prompt: str | None = None
    """"" for no prompt, not even the model's own."""
    prompt_name: str | None = None
    """Of one of the model's prompts, in place of `prompt`."""
    role: str | None = None
    """One of ROLES. It chooses the prompt, where neither `prompt` nor `prompt_name` does."""
    dimensions: int | None = None
    dtype: str | None = None
    """One of DTYPES."""
    overflow: str | None = None
    """One of OVERFLOWS."""
    raw_scores: bool | None = None
    """Scores of a ranking are the model's own numbers."""

    def given(self) -> JsonObject:
        """Those that are not None, by name, without the alias."""
        return {name: value for name, value in asdict(self).items() if value is not None and name != "alias"}


@dataclass(frozen=True, slots=True)
class GatewayConfig(JsonFields):
    """The configuration of every gateway; `share` divides limits on the whole server. A new one is a new generation."""

    version: str
    model: str
    """The served model's name, reported in every response."""
    aliases: tuple[str, ...]
    is_strict: bool
    """A request for a model of any other name is refused."""
    card: ModelCard
    arena: ArenaSpec
    num_gateways: int
    num_workers: int
    num_cores: int
    """Processor cores that the server may use."""
    compute_type: str
    """"cpu" or "gpu"."""
    metrics_workers: int
    """Workers that the shared metrics have cells for: the most that a later configuration may have."""
    keys: tuple[ApiKey, ...]
    """Every request needs one of them, unless there are none."""
    token_ids: str
    """As in `vecd.gateway.tokenization.id_policy`."""
    overflow: str
    """One of OVERFLOWS, the default of requests."""
    max_embed_len: int | None
    """Tokens of an input that is split, special ones included; None: no limit but those on a request."""
    is_matryoshka: bool
    """Smaller `dimensions` are allowed, by the model or by the operator."""
    quantization_ranges: str | None
    """Path of a NumPy file, float32 [2, D]: each element's least and greatest; see
    `vecd.gateway.encoding.forms`."""
    literal_special_tokens: bool
    """Special tokens in a text are read as characters."""
    max_tokens: int
    """Longest sequence in tokens, special ones included; at most the card's."""
    max_batch_tokens: int
    max_inputs: int
    max_request_tokens: int | None
    """Tokens of all inputs of one request; None: no limit but those on bodies and waiting."""
    max_body_bytes: int
    max_requests: int
    """Embedding requests admitted at a time, by all gateways."""
    max_wait_s: float
    """A request whose estimated wait is longer is refused."""
    max_priority: str
    """One of PRIORITIES: the highest that requests get."""
    share_computed: str
    """Between which requests a computed row is shared: those of a "tenant", or "all"."""
    max_connections: int
    """Open at a time, at all gateways."""
    max_connections_per_address: int
    """Of these, from one address (IPv6: one /64). Connections by unix sockets and of trusted proxies have none."""
    has_admin_listener: bool
    """/metrics, /info and /admin are served on a socket of their own, and not on the public one."""
    cors_origins: tuple[str, ...]
    """Web pages of these origins may send requests; "*": of all origins; empty: no page may."""
    has_ui: bool
    """A browser gets the page at `/`."""
    log_format: str
    """"text" or "json"."""
    max_logged_requests_per_s: float
    """Log lines of each gateway for requests without a server error; 0: none."""
    otlp_endpoint: str | None
    """URL of an OpenTelemetry collector that spans are sent to, by OTLP over HTTP."""
    trace_ratio: float
    """The share of requests without a trace that are traced; 0 … 1."""
    tls_cert: str | None
    """Path of the certificate chain; with it, the public listener speaks TLS."""
    tls_key: str | None
    request_timeout_s: float
    """From the request's last byte to its response."""
    batch_timeout_s: float
    """From the reply to the previous batch, with a batch of every other gateway in between; then the worker counts as
    stuck. Less, once the worker's speed is known."""
    uds: str | None
    """Path of the listening unix socket, which the gateway removes if the supervisor dies without doing so."""
    admin_uds: str | None
    log_level: str
    vector_cache: int = 0
    """Bytes of the table in which all gateways keep computed rows; 0: there is none."""
    model_index: int = 0
    """As in `vecd.shm.shared_metrics.ServiceKey`."""
    metrics_models: int = 1
    first_worker: int = 0
    """The index of the model's first worker: those of all models are numbered together."""
    weight: float = 1.0
    """The model's share of the cores while other models need them, above 0."""
    loads_on_demand: bool = False
    keep_alive_s: float | None = None
    """Seconds that the model stays loaded after its last request; None: for ever."""
    is_pinned: bool = False
    """It is never unloaded for another model's sake."""
    allows_keep_alive: bool = False
    """Clients may set the time that a model stays loaded."""
    unknown_model: str = "any"
    """What a request for a model gets which is not configured. "any": the only model; "default": the first model with
    the capability; "refuse": 404."""
    chat_template: ChatTemplateSpec | None = None
    """None: the model has none, or special tokens in a text are read as characters."""
    keeps_listening: bool = False
    """Another process keeps the public socket open: its backlog is left to the next gateway."""
    keeps_admin_listening: bool = False
    trusted_proxies: str = ""
    """As `vecd.gateway.http.forwarded.TrustedProxies` reads it; "": no peer is trusted."""
    alias_defaults: tuple[AliasDefaults, ...] = ()
    """Of those `aliases` that have any."""
    query_weights: str | None = None
    """Path of a copy of the file with the weights of queries; None: the model has none."""

    @property
    def shared_metrics(self) -> SharedMetricsSpec:
        return SharedMetricsSpec(self.num_gateways, self.metrics_workers, self.metrics_models)

    @property
    def vector_cache_spec(self) -> VectorCacheSpec:
        return VectorCacheSpec(self.vector_cache, self.num_gateways)

    def share(self, limit: int) -> int:
        """One gateway's part of a limit of the whole server, rounded up."""
        return -(-limit // self.num_gateways)
