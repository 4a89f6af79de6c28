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
from vecd.gateway.types.errors import ApiError, BadRequest, IdentityMismatch, NotReady, Unavailable
from vecd.gateway.types.identity import HEADER as HEADER
from vecd.gateway.types.identity import Identity
from vecd.gateway.types.messages import HttpRequest
from vecd.gateway.types.quoting import quoted

CONDITION = "if-vecd-identity"
_CONDITION = re.compile(r"([0-9a-f]{32})(?:;dtype=([a-z0-9_]{1,32}))?", re.ASCII)
_STAGE = "the model's identity is not known yet"
_MAX_WAIT_S = 30.0
"""Of a request that has not been admitted yet: it holds a connection and its body. The weights of a large model take
longer to read, and the client's retry waits as well."""
_RETRY_AFTER_S = 5.0


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
    """Wait until the identity is known, at most 30 s and until the request's deadline, and compare. For a number format
    a model that is not loaded is loaded, and the first worker is waited for as long.

    Raises IdentityMismatch; NotReady at the deadline; Unavailable for a model that cannot be loaded, and at once for an
    identity that cannot be found out.
    """
    identity, arrived_at = context.identity, http.timeline.arrived_at
    timeout_s = parse_timeout_s(http.headers)
    limit_s = context.config.request_timeout_s
    deadline = arrived_at + (limit_s if timeout_s is None else min(timeout_s, limit_s))
    if not identity.digest:
        await _until(identity.known, deadline)
    if not identity.digest:
        raise _unknown(context)
    if demand.digest == identity.digest and demand.number_format is not None and not identity.formats:
        await context.embedder.load(timeout_s, arrived_at)
        await _until(identity.has_format, deadline)
    check_after(demand, context)


def check_after(demand: Demand, context: Context) -> None:
    """Compare once more. Raises IdentityMismatch, and Unavailable for an identity that is not known any more."""
    identity = context.identity
    if _fits(demand, identity):
        return
    if not identity.digest or (demand.digest == identity.digest and not identity.formats):
        raise _unknown(context)
    message = f"header {CONDITION}: {demand} is demanded, and the model here is {identity.describe()}"
    raise IdentityMismatch(message)


async def _until(event: asyncio.Event, deadline: float) -> None:
    """Wait for an event, and no longer than a request may that has not been admitted."""
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), min(_MAX_WAIT_S, max(0.0, deadline - time.monotonic())))


def _unknown(context: Context) -> ApiError:
    problem = context.identity.problem
    if problem:
        message = f"header {CONDITION}: the identity of the model here is not known: {problem}"
        return Unavailable(message, retry_after_s=_RETRY_AFTER_S)
    return NotReady(_STAGE, time.monotonic() - context.started_at)


def _fits(demand: Demand, identity: Identity) -> bool:
    is_any = demand.number_format is None
    return demand.digest == identity.digest and (is_any or demand.number_format == identity.formats)
