"""What the gateway is told at its start.

Owns `GatewayConfig`, composed by the supervisor and sent over the control channel as JSON. Reads no environment
and no file. Imports neither numpy nor uvloop: the supervisor imports it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shm.arena import ArenaSpec
from shm.card import ModelCard

TOKEN_ID_POLICIES = ("auto", "model", "reject")


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Everything a gateway needs to know. Immutable; a new configuration is a new gateway."""

    version: str
    model: str
    """The served model's name, reported in every answer."""
    card: ModelCard
    arena: ArenaSpec
    num_workers: int
    api_key: str | None
    """Required of every caller when set. Never logged."""
    token_ids: str
    """One of TOKEN_ID_POLICIES; see `gateway.tokenizer`."""
    max_tokens: int
    """Longest sequence in tokens, special ones included; at most the card's."""
    max_batch_tokens: int
    max_inputs: int
    """Inputs per request."""
    max_body_bytes: int
    max_requests: int
    """Embedding requests admitted at a time."""
    max_queued_tokens: int
    """Tokens admitted and not yet embedded, estimated from characters."""
    max_connections: int
    request_timeout_s: float
    """From the request's last byte to its answer."""
    batch_timeout_s: float
    """From a batch's turn on its worker to its rows; past it the worker counts as stuck."""
    uds: str | None
    """Path of the unix socket listened on, removed when the supervisor dies without doing so."""
    log_level: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "GatewayConfig":
        return cls(**{**fields, "card": ModelCard.from_json(fields["card"]), "arena": ArenaSpec(**fields["arena"])})
