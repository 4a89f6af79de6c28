"""What every server is asked to do: the workloads, as a table.

Owns their names, shapes and lengths, and how long all of it takes. Sends nothing. Called by `benchmarks.compare`.

Tokens are those of all-MiniLM-L6-v2's tokenizer on the texts of `vecd.client.bench.texts`, [CLS] and [SEP] included,
cut at 256.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vecd.base.target import parse_target
from vecd.client.bench.load import Load, RequestShape, render_requests
from vecd.client.bench.texts import Lengths

SHORT = Lengths(10)
"""14.4 tokens on average."""
MIXED = Lengths(86, 0.8)
"""100.1 tokens on average, median 80; 7 % of the texts are longer than the model takes."""
LONG = Lengths(101)
"""127.6 tokens on average."""
TOKENS_PER_TEXT = {"short": 14.4, "mixed": 100.1}
"""To turn texts into tokens: not every server counts them, and one counts characters."""

_TIMEOUT_S = 60.0
_MAX_CONNECTIONS = 4096
"""So that an open loop over a server's capacity is the server's trouble, not the generator's."""
_BULK_CLIENTS, _BULK_TEXTS, _NUM_BULK_REQUESTS = 2, 512, 4
CAPACITY = "short-256"
"""The workload whose rate is a server's capacity, of which the curve's rates are shares."""
_REST_S = 2.0
"""vecd's workers give memory back after a second without a batch."""
_START_S = 14.0
"""To start a server, ask it whether its vectors are right, and stop it: about what those with torch take here."""
_DRAIN_S = 8.0
"""What may come on top of an overload: answers that are waited for after the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One run of the load generator."""

    name: str
    group: str
    """What `--workloads` names."""
    title: str
    """For readers."""
    lengths: Lengths = SHORT
    texts_per_request: int = 1
    clients: int = 0
    """Of a closed loop: each asks again when it is answered."""
    rate_per_s: float | None = None
    """Of an open loop: so many requests a second, at random moments (Poisson)."""
    capacity_share: float | None = None
    """Of an open loop whose rate is this share of the server's own at `CAPACITY`."""
    has_bulk: bool = False
    """Two closed-loop clients with 512 texts of 128 tokens beside it."""
    length_factor: float = 1.0
    """Of the measured time, to `--duration`."""
    warmup_s: float = 2.0
    rest_s: float = 0.0
    """Between the run and the look at the server's memory: what it gives back within this is not counted."""
    max_rounds: int | None = None
    """For what takes long: it is measured in the first so many rounds; None in all."""

    @property
    def has_long_texts(self) -> bool:
        """Some are longer than the model takes, which not every server cuts."""
        return self.lengths is MIXED

    def estimate_s(self, duration_s: float) -> float:
        is_overload = self.has_bulk or (self.capacity_share or 0) > 1
        return self.warmup_s + self.length_factor * duration_s + self.rest_s + (_DRAIN_S if is_overload else 0.5)


def _short(clients: int, group: str = "short", warmup_s: float = 2.0, rest_s: float = 0.0) -> Workload:
    title = f"short texts, {clients} client{'s' * (clients > 1)}"
    return Workload(
        name=f"short-{clients}", group=group, title=title, clients=clients, warmup_s=warmup_s, rest_s=rest_s
    )


