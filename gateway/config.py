"""What the gateway is told at its start.

Owns `GatewayConfig`, composed by the supervisor and sent over the control channel as JSON. Reads no environment
and no file. Imports neither numpy nor uvloop: the supervisor imports it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shm.arena import ArenaSpec
from shm.board import BoardSpec
from shm.card import ModelCard

PRIORITIES = ("interactive", "normal", "bulk")
TOKEN_ID_POLICIES = ("auto", "model", "reject")


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Everything a gateway needs to know, the same for each. Immutable; a new configuration is a new gateway.

    What limits the whole server is divided among the gateways by `share`.
    """

    version: str
    model: str
    """The served model's name, reported in every answer."""
    card: ModelCard
    arena: ArenaSpec
    num_gateways: int
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
    """Embedding requests admitted at a time, by all gateways."""
    max_wait_s: float
    """Until a request would have its turn; by an estimate it is refused at the door if it were longer."""
    max_priority: str
    """One of PRIORITIES: the highest that callers get, whatever they ask for."""
    max_connections: int
    """Open at a time, at all gateways."""
    request_timeout_s: float
    """From the request's last byte to its answer."""
    batch_timeout_s: float
    """From the answer to the batch ahead of it to a batch's rows, so that it covers a batch of every other gateway;
    past it the worker counts as stuck."""
    uds: str | None
    """Path of the unix socket listened on, removed when the supervisor dies without doing so."""
    log_level: str

    @property
    def board(self) -> BoardSpec:
        return BoardSpec(self.num_gateways, self.num_workers)

    def share(self, limit: int) -> int:
        """One gateway's part of a limit of the whole server, rounded up."""
        return -(-limit // self.num_gateways)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "GatewayConfig":
        return cls(**{**fields, "card": ModelCard.from_json(fields["card"]), "arena": ArenaSpec(**fields["arena"])})
