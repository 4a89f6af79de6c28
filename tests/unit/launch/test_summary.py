"""The line to try a new server with."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vecd.launch.config.plan import Plan, make_plan
from vecd.launch.config.settings import load_settings
from vecd.launch.summary import summary

_CERT = {"tls_cert": Path("/etc/my certs/chain.pem")}


@pytest.fixture
def plan(minilm_folder: Path) -> Plan:
    return make_plan(load_settings([str(minilm_folder), "--device", "cpu"]))


@pytest.mark.parametrize(
    ("threads", "line"), [((1, 16), "× 1 to 16 thread(s) on cpu"), ((1, 1), "× 1 thread(s)"), ((2, 1), "× 2 thread(s)")]
)
def test_the_threads_of_a_worker_are_those_that_a_batch_may_have(
    threads: tuple[int, int], line: str, plan: Plan
) -> None:
    worker = replace(plan.workers[0], num_threads=threads[0], max_threads=threads[1])
    lines, _ = summary(replace(plan, workers=[worker]), "http://h:80", "", {"agreement": None}, 1, 1.0)
    assert line in "\n".join(lines)
    assert ", not compared with the reference model" in "\n".join(lines)


@pytest.mark.parametrize(
    ("settings", "url", "curl"),
    [
        (_CERT, "https://h:80", "curl --cacert '/etc/my certs/chain.pem' https://h:80/v1/embeddings -H "),
        (
            _CERT,
            "unix:/run/a b",
            "curl --cacert '/etc/my certs/chain.pem' --unix-socket '/run/a b' https://localhost/v1/embeddings -H ",
        ),
    ],
)
def test_the_line_to_try_is_a_command_that_works(plan: Plan, settings: dict[str, Any], url: str, curl: str) -> None:
    lines, _ = summary(replace(plan, settings=replace(plan.settings, **settings)), url, "", {}, 1, 1.0)
    [line] = [line.split(maxsplit=1)[1] for line in lines if line.startswith("  try ")]
    assert line.startswith(curl)


def test_a_guess_is_told(plan: Plan) -> None:
    def assumed(plan: Plan) -> list[str]:
        return [line for line in summary(plan, "http://h:80", "", {}, 1, 1.0)[0] if "assumed" in line]

    assert assumed(plan) == []
    [line] = assumed(replace(plan, card=replace(plan.card, assumes_pooling=True)))
    assert f"{plan.gateway.model}: no modules.json: mean pooling without" in line


def test_several_models_have_a_line_each(plan: Plan) -> None:
    other = replace(plan, gateway=replace(plan.gateway, model="b", max_tokens=100), workers=plan.workers[:1])
    facts = {"path": "packed", "dtype": "float32"}
    alone, fields_alone = summary(plan, "http://h:80", "", facts, 7, 1.0)
    lines, fields = summary(plan, "http://h:80", "", facts, 7, 1.0, [(other, {**facts, "dtype": "int8"})])
    about = [line for line in lines if line.startswith("  model ")]
    assert len(about) == 2
    assert about[1] == "  model      b: dense, 384 dimensions, at most 100 tokens, packed, int8, 1 worker"
    assert [line.split()[0] for line in lines[3:]] == ["gateways", "memory", "listening", "try", "ready"]
    first, second = fields.pop("models")
    assert first.items() <= fields_alone.items()
    assert second == {**first, "model": "b", "max_tokens": 100, "dtype": "int8", "workers": 1}
    assert fields == fields_alone, "the first model's"
    assert "models" not in fields_alone
    assert alone[1] == "  model      model: 384 dimensions, at most 256 tokens, mean pooling, normalized"
