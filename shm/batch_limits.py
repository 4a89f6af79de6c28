"""How large a batch is at most: in tokens where nothing else is configured, and in seconds once a worker is known.

It is here because gateways size batches by it, and workers and `vecd check` measure with batches of the same size.
"""

MAX_BATCH_TOKENS = 2048
"""On a processor."""

MAX_BATCH_TOKENS_ON_GPU = 32_768
"""A guess: not measured on any GPU yet."""

FULL_BATCH_S = 0.25
"""Of a worker's own speed, for a batch that only its own requests wait for: nothing is gained by larger ones."""
