"""What is known of inputs: which are being computed, which have ended workers, which are rejected for it.

Owns the single flight of equal inputs, the attribution of workers' deaths, the quarantine of poison inputs, and the
budget for lost work that is computed again. Knows no worker.
"""

import logging
import time
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import TypeAlias

from vecd.gateway.errors import INPUT, ApiError, PoisonInput, Unavailable
from vecd.gateway.scheduling.queue import Deaths, Flight, QueuedSequence
from vecd.shm.control import InputDeaths, InputsCleared, Message, Quarantined
from vecd.shm.output import Output

log = logging.getLogger("vecd.dispatch")

KEPT_S = 600.0
"""After its last death, or its rejection. A new version of the model, or more memory, may have made an input harmless;
to try a poison input again costs up to five workers."""

MAX_INPUTS = 4096
"""A worker that dies leaves a batch of inputs, some hundreds at most."""

_DIGEST_BYTES = 16
_FILES_CHANGED_RETRY_AFTER_S = 30


class KnownInputs:
    """The inputs of one model that have ended workers and have not been computed since, and those of them that are
    rejected. Asking costs nothing while there are none."""

    def __init__(
        self, key: bytes, model: str, report: Callable[[Message], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`key`: up to 64 bytes, random and secret. `report` gets what other gateways are to know."""
        self._key = key
        self._model = model
        self._report = report
        self._clock = clock
        self._inputs: dict[str, tuple[float, Deaths]] = {}
        """By digest, with the time at which each is forgotten, the next one first."""
        self.num_worker_deaths = 0
        self.changed_files = ""
        """Which files of the model are no longer those that were loaded, in words. While there are any, a death blames
        no input, and no other gateway hears of it."""

    def __len__(self) -> int:
        return len(self._inputs)

    def digest(self, token_ids: bytes) -> str:
        """In hexadecimal; the same in every process that has the key. Measured: 1.6 µs for 50 tokens."""
        return blake2b(token_ids, key=self._key, digest_size=_DIGEST_BYTES).hexdigest()

    def rejected(self, sequences: list[QueuedSequence]) -> list[QueuedSequence]:
        """Those whose inputs are rejected. Side effect: sequences get the deaths that their inputs are known for,
        unless they remember others."""
        if not self._inputs:
            return []
        for sequence in sequences:
            known = self._find(self.digest(sequence.token_ids))
            if known is not None and (known.is_rejected or sequence.deaths is None):
                sequence.deaths = known
        return [sequence for sequence in sequences if sequence.deaths is not None and sequence.deaths.is_rejected]

    def note(self, message: InputDeaths | InputsCleared | Quarantined) -> None:
        """Note what another gateway says, which decides by itself whether an input is rejected."""
        match message:
            case InputDeaths():
                for digest in message.digests:
                    self._count(digest, self._find(digest) or Deaths(), message)
            case InputsCleared():
                self._forget(message.digests)
            case Quarantined():
                self._reject(message.digest, self._find(message.digest) or Deaths())

    def count_deaths(self, sequences: list[QueuedSequence], *, has_crashed: bool | None) -> list[QueuedSequence]:
        """Count the death of the worker that had a batch, also for inputs whose clients have gone. Returns one sequence
        of each input that is to be rejected, with the error `rejection`. `has_crashed`: None for a worker that was
        stopped, whose death counts as one in a batch with others: the input soon runs alone, and is never rejected for
        such deaths alone."""
        by_digest: dict[str, list[QueuedSequence]] = {}
        for sequence in sequences:
            by_digest.setdefault(self.digest(sequence.token_ids), []).append(sequence)
        is_isolated = len(sequences) == 1 and has_crashed is not None
        message = InputDeaths(self._model, list(by_digest), is_isolated=is_isolated, has_crashed=has_crashed or False)
        if not self.changed_files:
            self._report(message)
            # A request that waits remembers what is forgotten here, until its input is rejected.
            self.rejected(sequences)
        rejected: list[QueuedSequence] = []
        for digest, alike in by_digest.items():
            deaths = alike[0].deaths or Deaths()
            for sequence in alike:
                sequence.deaths = deaths
            if self._count(digest, deaths, message):
                rejected.append(alike[0])
                if self.changed_files:
                    log.error("%d workers died while the model's files are not as loaded", deaths.num)
                else:
                    log.error("%d workers died with an input of %d tokens; rejected", deaths.num, alike[0].num_tokens)
                    self._reject(digest, deaths)
                    self._report(Quarantined(self._model, digest))
        return rejected

    def rejection(self, index: int) -> ApiError:
        if not self.changed_files:
            return poisonous(index)
        return Unavailable(
            f"Workers keep dying, and the model's files are not as loaded: {self.changed_files}",
            retry_after_s=_FILES_CHANGED_RETRY_AFTER_S,
            code="model_files_changed",
        )

    def clear(self, sequences: list[QueuedSequence]) -> None:
        """These have been computed."""
        if not self._inputs:
            return
        cleared = [self.digest(sequence.token_ids) for sequence in sequences if sequence.deaths is not None]
        if cleared:
            self._forget(cleared)
            self._report(InputsCleared(self._model, cleared))

    def _count(self, digest: str, deaths: Deaths, message: InputDeaths) -> bool:
        """Count and remember one more death of an input; returns whether the input is to be rejected."""
        if not self.changed_files and not deaths.is_rejected:
            self._put(digest, deaths)
        return count_death(
            deaths,
            is_isolated=message.is_isolated,
            has_crashed=message.has_crashed,
            num_worker_deaths=self.num_worker_deaths,
        )

    def _reject(self, digest: str, deaths: Deaths) -> None:
        """For a while."""
        deaths.is_rejected = True
        self._put(digest, deaths)

    # --- what is kept ---------------------------------------------------------------------------------------

    def _put(self, digest: str, deaths: Deaths) -> None:
        """Of more than MAX_INPUTS the oldest is forgotten that is not rejected, or else the oldest."""
        self._inputs.pop(digest, None)
        if len(self._inputs) == MAX_INPUTS:
            not_rejected = (other for other, (_, known) in self._inputs.items() if not known.is_rejected)
            del self._inputs[next(not_rejected, next(iter(self._inputs)))]
        self._inputs[digest] = (self._clock() + KEPT_S, deaths)

    def _find(self, digest: str) -> Deaths | None:
        now = self._clock()
        while self._inputs and next(iter(self._inputs.values()))[0] <= now:
            del self._inputs[next(iter(self._inputs))]
        return self._inputs.get(digest, (0.0, None))[1]

    def _forget(self, digests: list[str]) -> None:
        for digest in digests:
            if (deaths := self._find(digest)) is not None and not deaths.is_rejected:
                del self._inputs[digest]


def poisonous(index: int) -> PoisonInput:
    return PoisonInput(f"'{INPUT}[{index}]' ended its worker each time it ran")


# Computes identical sequences that wait at the same time once. Life of a flight:
#
#     join ──► all wait, each in the queue of its own request ◄──────────────┐ seat: one waits, for all
#                │ depart: one is in a batch                                 │ (or several, if more like it have joined)
#                ▼                                                           │
#              it leads, all others follow and wait no more ── its batch is lost, or failed with others
#                │ end: computed, or failed
#                ▼
#              every follower has the same row or the same error
#
# So no sequence waits for the turn of another request: whichever comes first in a batch leads. A leader or follower
# whose request is over is left out: the batch is computed for the others. When a leader is lost, the one with the
# highest priority whose request still wants its row is queued again, and the others still follow.
#
# Flights stay within a tenant, unless the operator allows otherwise: a response that comes too soon tells a client that
# another has sent the same input. Vectors of each token are not shared.

Copy: TypeAlias = tuple[QueuedSequence, int]
"""A follower, and the position of its leader in the batch."""


class SingleFlight:
    def __init__(self, *, is_shared_by_tenants: bool = False) -> None:
        self._is_shared_by_tenants = is_shared_by_tenants
        self._flights: dict[tuple[str | None, Output, bytes, int], Flight] = {}
        self.unseated: list[Flight] = []
        """Flights whose followers may have nothing that waits for them."""

    def __len__(self) -> int:
        return len(self._flights)

    def join(self, tenant: str, sequences: list[QueuedSequence]) -> tuple[list[QueuedSequence], list[QueuedSequence]]:
        """Add sequences of one request. Returns those that are to be queued, and those that follow a leader."""
        if not sequences or sequences[0].output.is_per_token or sequences[0].output.spans_rows:
            return sequences, []
        flights, followers = self._flights, []
        shared_by = None if self._is_shared_by_tenants else tenant
        for sequence in sequences:
            key = (shared_by, sequence.output, sequence.token_ids, sequence.border)
            flight = flights.get(key)
            if flight is None:
                flights[key] = sequence.flight = Flight(key, sequence)
                continue
            sequence.flight = flight
            if flight.leader is None:
                flight.waiting[sequence] = None
            else:
                flight.followers.append(sequence)
                followers.append(sequence)
        if not followers:
            return sequences, followers
        following = set(followers)
        return [sequence for sequence in sequences if sequence not in following], followers

    def depart(self, sequences: list[QueuedSequence]) -> tuple[list[QueuedSequence], list[QueuedSequence]]:
        """Make one of each flight in a batch its leader. Returns the leaders, in order, and all their followers."""
        followers: list[QueuedSequence] = []
        for sequence in sequences:
            flight = sequence.flight
            if flight is None or flight.leader is not None:
                continue
            flight.leader = sequence
            waiting = flight.waiting
            if len(waiting) > 1 or flight.followers:
                waiting.pop(sequence, None)
                flight.followers += waiting
                followers += flight.followers
            waiting.clear()
        if not followers:
            return sequences, followers
        return [each for each in sequences if each.flight is None or each.flight.leader is each], followers

    def followers(self, sequence: QueuedSequence) -> list[QueuedSequence]:
        return [] if sequence.flight is None else sequence.flight.followers

    def copies(self, sequences: list[QueuedSequence]) -> list[Copy]:
        """End the flights of a batch that has been computed. Returns the followers that get a copy of a row."""
        copies: list[Copy] = []
        for position, sequence in enumerate(sequences):
            flight = sequence.flight
            if flight is None:
                continue
            del self._flights[flight.key]
            sequence.flight = None
            for follower in flight.followers:
                follower.flight = None
                if not follower.is_abandoned:
                    copies.append((follower, position))
        return copies

    def end(self, sequence: QueuedSequence) -> list[QueuedSequence]:
        """End the flight of a sequence that fails. Returns all that fail with it, itself included."""
        flight = sequence.flight
        if flight is None:
            return [sequence]
        del self._flights[flight.key]
        members = list(dict.fromkeys((sequence, *flight.followers, *flight.waiting)))
        for member in members:
            member.flight = None
        return members

    def seat(self, sequence: QueuedSequence) -> QueuedSequence | None:
        """The sequence that is to be queued again for one that was lost: itself, unless its request is over or one of a
        higher priority follows it; None when no request wants its row any more."""
        flight = sequence.flight
        if flight is None:
            return None if sequence.is_abandoned else sequence
        flight.leader = None
        flight.waiting.pop(sequence, None)
        for follower in flight.followers:
            follower.deaths = sequence.deaths
        return self._seat_one_of(flight, [sequence, *flight.followers])

    def drop(self, sequences: Iterable[QueuedSequence]) -> None:
        """Remove sequences of a request that is over. Their followers wait for `seat_unseated`."""
        for sequence in sequences:
            flight = sequence.flight
            if flight is None or sequence not in flight.waiting:
                continue
            sequence.flight = None
            del flight.waiting[sequence]
            if flight.followers:
                self.unseated.append(flight)
            elif not flight.waiting:
                del self._flights[flight.key]

    def seat_unseated(self) -> list[QueuedSequence]:
        """The sequences that are to be queued, one for each flight whose followers have lost the one that waited."""
        unseated, self.unseated = self.unseated, []
        return [
            seated
            for flight in dict.fromkeys(unseated)
            # It may have departed meanwhile, with another that was waiting.
            if flight.leader is None and self._flights.get(flight.key) is flight
            if (seated := self._seat_one_of(flight, flight.followers)) is not None
        ]

    def _seat_one_of(self, flight: Flight, candidates: list[QueuedSequence]) -> QueuedSequence | None:
        living = [sequence for sequence in candidates if not sequence.is_abandoned]
        if not living:
            flight.followers = []
            if not flight.waiting:
                del self._flights[flight.key]
            return None
        seated = min(living, key=lambda sequence: sequence.request_queue.priority)
        living.remove(seated)
        flight.followers = living
        flight.waiting[seated] = None
        return seated


# Decides which inputs are the cause of workers' deaths.
#
# An input is struck off as soon as it has been computed. Lost batches have harmless inputs, too: workers also die of a
# kill from outside, or because other programs used up the memory. So a rejection needs deaths that are evidence:
#
#     in a batch with others,   little evidence: from the second death on, the input runs in an isolated batch
#     or a worker that was
#     stopped (SIGSTOP)
#     isolated, a crash         (SIGSEGV and the like, for a fault: workers outlive those that a process sends) rejected
#                               at the third death
#     isolated, another death   (SIGKILL, which the kernel also sends when memory runs out; SIGABRT; a hang) rejected at
#                               the fifth death, if the last three were isolated and no other worker has died
#                               between them
#
# Workers that are killed from outside die with other inputs as often as with this one, so deaths in between make the
# others weak evidence. So that two such inputs cannot protect each other for ever, the eighth isolated death is
# enough in any case: an input is rejected after five deaths at most, and after ten while other workers die as well,
# or while each of two gateways has a copy. Gateways tell each other of deaths, so these are deaths in the whole
# server.
#
# Measured, 2 workers of which a random one was killed each second for a minute, on a busy machine: when any third
# death, isolated, led to a rejection, 27 of 618 harmless requests were rejected; when other batches had to be done
# between the three, 18 of 507; by this rule, 0 of 549.

_CRASHES = 3
_DEATHS, _IN_A_ROW = 5, 3
_ISOLATED = 8


def count_death(deaths: Deaths, *, is_isolated: bool, has_crashed: bool, num_worker_deaths: int) -> bool:
    """Count one more death; returns whether the input is to be rejected. `num_worker_deaths`: deaths of all workers
    that this gateway knows of, this one included."""
    deaths.num += 1
    has_other_died = num_worker_deaths > deaths.last_worker_death + 1
    deaths.last_worker_death = num_worker_deaths
    if not is_isolated:
        deaths.num_in_a_row = 0
        return False
    deaths.num_alone += 1
    deaths.num_in_a_row = 1 if has_other_died else deaths.num_in_a_row + 1
    if has_crashed and deaths.num >= _CRASHES:
        return True
    return deaths.num_alone >= _ISOLATED or (deaths.num >= _DEATHS and deaths.num_in_a_row >= _IN_A_ROW)


# Limits how much lost work is computed again: when workers die one after the other, it would become a second load
# beside the first, and would be lost again. So it is paid for by work that has been done.

_EARNED_PART = 0.5
"""Of each token done: a server in trouble spends at most a third of its time on work that it had begun before."""

_BATCHES_PER_WORKER = 16
"""May be lost at once without the failure of a request. A dying worker loses two batches at most."""


class RetryBudget:
    def __init__(self, max_batch_tokens: int) -> None:
        """Full, and for one worker."""
        self._tokens_per_worker = float(_BATCHES_PER_WORKER * max_batch_tokens)
        self._max_tokens = self.num_tokens = self._tokens_per_worker
        """Tokens that can be paid for now."""

    def make_room_for(self, num_workers: int) -> None:
        """Grow the budget to `num_workers`. It never shrinks: a worker's work is paid for after its death."""
        more_tokens = max(0.0, num_workers * self._tokens_per_worker - self._max_tokens)
        self._max_tokens += more_tokens
        self.num_tokens += more_tokens

    def earn(self, num_tokens: int) -> None:
        self.num_tokens = min(self._max_tokens, self.num_tokens + _EARNED_PART * num_tokens)

    def pay(self, num_tokens: int) -> bool:
        """Returns False, and pays nothing, when the budget is too small for all of the tokens."""
        if num_tokens > self.num_tokens:
            return False
        self.num_tokens -= num_tokens
        return True
