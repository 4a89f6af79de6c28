"""How many threads pay for a batch, learned from the times of batches.

Owns the estimates, by size class and number of threads. Pure. `vecd.gateway.dispatch.dispatcher` asks before it sends a
batch and reports how long the batch took.

One thread is measured first. The next larger number that a worker offers is then tried, for as long as each pays. What
is in use is compared with the next smaller number now and then. A number that takes twice as long as fewer threads,
even once, is given up at once, and one that takes somewhat longer after two or three batches. It is tried again after 4
batches of its class, then 16, 64 and so on: the reason may have been another program.

Quiet moments (`vecd.gateway.scheduling.cores`) and busy ones are learned apart. Beside clients, the gateway and other
batches, threads often do not pay that do where a batch is alone.
"""

from collections.abc import Sequence
from copy import deepcopy
from operator import itemgetter
from typing import Any

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
"""Batches of a class until what did not pay is tried again: at first, at most, and by which factor it grows. At most 3
of 515 batches are tries then, so that no 99th percentile shows them."""

_COMPARE_AFTER = 128
"""Batches of a class until fewer threads are tried again, although more pay."""

_OVERHEAD_TOKENS = 10
"""A batch takes as long as one with so many more tokens, if tokens alone took time: all-MiniLM-L6-v2 and BERT-base in
float32, one core with AVX-512. Compares batches of one class, so it need not be exact."""


class _Estimate:
    """Of one number of threads in one class."""

    __slots__ = ("_num_doubted", "_sizes", "num", "per_token_s", "retry_after", "try_at")

    def __init__(self) -> None:
        self.per_token_s = 0.0
        self.num = 0
        """Batches measured since it was given up last."""
        self.try_at = 0
        """The class's number of batches from which on it is tried again."""
        self.retry_after = _FIRST_RETRY
        self._sizes: set[int] = set()
        """Numbers of tokens that have been computed."""
        self._num_doubted = 0

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
        """It has not paid, or could not be had."""
        self.try_at = now + self.retry_after
        self.retry_after = min(_LAST_RETRY, _RETRY_GROWTH * self.retry_after)


class _SizeClass:
    """Batches of 2^n to 2^(n+1) − 1 tokens."""

    def __init__(self) -> None:
        self.num_batches = 0
        self.by_threads: dict[int, _Estimate] = {}

    def of(self, num_threads: int) -> _Estimate:
        found = self.by_threads.get(num_threads)
        if found is None:
            found = self.by_threads[num_threads] = _Estimate()
        return found

    def best(self, choices: Sequence[int]) -> int:
        """A larger number only where it clearly pays."""
        best, *more = choices
        for num_threads in more:
            estimate = self.by_threads.get(num_threads)
            if estimate is None or estimate.num < _ENOUGH:
                break
            if estimate.per_token_s <= _PAYS * self.of(best).per_token_s:
                best = num_threads
        return best


class ThreadModel:
    def __init__(self) -> None:
        self._classes: dict[tuple[int, bool], _SizeClass] = {}

    def choose(self, num_tokens: int, choices: Sequence[int], *, is_quiet: bool) -> int:
        """One of `choices`, the numbers of threads that a batch of `num_tokens` may have now, the least first."""
        size_class = self._class_of(num_tokens, is_quiet)
        best = size_class.best(choices)
        if size_class.of(best).num < _ENOUGH:
            return best
        at = choices.index(best)
        if at + 1 < len(choices) and size_class.num_batches >= size_class.of(choices[at + 1]).try_at:
            return choices[at + 1]
        if at > 0 and size_class.num_batches >= size_class.of(choices[at - 1]).try_at:
            return choices[at - 1]
        return best

    def observe(self, num_tokens: int, num_leased: int, num_threads: int, compute_s: float, *, is_quiet: bool) -> None:
        """Learn that a batch with a lease of `num_leased` cores took the worker `compute_s` with `num_threads`."""
        size_class = self._class_of(num_tokens, is_quiet)
        size_class.num_batches = now = size_class.num_batches + 1
        if num_threads < num_leased:
            size_class.of(num_leased).put_off(now)
        estimate = size_class.of(num_threads)
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
        """The number of threads that such a batch has, tries apart."""
        return self._class_of(num_tokens, is_quiet).best(choices)

    def speedup(self, num_tokens: int, num_threads: int, *, is_quiet: bool) -> float:
        """How many times as fast such a batch is as with one thread; 1 until that has been measured."""
        size_class = self._class_of(num_tokens, is_quiet)
        if num_threads == 1:
            return 1.0
        one, many = size_class.of(1), size_class.of(num_threads)
        is_known = one.num >= _ENOUGH and many.num >= _ENOUGH
        return one.per_token_s / many.per_token_s if is_known and many.per_token_s else 1.0

    def describe(self) -> list[dict[str, Any]]:
        """For `/info`: what has been learned, by class, moment and number of threads."""
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
