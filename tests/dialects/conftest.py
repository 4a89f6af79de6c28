"""One server without a model for all tests of dialects: its vectors are made up, and the same everywhere."""

from collections.abc import Iterator

import pytest
from serving import Server, running_server

from gateway.request import Overflow
from gateway.served import Served


@pytest.fixture(scope="session")
def weightless() -> Iterator[Server]:
    with running_server("--engine", "weightless", "--workers", "1") as server:
        yield server


@pytest.fixture
def served() -> Served:
    """A model without prompts, under any name; tests replace what they are about."""
    return Served(
        model="all-MiniLM-L6-v2",
        aliases=(),
        is_strict=False,
        dim=384,
        hidden_size=384,
        max_tokens=256,
        is_normalized=True,
        is_matryoshka=False,
        matryoshka_dims=(),
        pools_prompt=True,
        model_type="bert",
        pooling=("mean",),
        max_inputs=2048,
        max_request_tokens=None,
        max_body_bytes=64 * 1024 * 1024,
        max_batch_tokens=2048,
        max_requests=4096,
        overflow=Overflow.TRUNCATE,
        compute_type="cpu",
        version="1.2.3",
        created_at=0,
    )
