"""Which configurations fit into a budget of memory."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from vecd.launch.base.exit_codes import ConfigurationError
from vecd.launch.config.plan import Plan, make_plan
from vecd.launch.config.settings import load_settings
from vecd.launch.memory import budget
from vecd.launch.memory.budget import make_book, read_book
from vecd.launch.memory.footprint import Footprint

GB = 10**9


@pytest.fixture
def of_models(
    planned: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[Plan]]:
    """Makes plans of models, each of 1 GB, in a server that needs 0.1 GB for itself."""
    monkeypatch.setattr("vecd.launch.memory.book.predict", lambda plan, *, is_only_model: Footprint(GB - 2, 1, 2))
    monkeypatch.setattr(budget, "predict_server", lambda plans: GB // 10)

    def plans(limit: str, **flags: str) -> list[Plan]:
        made = []
        for name, given in flags.items():
            plan = planned("--cache-dir", str(tmp_path), "--memory-budget", limit, *given.split())
            card = replace(plan.gateway.card, tokenizer_file="")  # a descriptor, which `planned` closes
            made.append(replace(plan, gateway=replace(plan.gateway, model=name, card=card)))
        return made

    return plans


@pytest.mark.parametrize(
    ("limit", "flags", "is_enough"),
    [
        ("1.1GB", {"a": ""}, True),
        ("1.09GB", {"a": ""}, False),
        ("2.1GB", {"a": "", "b": ""}, True),
        ("2.0GB", {"a": "", "b": ""}, False),
        ("1.1GB", {"a": "", "b": "--load demand"}, True),
        ("1.1GB", {"a": "--load demand", "b": "--load demand"}, True),
        ("1.0GB", {"a": "--load demand", "b": "--load demand"}, False),
        ("2.0GB", {"a": "--pinned", "b": "--load demand"}, False),
        ("2.1GB", {"a": "--pinned", "b": "--load demand", "c": "--load demand"}, True),
        ("2.0GB", {"a": "--load demand --pinned", "b": "--load demand --pinned"}, False),
        ("1B", {"a": "--load demand"}, False),
    ],
)
def test_what_must_be_there_together_must_fit(
    limit: str, flags: dict[str, str], is_enough: bool, of_models: Callable[..., list[Plan]]
) -> None:
    plans = of_models(limit, **flags)
    if is_enough:
        assert make_book(plans).budget == float(limit.removesuffix("GB")) * GB
    else:
        with pytest.raises(ConfigurationError, match="--memory-budget"):
            make_book(plans)


def test_the_operator_learns_who_needs_what(of_models: Callable[..., list[Plan]]) -> None:
    first, second, third = of_models("1.5GB", small="", large="--pinned", other="--load demand --workers 3")
    read_book([first, second, third]).remember(third, Footprint(GB - 2, 1, 2))
    with pytest.raises(ConfigurationError) as refused:
        make_book([first, second, third])
    assert refused.value.problems == [
        "--memory-budget: 1.5GB given, which is 1,500 MB: the models that are loaded at the start would need 2,100 MB "
        "with the server itself",
        "--memory-budget: 1.5GB given, which is 1,500 MB: other would need 2,100 MB with the server itself and the "
        "pinned models",
        "model                load    memory    pinned  known by",
        "small                start   1,000 MB  no      prediction",
        "large                start   1,000 MB  yes     prediction",
        "other                demand  1,000 MB  no      measurement",
        "(the server itself)  start   100 MB    yes     prediction",
    ]


def test_without_a_budget_no_file_is_read(
    of_models: Callable[..., list[Plan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vecd.launch.memory.book.predict", None)
    assert make_book(of_models("", a="", b="")).budget is None


def test_plans_that_are_refused_are_closed(minilm_folder: Path) -> None:
    plan = make_plan(load_settings([str(minilm_folder), "--engine", "dummy", "--memory-budget", "1"]))
    assert Path(plan.gateway.card.tokenizer_file).exists()
    with pytest.raises(ConfigurationError):
        make_book([plan])
    assert not Path(plan.gateway.card.tokenizer_file).exists()


def test_a_share_is_of_the_limit_of_the_cgroup(
    of_models: Callable[..., list[Plan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "memory_limit_mb", lambda: 4000)
    assert make_book(of_models("80%", a="")).budget == 3200 << 20


def test_a_share_of_what_is_not_known_is_refused(
    of_models: Callable[..., list[Plan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "memory_limit_mb", lambda: 0)
    with pytest.raises(ConfigurationError, match="80% given, but the system does not say of how much; give bytes"):
        make_book(of_models("80%", a=""))
    assert make_book(of_models("2GB", a="")).budget == 2 * GB
