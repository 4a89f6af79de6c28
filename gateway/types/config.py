"""What the gateway is told at its start.

Owns `GatewayConfig`, composed by the supervisor and sent over the control channel as JSON. Reads no environment
and no file. Imports neither numpy nor uvloop: the supervisor imports it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vecd.shm.arena import ArenaSpec
from vecd.shm.card import ModelCard
from vecd.shm.shared_metrics import SharedMetricsSpec

PRIORITIES = ("interactive", "normal", "bulk")
TOKEN_ID_POLICIES = ("auto", "model", "cl100k", "reject")
OVERFLOWS = ("error", "truncate", "truncate_left", "chunk")
LOG_FORMATS = ("text", "json")
SCOPES = ("embed", "metrics", "admin")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What a caller who sends a certain key may do. Holds the key's digest, never the key."""

    name: str
    """Names the tenant in shares of the server; told to no other caller."""
    digest: str
    """SHA-256 of the key, in hexadecimal."""
    scopes: tuple[str, ...] = SCOPES
    """Of SCOPES: "embed" for embeddings and models, "metrics" for /metrics and /info, "admin" for /admin."""
    max_priority: str = "interactive"
    """One of PRIORITIES."""
    tokens_per_s: float | None = None
    """Averaged over seconds, over all gateways; None: as many as there is room for."""
    max_requests: int | None = None
    """Embedding requests at a time, at all gateways."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "ApiKey":
        return cls(**{**fields, "scopes": tuple(fields["scopes"])})


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Everything a gateway needs to know, the same for each. Immutable; a new configuration is a new generation of it.

    What limits the whole server is divided among the gateways by `share`.
    """

    version: str
    model: str
    """The served model's name, reported in every answer."""
    aliases: tuple[str, ...]
    """Other names that callers may use for it."""
    is_strict: bool
    """A request for a model of any other name is refused."""
    card: ModelCard
    arena: ArenaSpec
    num_gateways: int
    num_workers: int
    compute_type: str
    """"cpu" or "gpu"."""
    board_workers: int
    """Workers that the board has room for: as many as a later configuration may have."""
    keys: tuple[ApiKey, ...]
    """One of them is required of every caller, unless there are none."""
    token_ids: str
    """One of TOKEN_ID_POLICIES; see `vecd.gateway.tokenization.tokenizer`."""
    overflow: str
    """One of OVERFLOWS, for requests that do not say."""
    is_matryoshka: bool
    """Smaller `dimensions` are allowed, because the model says so, or the operator."""
    quantization_ranges: str | None
    """Path of a NumPy file, float32 [2, D]: each element's least and greatest; see
    `vecd.gateway.encoding.quantization`."""
    literal_special_tokens: bool
    """Special tokens that stand in a text are taken for characters."""
    max_tokens: int
    """Longest sequence in tokens, special ones included; at most the card's."""
    max_batch_tokens: int
    max_inputs: int
    """Inputs per request."""
    max_request_tokens: int | None
    """Tokens of all inputs of one request; None: no limit but those on bodies and waiting."""
    max_body_bytes: int
    max_requests: int
    """Embedding requests admitted at a time, by all gateways."""
    max_wait_s: float
    """Until a request would have its turn; by an estimate it is refused at the door if it were longer."""
    max_priority: str
    """One of PRIORITIES: the highest that callers get, whatever they ask for."""
    max_connections: int
    """Open at a time, at all gateways."""
    max_connections_per_address: int
    """Of these, from one address (IPv6: one /64). Unix sockets have none."""
    has_admin_listener: bool
    """/metrics, /info and /admin are served on a socket of their own, and not on the public one."""
    cors_origins: tuple[str, ...]
    """Web pages of these origins may call; "*": of any. None: no page may."""
    has_tei_metrics: bool
    """/metrics has text-embeddings-inference's names, too."""
    has_ui: bool
    """A browser is given the page at `/`."""
    log_format: str
    """One of LOG_FORMATS."""
    max_logged_requests_per_s: float
    """Lines for requests, of each gateway, of those that are answered without an error of the server's; 0: none."""
    otlp_endpoint: str | None
    """URL of an OpenTelemetry collector that spans are sent to, by OTLP over HTTP."""
    trace_ratio: float
    """Of requests that come without a trace, so many are traced; 0 … 1."""
    tls_cert: str | None
    """Path of the certificate chain; with it, the public listener speaks TLS."""
    tls_key: str | None
    request_timeout_s: float
    """From the request's last byte to its answer."""
    batch_timeout_s: float
    """The most from the answer to the batch ahead of it to a batch's rows, so that it covers a batch of every other
    gateway; past it the worker counts as stuck. Less, once the worker's speed is known."""
    uds: str | None
    """Path of the unix socket listened on, removed when the supervisor dies without doing so."""
    admin_uds: str | None
    """The same of the admin listener."""
    log_level: str
    keeps_listening: bool = False
    """The public socket is open elsewhere, and will be accepted from again: what waits there when the gateway ends is
    left to whoever comes next, not turned away."""
    keeps_admin_listening: bool = False

    @property
    def shared_metrics(self) -> SharedMetricsSpec:
        return SharedMetricsSpec(self.num_gateways, self.board_workers)

    def share(self, limit: int) -> int:
        """One gateway's part of a limit of the whole server, rounded up."""
        return -(-limit // self.num_gateways)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "GatewayConfig":
        keys = tuple(map(ApiKey.from_json, fields["keys"]))
        card, arena = ModelCard.from_json(fields["card"]), ArenaSpec(**fields["arena"])
        tuples = {name: tuple(fields[name]) for name in ("aliases", "cors_origins")}
        return cls(**{**fields, **tuples, "keys": keys, "card": card, "arena": arena})
