"""What of a configuration makes a reload replace a model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from vecd.gateway.config import ApiKey
from vecd.launch.config.plan import Plan
from vecd.launch.reload import serves_the_same

CERT, RANGES = ("/cert.pem", 1, 2, 3), ("/ranges.npy", 1, 2, 3)


@pytest.fixture
def served(planned: Callable[..., Plan]) -> Plan:
    plan = planned("--workers", "2")
    gateway = replace(plan.gateway, tls_cert=Path("/cert.pem"), tls_key=Path("/key.pem"))
    return replace(plan, gateway=gateway, other_files=frozenset({CERT, RANGES}))


def test_a_plan_of_the_same_configuration_is_the_same(served: Plan, planned: Callable[..., Plan]) -> None:
    again = planned("--workers", "2", "--ready-fd", "9")
    again = replace(again, gateway=replace(again.gateway, tls_cert=Path("/cert.pem"), tls_key=Path("/key.pem")))
    again = replace(again, other_files=served.other_files)
    assert serves_the_same(served, again, is_first=True)
    keys = (ApiKey("first", "0" * 64),)
    tokenizer = replace(again.gateway.card, tokenizer_file="/proc/1/fd/99")
    again = replace(again, gateway=replace(again.gateway, keys=keys, card=tokenizer))
    config = replace(again.gateway, query_weights="/proc/1/fd/98", ranges="/proc/1/fd/97")
    again = replace(again, gateway=config)
    assert serves_the_same(served, again, is_first=True), "every generation gets new keys and new copies"


def test_a_certificate_concerns_the_first_model_alone(served: Plan) -> None:
    renewed = replace(served, other_files=frozenset({("/cert.pem", 9, 2, 3), RANGES}))
    assert not serves_the_same(served, renewed, is_first=True)
    assert serves_the_same(served, renewed, is_first=False)
    gone = replace(served, other_files=frozenset({CERT}))
    assert not serves_the_same(served, gone, is_first=False)


def test_whatever_else_differs_is_a_change(served: Plan) -> None:
    gateway, settings = served.gateway, served.settings
    changed = {
        "aliases": replace(served, gateway=replace(gateway, aliases=("other",))),
        "place": replace(served, gateway=replace(gateway, first_worker=2)),
        "policy": replace(served, gateway=replace(gateway, unknown_model="default")),
        "worker": replace(served, workers=[replace(served.workers[0], dtype="int8"), served.workers[1]]),
        "number": replace(served, workers=served.workers[:1]),
        "card": replace(served, card=replace(served.card, max_tokens=7)),
        "files": replace(served, model_files=frozenset()),
        "start timeout": replace(served, settings=replace(settings, start_timeout=7.0)),
    }
    assert [name for name, plan in changed.items() if serves_the_same(served, plan, is_first=False)] == []