WORKLOADS: Sequence[Workload] = (
    _short(1),
    _short(16),
    _short(256),
    # Growth is from one of these to the next, in requests and in memory. After 256 clients, so that the sizes of the
    # batches are not new to the engines: what oneDNN compiles for each stays, and is not the clients' doing.
    _short(64, rest_s=_REST_S),
    _short(640, group="growth", warmup_s=4.0, rest_s=_REST_S),
    Workload(
        name="mixed",
        group="mixed",
        title="mixed lengths",
        lengths=MIXED,
        texts_per_request=8,
        clients=32,
        # 256 texts are under way, and the slowest servers need about ten seconds for so many: what is measured has to
        # be longer than that, and begin after the first of them.
        length_factor=5.0,
        warmup_s=8.0,
    ),
    *(
        Workload(
            name=f"curve-{share:g}",
            group="curve",
            title=f"short texts at {share:g} of the capacity",
            capacity_share=share,
            warmup_s=1.0,
            max_rounds=1,
        )
        for share in (0.25, 0.5, 0.75, 0.9, 1.0, 1.25)
    ),
    Workload(
        name="interactive",
        group="interactive",
        title="interactive, alone",
        rate_per_s=20.0,
        length_factor=2.5,
        max_rounds=3,
    ),
    # Last: who does not notice that a client has left goes on with its bulk.
    Workload(
        name="interactive-bulk",
        group="interactive",
        title="interactive, under bulk",
        rate_per_s=20.0,
        has_bulk=True,
        length_factor=3.5,
        warmup_s=4.0,
        max_rounds=3,
    ),
)
TITLES = {workload.name: workload.title for workload in WORKLOADS}
GROUPS = tuple(dict.fromkeys(workload.group for workload in WORKLOADS))
_NEEDS = {"curve": {CAPACITY}, "growth": {"short-64", CAPACITY}}
"""What else has to run for a group to make sense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which servers do what, how long and how often."""

    servers: Sequence[str]
    """Of `benchmarks.recipes.SERVERS`, in the order of their turns."""
    groups: Sequence[str]
    num_rounds: int
    duration_s: float
    is_quick: bool = False
    """For a look whether everything works: short warm-ups too. Its figures mean little."""

    def workloads(self, round_number: int) -> list[Workload]:
        """Those of a round, counted from 1, in their order."""
        needed = set().union(*(_NEEDS.get(group, set()) for group in self.groups))
        chosen = [one for one in WORKLOADS if one.group in self.groups or one.name in needed]
        due = [one for one in chosen if one.max_rounds is None or round_number <= one.max_rounds]
        return [replace(one, warmup_s=one.warmup_s / 2, rest_s=0.0) for one in due] if self.is_quick else due

    def estimate_s(self) -> float:
        """Of everything, if every server that is planned is here and nothing needs to be installed."""
        rounds = [self.workloads(number) for number in range(1, self.num_rounds + 1)]
        of_servers = sum(_START_S + sum(one.estimate_s(self.duration_s) for one in workloads) for workloads in rounds)
        return len(self.servers) * of_servers + self.num_rounds * self.estimate_offline_s()

    def estimate_offline_s(self) -> float:
        """Of the engine alone, in both number formats."""
        return 2 * (8.0 + 2 * self.offline_s)

    @property
    def offline_s(self) -> float:
        """How long the engine is measured on each work."""
        return self.duration_s / 2


def make_load(workload: Workload, url: str, duration_s: float, capacity_per_s: float | None) -> Load:
    """`capacity_per_s`: the server's rate at `CAPACITY`. Raises ValueError when the curve is asked for without it."""
    rate_per_s = workload.rate_per_s
    if workload.capacity_share is not None:
        if not capacity_per_s:
            raise ValueError(f"{workload.name} needs a rate of {CAPACITY}")
        rate_per_s = workload.capacity_share * capacity_per_s
    target = parse_target(url)
    shape = RequestShape(lengths=workload.lengths, texts_per_request=workload.texts_per_request)
    load = Load(
        target=target,
        shape=shape,
        requests=render_requests(target, shape),
        clients=workload.clients,
        rate_per_s=rate_per_s,
        max_connections=_MAX_CONNECTIONS,
        warmup_s=workload.warmup_s,
        duration_s=workload.length_factor * duration_s,
        timeout_s=_TIMEOUT_S,
    )
    return replace(load, bulk=_make_bulk(load)) if workload.has_bulk else load


def _make_bulk(load: Load) -> Load:
    shape = RequestShape(lengths=LONG, texts_per_request=_BULK_TEXTS)
    requests = render_requests(load.target, shape, _NUM_BULK_REQUESTS)
    return replace(load, shape=shape, requests=requests, clients=_BULK_CLIENTS, rate_per_s=None)
