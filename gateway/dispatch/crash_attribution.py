"""Decides which inputs are the cause of workers' deaths. Pure.

Owns the rule; the deaths on which it rests are kept by input (`vecd.gateway.dispatch.known_inputs`) and not by request,
so it also finds an input whose client never waits for the end and sends it again and again. An input is struck
off as soon as it has been computed. A worker may die of its input, but also of a kill from outside, or because other
programs used up the memory; then harmless inputs are in the batches that are lost. A rejection costs the client the
response, and everybody who sends the same input for a while, so it needs deaths that are evidence:

    in a batch with others    little evidence: from the second death on, the input runs in an isolated batch
    isolated, a crash         (SIGSEGV and the like, for a fault: workers outlive those that a process sends) rejected
                              at the third death
    isolated, another death   (SIGKILL, which the kernel also sends when memory runs out; SIGABRT; a hang) rejected at
                              the fifth death, if the last three were isolated and no other worker has died between them

Workers that are killed from outside die with other inputs, or with none, as often as with this one; that is why deaths
in between make the others weak evidence. So that two such inputs cannot protect each other for ever, the eighth
isolated death is enough in any case. An input of which one copy is computed at a time is therefore rejected after five
deaths at most, and after ten while other workers die as well, or while each of two gateways has a copy. Gateways tell
each other of deaths, so these are deaths in the whole server.

Measured, 2 workers of which a random one was killed each second for a minute, on a busy machine: when any third death,
isolated, led to a rejection, 27 of 618 harmless requests were rejected; when other batches had to be done between the
three, 18 of 507; by this rule, 0 of 549. Called by `vecd.gateway.dispatch.dispatcher`.
"""

from vecd.gateway.scheduling.queue import Deaths

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
