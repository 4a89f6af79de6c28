"""Computes identical sequences once: those with the same token ids and the same output that wait at the same time.

Owns the index of flights, and the rule on which sequence is computed for all others of its flight. Counts nothing and
sends nothing. Pure. Called by `vecd.gateway.dispatch.dispatcher`, and by the batching policy when a request is over.

Life of a flight::

    join ──► all wait, each in the queue of its own request ◄──────────────┐ seat: one waits, for all
               │ depart: one is in a batch                                 │ (or several, if more like it have joined)
               ▼                                                           │
             it leads, all others follow and wait no more ── its batch is lost, or failed with others
               │ end: computed, or failed
               ▼
             every follower has the same row or the same error

So no sequence waits for the turn of another request: whichever comes first in a batch leads. One that joins while
another leads follows at once. A leader or follower whose request is over is only left out: the batch is computed for
the others. When a leader is lost, the one of its flight with the highest priority whose request still wants its row is
queued again, and the others still follow; the input's deaths are counted for all of them together.

Flights stay within a tenant, unless the operator allows otherwise: a response that comes too soon tells a client that
another has sent the same input. Vectors of each token are not shared. An index holds only sequences that wait or that
a worker has: `drop`, `end`, `copies` and `seat` take them out.
"""

from collections.abc import Iterable
from typing import TypeAlias

from vecd.gateway.scheduling.queue import Flight, QueuedSequence
from vecd.shm.output import Output

_Key: TypeAlias = tuple[str | None, Output, bytes, int]

Copy: TypeAlias = tuple[QueuedSequence, int]
"""A follower, and the position of its leader in the batch."""


class SingleFlight:
    def __init__(self, *, is_shared_by_tenants: bool = False) -> None:
        self._is_shared_by_tenants = is_shared_by_tenants
        self._flights: dict[_Key, Flight] = {}
        self._unseated: list[Flight] = []
        """Flights whose followers may have nothing that waits for them."""

    def __len__(self) -> int:
        """Different sequences that wait or that workers have."""
        return len(self._flights)

    @property
    def has_unseated(self) -> bool:
        return bool(self._unseated)

    def join(self, tenant: str, sequences: list[QueuedSequence]) -> tuple[list[QueuedSequence], list[QueuedSequence]]:
        """Add new sequences of one request. Returns those that are to be queued, and those that follow one that a
        worker has."""
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
        """Make one of each flight in a batch its leader. Returns the leaders, in the batch's order, and all their
        followers, which need no batch any more."""
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
        """Those that follow it."""
        return [] if sequence.flight is None else sequence.flight.followers

    def copies(self, sequences: list[QueuedSequence]) -> list[Copy]:
        """End the flights of a batch's sequences, which have been computed. Returns the followers that get a copy of a
        row."""
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
        """End the flight of a sequence that fails. Returns all that are identical to it, itself included: they fail
        with it."""
        flight = sequence.flight
        if flight is None:
            return [sequence]
        del self._flights[flight.key]
        members = list(dict.fromkeys((sequence, *flight.followers, *flight.waiting)))
        for member in members:
            member.flight = None
        return members

    def seat(self, sequence: QueuedSequence) -> QueuedSequence | None:
        """The sequence that is to be queued again for one that was lost; None when no request wants its row any more.

        It is the lost one, unless its request is over or one of a higher priority follows it.
        """
        flight = sequence.flight
        if flight is None:
            return None if sequence.is_abandoned else sequence
        flight.leader = None
        flight.waiting.pop(sequence, None)
        for follower in flight.followers:
            follower.deaths = sequence.deaths
        return self._seat_one_of(flight, [sequence, *flight.followers])

    def drop(self, sequences: Iterable[QueuedSequence]) -> None:
        """Remove sequences of a request that is over from the queue. Their followers, if they have any, are `unseated`
        until `seat_unseated`."""
        for sequence in sequences:
            flight = sequence.flight
            if flight is None or sequence not in flight.waiting:
                continue
            sequence.flight = None
            del flight.waiting[sequence]
            if flight.followers:
                self._unseated.append(flight)
            elif not flight.waiting:
                del self._flights[flight.key]

    def seat_unseated(self) -> list[QueuedSequence]:
        """The sequences that are to be queued, one for each flight whose followers have lost the one that waited for
        them."""
        unseated, self._unseated = self._unseated, []
        seated = [
            self._seat_one_of(flight, flight.followers)
            for flight in dict.fromkeys(unseated)
            # It may have departed meanwhile, with another that was waiting.
            if flight.leader is None and self._flights.get(flight.key) is flight
        ]
        return [sequence for sequence in seated if sequence is not None]

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
