"""What a batch costs: how fast a worker is, and how many threads pay, learned from the times of batches.

Owns both estimates. Pure.
"""

from collections import defaultdict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from vecd.shm.output import FULL_BATCH_S

# A batch takes `overhead + tokens × per_token`: a line through the latest batches (least squares with exponential
# weights). Where their sizes do not differ, the line goes through the origin, which makes the worker look slower than
# it is.

_MEMORY = 0.95
"""Weight of all batches before, at each batch: the last twenty count for two thirds."""

_MIN_SPREAD = 0.05
"""Relative variance of the sizes, above which a slope can be told from noise."""

_MAX_TIMES_EXPECTED = 8.0
"""A batch counts for at most this many times the expected time, because a worker may have been stopped for a while. One
that stays slow is believed after a few batches."""

_FIRST_GUESS_TOKENS_PER_S = 5000.0
_MIN_PER_TOKEN_S = 1e-9

_MIN_BUDGET_TOKENS = 128

_TIMEOUT_FACTOR = 20.0
"""A batch may take this many times the expected time: the machine may be shared, the weights on a slow disk."""

_MIN_TIMEOUT_S = 2.0
"""Added to that: what stops a process for a moment stops it for less."""

_FIRST_BATCH_S = 10.0
"""Added for the first batch of a worker."""


class CostModel:
    def __init__(self, max_batch_tokens: int, first_tokens_per_s: float = _FIRST_GUESS_TOKENS_PER_S) -> None:
        """`first_tokens_per_s`: the speed, above 0, until a batch has been measured."""
        self._max_batch_tokens = max_batch_tokens
        self._w = self._x = self._y = self._xx = self._xy = 0.0
        self._largest_tokens = 0
        self._overhead_s = 0.0
        self._per_token_s = 1 / first_tokens_per_s
        self.tokens_per_s = self._full_speed()

    @property
    def is_learned(self) -> bool:
        """Something has been measured, on this worker or on the one that it was copied from."""
        return self._w > 0

    def observe(self, num_tokens: int, compute_s: float) -> None:
        self._largest_tokens = max(self._largest_tokens, num_tokens)
        compute_s = min(compute_s, _MAX_TIMES_EXPECTED * self.batch_s(num_tokens))
        self._w = self._w * _MEMORY + 1
        self._x = self._x * _MEMORY + num_tokens
        self._y = self._y * _MEMORY + compute_s
        self._xx = self._xx * _MEMORY + num_tokens * num_tokens
        self._xy = self._xy * _MEMORY + num_tokens * compute_s
        mean_x, mean_y = self._x / self._w, self._y / self._w
        variance = self._xx / self._w - mean_x * mean_x
        slope = 0.0
        if variance > _MIN_SPREAD * mean_x * mean_x:
            slope = (self._xy / self._w - mean_x * mean_y) / variance
        overhead = mean_y - slope * mean_x
        if slope <= 0 or overhead < 0:
            slope, overhead = mean_y / mean_x, 0.0
        self._per_token_s, self._overhead_s = max(slope, _MIN_PER_TOKEN_S), overhead
        self.tokens_per_s = self._full_speed()

    def batch_s(self, num_tokens: int) -> float:
        return self._overhead_s + num_tokens * self._per_token_s

    def deadline_s(
        self,
        num_tokens: int,
        *,
        limit_s: float,
        has_answered: bool = True,
        num_gateways: int = 1,
        max_sequence_tokens: int = 0,
    ) -> float:
        """Seconds that a batch of `num_tokens` may take before its worker counts as stuck; never above `limit_s`.

        `has_answered`: this worker itself has done a batch; the first one touches every page of the weights. With
        several gateways, a batch of each other one may come first: a full one, or a sequence of `max_sequence_tokens`.
        """
        if not self.is_learned:
            return limit_s
        longest_tokens = max(self.budget_tokens(FULL_BATCH_S), max_sequence_tokens)
        deadline_s = self._timeout_s(num_tokens) + (num_gateways - 1) * self._timeout_s(longest_tokens)
        return min(limit_s, deadline_s + (0.0 if has_answered else _FIRST_BATCH_S))

    def _timeout_s(self, num_tokens: int) -> float:
        """A batch larger than any seen is taken to be no cheaper by the token than the largest: the slope of small
        batches is mostly noise, and too short a deadline kills a healthy worker."""
        expected_s = self.batch_s(num_tokens)
        if num_tokens > self._largest_tokens:
            expected_s = max(expected_s, self.batch_s(self._largest_tokens) * num_tokens / self._largest_tokens)
        return _MIN_TIMEOUT_S + _TIMEOUT_FACTOR * expected_s

    def budget_tokens(self, batch_s: float) -> int:
        """Tokens of a batch that takes about `batch_s` seconds, at least _MIN_BUDGET_TOKENS where that is allowed."""
        fitting = int((batch_s - self._overhead_s) / self._per_token_s)
        return min(self._max_batch_tokens, max(_MIN_BUDGET_TOKENS, fitting))

    def _full_speed(self) -> float:
        budget = self.budget_tokens(FULL_BATCH_S)
        return budget / self.batch_s(budget)


