"""The condition of a request on the model's identity: the request header `if-vecd-identity`.

Owns its reading, and the comparison with the identity of the generation that the request is with: before anything is
computed, and once more before the response, because a number format may have become known, or a second one, meanwhile.
Called by `vecd.gateway.api.handlers`.
"""

import asyncio
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from vecd.gateway.api.context import Context
from vecd.gateway.api.dialects.headers import parse_timeout_s
from vecd.gateway.types.errors import BadRequest, IdentityMismatch, NotReady
from vecd.gateway.types.identity import HEADER as HEADER
from vecd.gateway.types.identity import Identity
from vecd.gateway.types.messages import HttpRequest
from vecd.gateway.types.quoting import quoted

CONDITION = "if-vecd-identity"
_CONDITION = re.compile(r"([0-9a-f]{32})(?:;dtype=([a-z0-9_]{1,32}))?", re.ASCII)
_STAGE = "the model's identity is not known yet"


class Demand(NamedTuple):
    digest: str
    number_format: str | None
    """None: any."""

    def __str__(self) -> str:
        return self.digest if self.number_format is None else f"{self.digest};dtype={self.number_format}"


def parse_demand(headers: Mapping[str, str]) -> Demand | None:
    """The demanded identity. Raises BadRequest."""
    value = headers.get(CONDITION)
    if value is None:
        return None
    match = _CONDITION.fullmatch(value)
    if match is None:
        raise BadRequest(
            f"header {CONDITION}: must be an identity as {HEADER} has it, 32 lower-case hexadecimal digits with or "
            f"without ;dtype=FORMAT, is {quoted(value)}"
        )
    return Demand(match[1], match[2])


async def check_before(demand: Demand, context: Context, http: HttpRequest) -> None:
    """Wait until the identity is known, at most until the request's deadline, and compare. For a number format a model
    that is not loaded is loaded; where it is, and the format is not known yet, `check_after` compares it.

    Raises IdentityMismatch; NotReady at the deadline; Unavailable for a model that cannot be loaded.
    """
    identity, arrived_at = context.identity, http.timeline.arrived_at
    timeout_s = parse_timeout_s(http.headers)
    if not identity.digest:
        limit_s = context.config.request_timeout_s
        deadline = arrived_at + (limit_s if timeout_s is None else min(timeout_s, limit_s))
        with suppress(TimeoutError):
            await asyncio.wait_for(identity.known.wait(), max(0.0, deadline - time.monotonic()))
    if not identity.digest:
        raise NotReady(_STAGE, time.monotonic() - context.started_at)
    if demand.digest == identity.digest and demand.number_format is not None and not identity.formats:
        await context.embedder.load(timeout_s, arrived_at)
    if demand.digest != identity.digest or (identity.formats and not _fits(demand, identity)):
        raise _mismatch(demand, identity)


def check_after(demand: Demand, context: Context) -> None:
    """Compare once more. Raises IdentityMismatch, and NotReady for a format that is still unknown: no worker has
    computed anything since this gateway began."""
    identity = context.identity
    if _fits(demand, identity):
        return
    if not identity.formats:
        raise NotReady(_STAGE, time.monotonic() - context.started_at)
    raise _mismatch(demand, identity)


def _fits(demand: Demand, identity: Identity) -> bool:
    is_any = demand.number_format is None
    return demand.digest == identity.digest and (is_any or demand.number_format == identity.formats)


def _mismatch(demand: Demand, identity: Identity) -> IdentityMismatch:
    return IdentityMismatch(f"header {CONDITION}: {demand} is demanded, and the model here is {identity.describe()}")
