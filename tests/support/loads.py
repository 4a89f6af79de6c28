"""A load of `vecd bench` that is described and not sent."""

from typing import Any

from vecd.client.bench.load import Load
from vecd.client.connection import Target


def make_load(**fields: Any) -> Load:
    """Of four clients, unless `fields` have a rate. Its server is not there."""
    defaults = {"clients": 0 if "rate_per_s" in fields else 4, "texts_per_request": 1}
    target = Target("localhost", 1, None)
    return Load(
        **{
            **defaults,
            "target": target,
            "requests": [],
            "warmup_s": 2.0,
            "duration_s": 10.0,
            "timeout_s": 1.0,
            **fields,
        }
    )