# How many threads pay for a batch, learned from the times of batches.
#
# One thread is measured first. The next larger number that a worker offers is then tried, for as long as each pays.
# What is in use is compared with the next smaller number now and then. A number that takes twice as long as fewer
# threads is given up at once, and one that takes somewhat longer after two or three batches. It is tried again after 4
# batches of its class, then 16, 64 and so on: the reason may have been another program.
#
# Quiet moments (`vecd.gateway.scheduling.cores`) and busy ones are learned apart. Beside clients, the gateway and other
# batches, threads often do not pay that do where a batch is alone.

_WEIGHT = 0.3
"""Of the newest batch in an estimate: the last few count."""

_PAYS = 0.92
"""More threads are used where a batch takes at most this part of the time that fewer need."""

_SLOWER = 2.0
"""A batch that takes more than this many times what fewer threads need shows that the machine is not ours."""

_UNUSUAL = 1.2
"""A batch that takes more than this many times what is usual is slow."""

_MAX_DOUBTED = 2
"""Slow batches in a row that are not believed while their number of tokens is new: torch compiles kernels for each."""

_MAX_SIZES = 4096

_ENOUGH = 3
"""Batches in a row of which the least is believed: the first ones also start threads, and wake them on another core."""

_FIRST_RETRY, _LAST_RETRY, _RETRY_GROWTH = 4, 512, 4
"""Batches of a class until what did not pay is tried again: at first, at most, and by which factor it grows. In the end
3 of 515 batches are tries, which no 99th percentile shows."""

_COMPARE_AFTER = 128
"""Batches of a class until fewer threads are tried again, although more pay."""

_OVERHEAD_TOKENS = 10
"""A batch takes as long as one with this number of tokens more, if tokens alone took time: all-MiniLM-L6-v2 and
BERT-base in float32, one core with AVX-512. Compares batches of one class, so it need not be exact."""


@dataclass
class _Estimate:
    """Of one number of threads in one class."""

    per_token_s: float = 0.0
    num: int = 0
    """Batches measured since it was given up last."""
    try_at: int = 0
    """The class's number of batches from which on it is tried again."""
    retry_after: int = _FIRST_RETRY
    _sizes: set[int] = field(default_factory=set)
    """Numbers of tokens that have been computed."""
    _num_doubted: int = 0

    def doubts(self, num_tokens: int, per_token_s: float) -> bool:
        """Whether a batch says nothing, because it is slow and the first of its size."""
        is_new = num_tokens not in self._sizes
        if len(self._sizes) < _MAX_SIZES:
            self._sizes.add(num_tokens)
        if self.num and is_new and per_token_s > _UNUSUAL * self.per_token_s and self._num_doubted < _MAX_DOUBTED:
            self._num_doubted += 1
            return True
        self._num_doubted = 0
        return False

    def add(self, per_token_s: float) -> None:
        if self.num > 0:
            weight = _WEIGHT if self.num >= _ENOUGH else float(per_token_s < self.per_token_s)
            per_token_s = self.per_token_s + weight * (per_token_s - self.per_token_s)
        self.per_token_s = per_token_s
        self.num += 1

    def put_off(self, now: int) -> None:
        self.try_at = now + self.retry_after
        self.retry_after = min(_LAST_RETRY, _RETRY_GROWTH * self.retry_after)


