"""A load of `vecd bench` that is described and not sent."""

from vecd.base.target import Target
from vecd.client.bench.load import Load, RequestShape


def make_load(rate_per_s: float | None = None, goodput_ms: float | None = None) -> Load:
    """Of four clients, unless it has a rate. Its server is not there."""
    return Load(
        target=Target("localhost", 1, None),
        shape=RequestShape(),
        requests=[],
        clients=4 if rate_per_s is None else 0,
        rate_per_s=rate_per_s,
        goodput_ms=goodput_ms,
        warmup_s=2.0,
        duration_s=10.0,
        timeout_s=1.0,
    )
