"""Requests of the tokenizer alone: tokens of texts, texts of tokens, and texts of conversations. They need no permit,
and have their own bound on what is under way.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from vecd.gateway.api.operation import ParsedDecode, ParsedMessages, ParsedTokenize
from vecd.gateway.config import GatewayConfig
from vecd.gateway.errors import ApiError, DeadlinePassed
from vecd.gateway.request import Overflow, Tokenizing
from vecd.gateway.scheduling.admission import TenantRoom
from vecd.gateway.scheduling.keys import Principal
from vecd.gateway.telemetry.measures import SharedMetrics
from vecd.gateway.tokenization.chat_process import ChatProcess
from vecd.gateway.tokenization.tokenize_api import MAX_SIZE, most_of_one_caller, size_of
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.shm.shared_metrics import Counter

T = TypeVar("T")

_SIZE_OF_RENDERING = 16 * 1024
"""What conversations count besides their length, in characters: 16 requests of one caller may wait for the chat
template, because each may take a second."""


class Inspection:
    """Each call raises RateLimited for a key that is over its limits, TooManyRequests while there are too many of them,
    BadRequest for an input, and DeadlinePassed."""

    def __init__(
        self,
        config: GatewayConfig,
        tokenizer: Tokenizer,
        shared_metrics: SharedMetrics,
        why_unavailable: Callable[[], str | None],
    ) -> None:
        self.tokenizer = tokenizer
        self.chat = None if config.chat_template is None else ChatProcess(config.chat_template)
        on_refused = partial(shared_metrics.add, Counter.REFUSED)
        self.room = TenantRoom(MAX_SIZE, "Texts and ids of {} characters are with the tokenizer", on_refused=on_refused)
        self._shared_metrics = shared_metrics
        self._why_unavailable = why_unavailable
        self._make_end: Callable[[], ApiError] | None = None
        self._over: set[asyncio.Future[None]] = set()
        """Fails when this ends: one for each call under way."""

    def end(self, make_error: Callable[[], ApiError]) -> None:
        """Fail every call, now or later, each with an error of its own."""
        self._make_end = make_error
        for over in self._over:
            if not over.done():
                over.set_exception(make_error())

    def stop(self) -> None:
        if self.chat is not None:
            self.chat.close()

    async def describe(self, parsed: ParsedTokenize, deadline: float, principal: Principal) -> None:
        """Give the tokens of texts to `parsed.collect`."""
        how = Tokenizing(parsed.prompt, Overflow.CHUNK, add_special_tokens=parsed.add_special_tokens)
        num_estimated = self.tokenizer.estimate_tokens(parsed.texts, how)
        size = size_of(parsed.texts, parsed.prompt)
        with principal.reserve(num_estimated) as reservation, self._room_for(size, principal):
            steps = self.tokenizer.api.describe_steps(
                parsed.texts, parsed.prompt, parsed.add_special_tokens, parsed.collect
            )
            next(steps)  # which checks
            reservation.note_sent(num_estimated)  # tokenizing is charged, whether it succeeds or not
            tokenizing = self.tokenizer.threads.run(steps, principal.tenant)
            reservation.settle(await self._unless_late(tokenizing, deadline))

    async def decode(self, parsed: ParsedDecode, deadline: float, principal: Principal) -> list[str]:
        """The texts of lists of token ids."""
        num_ids = sum(map(len, parsed.lists))
        with principal.reserve(num_ids) as reservation, self._room_for(size_of(parsed.lists), principal):
            steps = self.tokenizer.api.decode_steps(parsed.lists, parsed.skip_special_tokens)
            next(steps)
            reservation.note_sent(num_ids)
            return await self._unless_late(self.tokenizer.threads.run(steps, principal.tenant), deadline)

    async def render(self, parsed: ParsedMessages, deadline: float, principal: Principal) -> list[str]:
        """The texts that the model's chat template makes of conversations."""
        assert self.chat is not None
        with self._room_for(_SIZE_OF_RENDERING + len(parsed.payload), principal):
            return await self._unless_late(self.chat.render(parsed.payload), deadline)

    @contextmanager
    def _room_for(self, size: int, principal: Principal) -> Iterator[None]:
        if self._make_end is not None:
            raise self._make_end()
        with self.room.share(principal.tenant) as share:
            share.take(size, most_of_one_caller(size))
            yield

    async def _unless_late(self, work: Awaitable[T], deadline: float) -> T:
        """The result of `work`, which is cancelled at the deadline."""
        over = asyncio.get_running_loop().create_future()
        self._over.add(over)
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await unless_over(over, work)
        except TimeoutError:
            self._shared_metrics.add(Counter.EXPIRED)
            raise DeadlinePassed(self._why_unavailable()) from None
        finally:
            self._over.discard(over)


async def unless_over(over: "asyncio.Future[None]", work: Awaitable[T]) -> T:
    """The result of `work`. If `over` is done before, `work` is cancelled. Raises the reason."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, over), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await over
        return await task
    finally:
        task.cancel()
