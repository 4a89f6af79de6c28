"""An admission without a server, and what it is told of queue and workers."""

import asyncio
import math
import time
from dataclasses import dataclass

import pytest

from vecd.gateway.admission.admission import Admission, Permit
from vecd.gateway.scheduling.policy import BatchingPolicy
from vecd.gateway.types.errors import TooManyRequests
from vecd.gateway.types.request import Priority

NORMAL = Priority.NORMAL


class FixedPolicy(BatchingPolicy):
    """Says of its queue what the test wants."""

    def __init__(self):
        super().__init__(max_batch_tokens=2048, max_batch_rows=512, max_sequence_tokens=100)
        self.quantum = 100
        self.queued_tokens = 10**12
        self.ahead = 0
        self.ahead_of: dict[str, int] = {}
        self.num_looks = 0

    def tokens_ahead(self, num_tokens, priority, tokens_per_s, tenant=""):
        self.num_looks += 1
        return self.ahead_of.get(tenant, self.ahead)


@dataclass
class FixedWorkers:
    tokens_per_s: float = 1000.0
    in_flight_tokens: int = 0


class Entrance:
    """An admission, and what it is told of queue and workers."""

    def __init__(self, max_requests=100, max_wait_s=10.0):
        self.policy, self.workers = FixedPolicy(), FixedWorkers()
        self.admission = Admission(
            max_requests=max_requests, max_wait_s=max_wait_s, policy=self.policy, workers=self.workers
        )

    def try_enter(self, num_tokens=10, timeout_s=60.0, tenant=""):
        return self.admission.try_enter(num_tokens, NORMAL, time.monotonic() + timeout_s, tenant)

    async def enter(self, num_tokens=10, timeout_s=60.0, tenant=""):
        return await self.admission.enter(num_tokens, NORMAL, time.monotonic() + timeout_s, tenant)

    def wait_s(self, num_tokens, tenant):
        """The estimate for a request that has no permit yet."""
        admission = self.admission
        return admission.wait_s(Permit(admission, admission._use(tenant), num_tokens, NORMAL, math.inf))

    def fill(self, tenant, num=10_000):
        """As many permits for a tenant as it gets, at most `num`."""
        permits: list[Permit] = []
        while len(permits) < num and (permit := self.try_enter(tenant=tenant)) is not None:
            permits.append(permit)
        return permits

    def rejection(self, **ask) -> TooManyRequests:
        with pytest.raises(TooManyRequests) as caught:
            asyncio.run(self.enter(**ask))
        return caught.value
