"""Sequences that workers have died of run alone, however they come to the policy."""

import asyncio

import pytest

from vecd.gateway.encoding.pending import PendingResult
from vecd.gateway.scheduling.policy import BatchingPolicy
from vecd.gateway.scheduling.queue import Deaths, QueuedSequence, RequestQueue
from vecd.gateway.types.request import Priority, TokenizedInput

NOW = 100.0


@pytest.fixture
def policy():
    return BatchingPolicy(1000, 100, 100)


@pytest.fixture
def request_queue(policy):
    loop = asyncio.new_event_loop()
    yield RequestQueue(PendingResult(3, (), loop), Priority.NORMAL)
    loop.close()


def make_sequences(request_queue: RequestQueue, *nums_deaths: int) -> list[QueuedSequence]:
    sequences = [QueuedSequence(request_queue, n, TokenizedInput(b"", 10, False)) for n in range(len(nums_deaths))]
    for sequence, num in zip(sequences, nums_deaths, strict=True):
        sequence.deaths = Deaths(num) if num else None
    return sequences


def take_all(policy: BatchingPolicy) -> list[list[QueuedSequence]]:
    batches = []
    while policy.queued_sequences:
        batches.append(policy.take(NOW, 1000).sequences)
    return batches


def test_a_known_suspect_of_a_new_request_is_isolated(policy, request_queue):
    first, suspect, last = sequences = make_sequences(request_queue, 1, 2, 0)
    policy.add(request_queue, sequences, NOW)
    assert (policy.queued_sequences, policy.queued_tokens, policy.queued_rows) == (3, 30, 3)
    assert take_all(policy) == [[suspect], [first, last]]
    assert (policy.queued_sequences, policy.queued_tokens, policy.queued_rows) == (0, 0, 0)


def test_of_a_lost_batch_each_suspect_is_isolated_and_the_rest_goes_first(policy, request_queue):
    sequences = make_sequences(request_queue, 0, 0, 0)
    policy.add(request_queue, sequences, NOW)
    [lost] = take_all(policy)
    for sequence in lost[:2]:
        sequence.deaths = Deaths(2)
    policy.put_back(lost)
    assert take_all(policy) == [[sequences[1]], [sequences[2]], [sequences[0]]]


def test_an_isolated_sequence_has_waited_since_its_request_came(policy, request_queue):
    policy.add(request_queue, make_sequences(request_queue, 2), NOW)
    assert policy.oldest_wait_s(NOW + 3) == 3
