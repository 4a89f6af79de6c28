"""What a gateway knows of the state of one generation's model, which the supervisor loads and unloads.

Owns the last `vecd.shm.control.ModelIs`, what the supervisor was told since, and those who wait for another state.
Decides whether a request may wait for a model that is not ready. Knows no queue and no worker.
"""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from vecd.gateway.errors import ApiError, Unavailable
from vecd.shm.control import KeepAlive, Message, ModelAsked, ModelIs, ModelState, ModelUsed, ModelWanted

MAX_WAITING = 1000
"""Requests that may wait for one model that is not ready, at all gateways."""
_USE_INTERVAL_S = 1.0
_UNREPORTED = -1
"""Of requests that are unanswered: no number that was reported."""

ENDS = {
    "load": frozenset({ModelState.READY, ModelState.FAILED}),
    "unload": frozenset({ModelState.UNLOADED, ModelState.FAILED}),
}
"""The states that end what an operator has asked for."""


class _Goal(NamedTuple):
    is_client_s: bool
    """A request waits, and not an operator."""
    action: str
    num_before: int
    """`_num_ended` when it began to wait: the state may be over before it is seen."""


def _num_ended(status: ModelIs, action: str) -> int:
    return status.num_loads + status.num_failed_loads if action == "load" else sum(status.num_unloads.values())


