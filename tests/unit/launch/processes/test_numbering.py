"""Which indices the models and workers of a new configuration get beside those that are served."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from vecd.gateway.types.config import GatewayConfig
from vecd.launch.base.exit_codes import ConfigurationError
from vecd.launch.config.plan import Plan
from vecd.launch.processes.numbering import numbered

Numbers = dict[str, tuple[int, int, int]]
"""By model: its index, its first worker, and the number of its workers."""


@pytest.fixture
def renumbered(planned: Callable[..., Plan]) -> Callable[[dict[str, int], Numbers], Numbers]:
    """The indices for models with so many workers, with room for 4 models and 10 workers."""
    config = replace(planned().gateway, board_models=4, board_workers=10)

    def one(model: str, index: int, first_worker: int, num_workers: int) -> GatewayConfig:
        return replace(config, model=model, model_index=index, first_worker=first_worker, num_workers=num_workers)

    def number(new: dict[str, int], served: Numbers) -> Numbers:
        before = {model: one(model, *numbers) for model, numbers in served.items()}
        fresh = [replace(one(model, 0, 0, num), board_models=1, board_workers=2) for model, num in new.items()]
        after = numbered(fresh, before)
        assert [config.model for config in after] == list(new)
        assert {(config.board_models, config.board_workers) for config in after} == {(4, 10)}
        return {config.model: (config.model_index, config.first_worker, config.num_workers) for config in after}

    return number


@pytest.mark.parametrize(
    ("new", "served", "expected"),
    [
        ({"a": 2}, {"a": (0, 0, 2)}, {"a": (0, 0, 2)}),
        ({"b": 9}, {"a": (0, 0, 8)}, {"b": (0, 0, 9)}),  # the only model has got another name
        ({"a": 2, "b": 1}, {"a": (0, 0, 2), "b": (1, 2, 3)}, {"a": (0, 0, 2), "b": (1, 2, 1)}),
        ({"b": 1}, {"a": (0, 0, 2), "b": (1, 2, 3)}, {"b": (1, 2, 1)}),
        # Grown where it is, and into what is free after the others.
        ({"a": 2, "b": 8}, {"a": (0, 0, 2), "b": (1, 2, 3)}, {"a": (0, 0, 2), "b": (1, 2, 8)}),
        ({"a": 3, "b": 3}, {"a": (0, 0, 2), "b": (1, 2, 3)}, {"a": (0, 5, 3), "b": (1, 2, 3)}),
        ({"a": 3, "b": 4}, {"a": (0, 0, 2), "b": (1, 2, 3)}, {"a": (0, 0, 3), "b": (1, 3, 4)}),
        # New ones: before, between and after those that stay.
        ({"c": 2, "a": 2}, {"a": (0, 0, 2)}, {"c": (1, 2, 2), "a": (0, 0, 2)}),
        ({"a": 2, "b": 2, "c": 1}, {"a": (0, 0, 2), "b": (2, 3, 2)}, {"a": (0, 0, 2), "b": (2, 3, 2), "c": (3, 2, 1)}),
        ({"b": 2, "c": 3}, {"a": (0, 0, 2), "b": (3, 2, 2)}, {"b": (3, 2, 2), "c": (0, 4, 3)}),
        ({"b": 2, "c": 2}, {"a": (0, 0, 2), "b": (1, 2, 2)}, {"b": (1, 2, 2), "c": (2, 0, 2)}),
    ],
)
def test_what_stays_keeps_its_indices(new: dict[str, int], served: Numbers, expected: Numbers, renumbered) -> None:
    assert renumbered(new, served) == expected


@pytest.mark.parametrize(
    ("new", "problem"),
    [
        ({"a": 11}, "workers: 11 given, at most 10 without a restart"),
        ({"a": 2, "b": 2, "c": 7}, "workers of c: 7 given, at most 6 without a restart"),
        (dict.fromkeys("abcde", 1), "models: 5 given, at most 4 without a restart"),
    ],
)
def test_what_has_no_room_is_refused(new: dict[str, int], problem: str, renumbered) -> None:
    with pytest.raises(ConfigurationError) as error:
        renumbered(new, {"a": (0, 0, 2), "b": (1, 2, 2)})
    assert error.value.problems == [problem]
