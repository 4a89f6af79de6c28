"""The condition of a request on the model's identity: the request header `if-vecd-identity`."""

import asyncio
import re
import time
from contextlib import suppress
from typing import NamedTuple

from vecd.gateway.errors import ApiError, BadRequest, IdentityMismatch, NotReady, Unavailable, quoted
from vecd.gateway.request import HEADER, Identity
from vecd.gateway.service import Service

CONDITION = "if-vecd-identity"
_CONDITION = re.compile(r"([0-9a-f]{32})(?:;dtype=([a-z0-9_]{1,32}))?", re.ASCII)
MAX_WAIT_S = 30.0
"""Of a request that has not been admitted yet: it holds a connection and its body. The weights of a large model take
longer to read, and the client's retry waits as well."""
_RETRY_AFTER_S = 5.0


class Demand(NamedTuple):
    digest: str
    number_format: str | None

    def __str__(self) -> str:
        return self.digest if self.number_format is None else f"{self.digest};dtype={self.number_format}"


def parse_demand(value: str) -> Demand:
    """`value`: the header's. Raises BadRequest."""
    match = _CONDITION.fullmatch(value)
    if match is None:
        raise BadRequest(
            f"header {CONDITION}: must be an identity as {HEADER} has it, 32 lower-case hexadecimal digits with or "
            f"without ;dtype=FORMAT, is {quoted(value)}"
        )
    return Demand(match[1], match[2])


async def check_before(demand: Demand, service: Service, identity: Identity, deadline: float) -> None:
    """Wait until the identity is known, at most 30 s and until the request's deadline, and compare. For a number format
    the model is loaded, and the first worker is waited for as long. Raises IdentityMismatch; NotReady at the deadline;
    Unavailable for a model that cannot be loaded, and at once for an identity that cannot be found out."""
    if not identity.digest:
        await _until(identity.known, deadline)
    if not identity.digest:
        raise _unknown(identity, service)
    if demand.digest == identity.digest and demand.number_format is not None and not identity.formats:
        await service.residence.until_ready(deadline - time.monotonic())
        await _until(identity.has_format, deadline)
    check_after(demand, service, identity)


def check_after(demand: Demand, service: Service, identity: Identity) -> None:
    """Compare once more. Raises IdentityMismatch, and Unavailable for an identity that is not known any more."""
    if demand.digest == identity.digest and demand.number_format in (None, identity.formats):
        return
    if not identity.digest or (demand.digest == identity.digest and not identity.formats):
        raise _unknown(identity, service)
    message = f"header {CONDITION}: {demand} is demanded, and the model here is {identity.describe()}"
    raise IdentityMismatch(message)


async def _until(event: asyncio.Event, deadline: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), min(MAX_WAIT_S, max(0.0, deadline - time.monotonic())))


def _unknown(identity: Identity, service: Service) -> ApiError:
    if problem := identity.problem:
        message = f"header {CONDITION}: the identity of the model here is not known: {problem}"
        return Unavailable(message, retry_after_s=_RETRY_AFTER_S)
    return NotReady("the model's identity is not known yet", time.monotonic() - service.made_at)
