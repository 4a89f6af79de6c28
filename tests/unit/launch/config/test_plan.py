"""What a plan makes of a model and settings."""

from dataclasses import replace
from pathlib import Path

import pytest

from vecd.launch.base.exit_codes import ConfigurationError
from vecd.launch.config import plan
from vecd.launch.config.plan import make_plan
from vecd.launch.config.settings import load_settings
from vecd.shm.card import read_card


@pytest.mark.parametrize(
    ("max_tokens", "flags", "rows"),
    [
        (256, [], 512),  # a batch's sequences are the more
        (512, [], 512),
        (1000, [], 1000),
        (8192, [], 2048),  # a text of more tokens has no rows of them
        (8192, ["--max-tokens", "600"], 600),
        (256, ["--max-batch-tokens", "100"], 256),
        (256, ["--max-batch-tokens", "100", "--max-tokens", "32"], 100),
    ],
)
def test_a_slot_has_a_row_for_each_token_of_a_text(
    max_tokens: int, flags: list[str], rows: int, minilm_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "read_card", lambda folder: replace(read_card(folder), max_tokens=max_tokens))
    made = make_plan(load_settings([str(minilm_folder), "--device", "cpu", *flags]))
    assert made.gateway.arena.rows_per_slot == rows
    assert {worker.arena for worker in made.workers} == {made.gateway.arena}


def test_a_limit_of_what_is_split_needs_a_server_that_splits(minilm_folder: Path) -> None:
    flags = [str(minilm_folder), "--device", "cpu", "--max-embed-len", "10000"]
    assert make_plan(load_settings([*flags, "--overflow", "chunk"])).gateway.max_embed_len == 10_000
    with pytest.raises(ConfigurationError, match="--max-embed-len: given without --overflow chunk"):
        make_plan(load_settings(flags))


def test_what_has_no_room_in_a_row_needs_none(minilm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = replace(read_card(minilm_folder), max_tokens=8192, dim=128)
    monkeypatch.setattr(plan, "read_card", lambda folder: card)
    arena = make_plan(load_settings([str(minilm_folder), "--device", "cpu"])).gateway.arena
    assert (arena.rows_per_slot, arena.dim) == (512, 128)