class Residence:
    def __init__(
        self,
        generation: int,
        *,
        keep_alive_s: float | None,
        num_gateways: int,
        send: Callable[[Message], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keep_alive_s`: as configured. `send` gets the messages for the supervisor."""
        self.is_awaited = False
        """Requests wait for the model, or are refused. The only thing that a request for a ready model looks at."""
        self.status = ModelIs(generation, ModelState.READY)
        """What the supervisor has said last; before, the model is ready or becomes so with the server's start."""
        self.is_told = False
        self.keep_alive_s = keep_alive_s
        """Seconds that the model stays after its last request; None: for ever."""
        self._configured_s = keep_alive_s
        self._num_gateways = num_gateways
        self._send = send
        self._clock = clock
        self._changed_at = self._last_used_at = clock()
        self._is_wanted = False
        """The supervisor knows that requests wait in this state."""
        self._kept_at: float | None = None
        """When the last KeepAlive was sent since the model was loaded."""
        self._watchers: dict[asyncio.Future[ModelIs], _Goal] = {}
        self._make_end: Callable[[], ApiError] | None = None
        self._seen_use = self._reported_use = (0, 0, 0.0)
        self._use_due_at = 0.0

    # --- what the supervisor says ---------------------------------------------------------------------------

    @property
    def state(self) -> ModelState:
        return ModelState(self.status.state)

    def change(self, status: ModelIs) -> bool:
        """Returns whether it is news: another state, or another load that has failed. Side effect: those who wait for
        this state go on."""
        is_news = status.state != self.status.state or (status.state == ModelState.FAILED and status.wait_s > 0)
        self._is_wanted &= not is_news
        self.status, self.is_told, self._changed_at = status, True, self._clock()
        state = self.state
        self.is_awaited = state is not ModelState.READY
        if state is ModelState.READY:
            self._last_used_at = self._changed_at
            if is_news:
                # The supervisor has forgotten what waited across an unload.
                self._reported_use = (self._reported_use[0], _UNREPORTED, self._reported_use[2])
        elif state is ModelState.UNLOADED:
            self.keep_alive_s, self._kept_at = self._configured_s, None
        for watcher, goal in self._watchers.items():
            is_reached = is_news and state in ENDS[goal.action]
            if (is_reached or _num_ended(status, goal.action) > goal.num_before) and not watcher.done():
                watcher.set_result(status)
        return is_news

    # --- requests -------------------------------------------------------------------------------------------

    def let_wait(self, num_waiting: int, deadline: float) -> None:
        """Let a request wait for the model beside `num_waiting` others; only while `is_awaited`. `deadline`: as in
        `Permit`.

        Raises Unavailable: when the last load has failed and the next try is not due, when too many wait, or when the
        load is expected to take longer than until the deadline. Side effect: the supervisor is told that the model is
        wanted, once for each state.
        """
        now = self._clock()
        if self.state is ModelState.FAILED and self._rest_s(now) > 0:
            raise self.failed_error()
        self.want()
        most = -(-MAX_WAITING // self._num_gateways)
        if num_waiting >= most:
            raise self._unavailable(f"{num_waiting} requests wait for the model to be loaded, at most {most} may")
        if (rest_s := self._rest_s(now)) > deadline - now:
            raise self._unavailable(
                f"The model is being loaded, which is expected to take {rest_s:.0f} s more: the request's deadline is "
                "earlier"
            )

    @property
    def has_waiting_clients(self) -> bool:
        """Requests wait that need nothing of the model but that it is loaded."""
        return any(goal.is_client_s for goal in self._watchers.values())

    def want(self) -> None:
        """Tell the supervisor that requests wait, once for each state in which it does not load the model anyway."""
        if not self._is_wanted and self.status.state != ModelState.LOADING:
            self._is_wanted = True
            self._send(ModelWanted(self.status.generation))

    def failed_error(self) -> Unavailable:
        return self._unavailable(f"The model could not be loaded: {self.status.reason}", "model_failed")

    def late_error(self) -> Unavailable:
        """The error of a request whose deadline has passed while it waited for the model."""
        if self.state is ModelState.FAILED:
            return self.failed_error()
        return self._unavailable("The model was not loaded before the request's deadline")

    def why_failed(self) -> str | None:
        """None in all other states."""
        return f"the model could not be loaded: {self.status.reason}" if self.state is ModelState.FAILED else None

    def _unavailable(self, message: str, code: str = "model_loading") -> Unavailable:
        return Unavailable(message, retry_after_s=self._rest_s(self._clock()), code=code)

    def _rest_s(self, now: float) -> float:
        """Expected seconds until the model is ready, or until the next try; 0 if that is not known."""
        return max(0.0, self._changed_at + self.status.wait_s - now)

    # --- those who wait for a state -------------------------------------------------------------------------

    async def until_ready(self, timeout_s: float) -> None:
        """Have the model loaded, and wait until it is. Raises Unavailable as `let_wait`, when the load fails, and after
        `timeout_s`."""
        if not self.is_awaited:
            return
        self.let_wait(len(self._watchers), self._clock() + timeout_s)
        status = await self._until("load", timeout_s, is_client_s=True)
        if status is None:
            raise self.late_error()
        if status.state == ModelState.FAILED:
            raise self.failed_error()

    async def ask(self, action: str, timeout_s: float) -> bool:
        """Have done what an operator wants, one of ENDS, and wait until it is; not if `timeout_s` is 0. Returns whether
        it has come to an end, which may be that it has failed."""
        is_done = self.state in ENDS[action] and (action != "load" or self.state is ModelState.READY)
        self._send(ModelAsked(self.status.generation, action))
        return is_done or (timeout_s > 0 and await self._until(action, timeout_s) is not None)

    def end(self, make_error: Callable[[], ApiError]) -> None:
        """Fail those who wait for a state, now or later, each with an error of its own."""
        self._make_end = make_error
        for watcher in self._watchers:
            if not watcher.done():
                watcher.set_exception(make_error())

    async def _until(self, action: str, timeout_s: float, *, is_client_s: bool = False) -> ModelIs | None:
        """The next status in which the action has come to an end; None if there is none in time."""
        if self._make_end is not None:
            raise self._make_end()
        watcher: asyncio.Future[ModelIs] = asyncio.get_running_loop().create_future()
        self._watchers[watcher] = _Goal(is_client_s, action, _num_ended(self.status, action))
        try:
            async with asyncio.timeout(timeout_s):
                return await watcher
        except TimeoutError:
            return None
        finally:
            del self._watchers[watcher]

    # --- how long it stays ----------------------------------------------------------------------------------

    def keep_alive(self, seconds: float | None) -> None:
        """A client has set how long the model stays after its last request; None: for ever. The supervisor is told of
        a change, and where other gateways may have said otherwise, once a second. 0 s mean nothing for a model that is
        not loaded, and would count for its next load."""
        if seconds == 0 and not self.is_resident:
            return
        now = self._clock()
        is_new = self._kept_at is None or seconds != self.keep_alive_s
        if is_new or (self._num_gateways > 1 and self._kept_at is not None and now - self._kept_at >= _USE_INTERVAL_S):
            self.keep_alive_s, self._kept_at = seconds, now
            self._send(KeepAlive(self.status.generation, seconds))

    def note_use(self, num_admitted: int, num_requests: int, core_s: float) -> None:
        """Report the use since the last report, at most once a second. `num_admitted` requests and `core_s` seconds ×
        cores are those so far, `num_requests` those that are unanswered."""
        now, use = self._clock(), (num_admitted, num_requests, core_s)
        if num_requests or use != self._seen_use:
            self._seen_use, self._last_used_at = use, now
        if use != self._reported_use and now >= self._use_due_at:
            self._send(ModelUsed(self.status.generation, core_s - self._reported_use[2], num_requests))
            self._reported_use, self._use_due_at = use, now + _USE_INTERVAL_S

    @property
    def is_resident(self) -> bool:
        """It has weights in memory."""
        return self.state in (ModelState.READY, ModelState.DRAINING)

    @property
    def expires_in_s(self) -> float | None:
        """Seconds until the model is unloaded if no request comes, as far as this gateway knows; None: it stays."""
        if self.keep_alive_s is None:
            return None
        return max(0.0, self._last_used_at + self.keep_alive_s - self._clock())
