"""How many gateways a server needs: the rule of `--gateways auto`, and of `vecd check`'s recommendation.

Owns the rule and its constants. Pure. Called by `vecd.launch.config.plan` and `vecd.launch.check.advice`.
"""

import math

GATEWAY_S_PER_REQUEST = 300e-6
"""Processor time of the gateway for one short text. Measured with the real model, whose workers share the caches, and
64 clients on two cores: 292 µs (docs/log.md)."""

GATEWAY_SHARE = 0.6
"""The share of a core that one gateway should use; above it, responses wait for each other."""

MAX_GATEWAYS = 64


def needed_gateways(texts_per_s: float) -> int:
    """The fewest gateways of which none uses more than GATEWAY_SHARE of a core, if all workers together compute
    `texts_per_s` short texts, one per request."""
    return max(1, min(MAX_GATEWAYS, math.ceil(texts_per_s * GATEWAY_S_PER_REQUEST / GATEWAY_SHARE)))


def choose_num_gateways(texts_per_s: float | None, num_cores: int) -> tuple[int, str]:
    """The number for `--gateways auto`, and why. `texts_per_s`: what all workers compute, None if that is not known;
    `num_cores`: those that the server may use, at most half of which are for gateways."""
    if texts_per_s is None:
        return 1, "the speed of the workers is measured now and known at the next start"
    needed, most = needed_gateways(texts_per_s), max(1, num_cores // 2)
    reason = f"for {texts_per_s:,.0f} short texts/s of the workers"
    return (needed, reason) if needed <= most else (most, f"half of {num_cores} cores, {reason}")