class _SizeClass:
    """Batches of 2^n to 2^(n+1) − 1 tokens."""

    def __init__(self) -> None:
        self.num_batches = 0
        self.by_threads: defaultdict[int, _Estimate] = defaultdict(_Estimate)

    def best(self, choices: Sequence[int]) -> int:
        """A larger number only where it clearly pays."""
        best, *more = choices
        for num_threads in more:
            estimate = self.by_threads.get(num_threads)
            if estimate is None or estimate.num < _ENOUGH:
                break
            if estimate.per_token_s <= _PAYS * self.by_threads[best].per_token_s:
                best = num_threads
        return best


class ThreadModel:
    def __init__(self) -> None:
        self._classes: dict[tuple[int, bool], _SizeClass] = {}

    def choose(self, num_tokens: int, choices: Sequence[int], *, is_quiet: bool) -> int:
        """One of `choices`, the numbers of threads that a batch of `num_tokens` may have now, the least first."""
        size_class = self._class_of(num_tokens, is_quiet)
        best = size_class.best(choices)
        if size_class.by_threads[best].num < _ENOUGH:
            return best
        at = choices.index(best)
        for other in (at + 1, at - 1):
            if 0 <= other < len(choices) and size_class.num_batches >= size_class.by_threads[choices[other]].try_at:
                return choices[other]
        return best

    def observe(self, num_tokens: int, num_leased: int, num_threads: int, compute_s: float, *, is_quiet: bool) -> None:
        """A batch with a lease of `num_leased` cores took the worker `compute_s` with `num_threads`."""
        size_class = self._class_of(num_tokens, is_quiet)
        size_class.num_batches = now = size_class.num_batches + 1
        if num_threads < num_leased:
            size_class.by_threads[num_leased].put_off(now)
        estimate = size_class.by_threads[num_threads]
        per_token_s = compute_s / (num_tokens + _OVERHEAD_TOKENS)
        if estimate.doubts(num_tokens, per_token_s):
            return
        estimate.add(per_token_s)
        fewer = [other.per_token_s for num, other in size_class.by_threads.items() if num < num_threads and other.num]
        least = min(fewer, default=0.0)
        is_slow = bool(least) and per_token_s > _SLOWER * least
        if estimate.num < _ENOUGH and not is_slow:
            return
        if not is_slow and (not least or estimate.per_token_s <= _PAYS * least):
            estimate.retry_after = _FIRST_RETRY
            estimate.try_at = now + _COMPARE_AFTER
        else:
            estimate.num = 0
            estimate.put_off(now)

    def best(self, num_tokens: int, choices: Sequence[int], *, is_quiet: bool) -> int:
        """As `choose`, tries apart."""
        return self._class_of(num_tokens, is_quiet).best(choices)

    def speedup(self, num_tokens: int, num_threads: int, *, is_quiet: bool) -> float:
        """How many times as fast such a batch is as with one thread; 1 until that has been measured."""
        size_class = self._class_of(num_tokens, is_quiet)
        if num_threads == 1:
            return 1.0
        one, many = size_class.by_threads[1], size_class.by_threads[num_threads]
        is_known = one.num >= _ENOUGH and many.num >= _ENOUGH
        return one.per_token_s / many.per_token_s if is_known and many.per_token_s else 1.0

    def describe(self) -> list[dict[str, Any]]:
        """For `/info`."""
        return [
            {
                "from_tokens": 2 ** (bits - 1),
                "quiet": is_quiet,
                "threads": num_threads,
                "us_per_token": round(estimate.per_token_s * 1e6, 1),
            }
            for (bits, is_quiet), size_class in sorted(self._classes.items(), key=itemgetter(0))
            for num_threads, estimate in sorted(size_class.by_threads.items())
            if estimate.per_token_s
        ]

    def _class_of(self, num_tokens: int, is_quiet: bool) -> _SizeClass:
        """Busy moments begin with what is known of quiet ones, but not the other way round."""
        key = (num_tokens.bit_length(), is_quiet)
        found = self._classes.get(key)
        if found is None:
            found = self._classes[key] = _SizeClass() if is_quiet else deepcopy(self._class_of(num_tokens, True))
        return found
