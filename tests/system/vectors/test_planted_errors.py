"""A fast path that is wrong is caught by its comparison with the reference model, whatever is wrong with it."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from tests.support.checkpoints import (
    Checkpoints,
    Reference,
    assert_same_vectors,
    embed,
    random_batch,
    skip_without,
    worker_config,
)
from vecd.model.card import ModelError
from vecd.workers.batch import Layout, Run
from vecd.workers.formats import PATHS
from vecd.workers.load import load_engine
from vecd.workers.torch import packed as packing
from vecd.workers.torch.attention import Attention
from vecd.workers.torch.fused import Embeddings, FusedForward
from vecd.workers.torch.padded import PACKED_ATTENTION
from vecd.workers.torch.transformer import TransformerEngine

LENGTHS = [5, 1, 30, 60, 7, 5, 2, 1, 12, 12, 59]
LONG_SETTINGS: dict[str, Any] = {"max_tokens": 512, "max_position_embeddings": 600}


def load(folder: Any, **changes: str) -> TransformerEngine:
    engine = load_engine(worker_config(folder, **changes), lambda stage: None)
    assert isinstance(engine, TransformerEngine)
    return engine


# --- packed -------------------------------------------------------------------------------------------------------


@pytest.fixture
def borderless_attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plants a packed attention that takes all sequences for one."""

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **arguments: Any) -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=arguments["scaling"])
        return out.transpose(1, 2), None

    monkeypatch.setattr(packing, "packed_attention", attention)
    yield
    monkeypatch.undo()
    packing.register()
    assert AttentionInterface()[PACKED_ATTENTION] is packing.packed_attention


@pytest.mark.usefixtures("borderless_attention")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_attention_across_borders_is_caught(dtype: str, checkpoint: Checkpoints, reference: Reference) -> None:
    folder = checkpoint("albert")
    engine = load(folder, dtype=dtype)
    assert (engine.facts["path"], engine.facts["dtype"]) == ("padded", dtype)
    (warning,) = engine.warnings
    assert re.match(rf"packed {dtype} is not used.*largest difference.*smallest cosine 0\.", warning)
    batch = random_batch(LENGTHS)
    assert_same_vectors(embed(engine, batch), reference(folder, batch), dtype)


@pytest.mark.usefixtures("borderless_attention")
def test_insisting_on_a_path_that_disagrees_is_refused(checkpoint: Checkpoints) -> None:
    with pytest.raises(ModelError, match=r"packed float32 is not used.*largest difference"):
        load(checkpoint("bert"), engine="packed")


def test_a_window_that_is_forgotten_is_caught(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing.SequenceMask, "of_run", lambda self, run, device: (False, None))
    engine = load(checkpoint("gemma3_text"), dtype="bfloat16")
    assert engine.facts["path"] == "padded"
    assert "packed bfloat16 is not used" in engine.warnings[0]


# --- fused --------------------------------------------------------------------------------------------------------

_attend, _embed, _run = Attention.__call__, Embeddings.__call__, FusedForward.__call__


def attend_across_borders(self: Attention, qkv: Tensor, runs: list[Run], prefix: Any = None) -> Tensor:
    return _attend(replace(self, bias=None), qkv, [Run(0, 1, runs[-1].stop)])


def attend_across_the_borders_of_a_run(self: Attention, qkv: Tensor, runs: list[Run], prefix: Any = None) -> Tensor:
    return _attend(replace(self, bias=None), qkv, [Run(run.start, 1, run.count * run.length) for run in runs])


def forget_the_last_key(self: Attention, qkv: Tensor, runs: list[Run], prefix: Any = None) -> Tensor:
    cut = qkv.clone()
    for run in runs:
        last = slice(run.start + run.length - 1, run.stop, run.length)
        cut[last, qkv.shape[1] // 3 :] = 0
    return _attend(self, cut, runs)


def forget_the_bias(self: Attention, qkv: Tensor, runs: list[Run], prefix: Any = None) -> Tensor:
    return _attend(replace(self, bias=None), qkv, runs)


def shift_the_bias(self: Attention, qkv: Tensor, runs: list[Run], prefix: Any = None) -> Tensor:
    assert self.bias is not None
    return _attend(replace(self, bias=self.bias.roll(1, dims=2)), qkv, runs)


def forget_the_last_head(self: Attention, qkv: Tensor, runs: list[Run], prefix: Any = None) -> Tensor:
    out = _attend(self, qkv, runs).clone()
    out[:, -(out.shape[1] // self.num_heads) :] = 0
    return out


def forget_the_rotation(self: Attention, qkv: Tensor, runs: list[Run], prefix: Any = None) -> Tensor:
    assert self.rotation is not None
    still = replace(self.rotation, table=torch.ones_like(self.rotation.table) * self.rotation.table[0, 0])
    return _attend(replace(self, rotation=still), qkv, runs)


def forget_the_scale(self: Attention, qkv: Tensor, runs: list[Run], prefix: Any = None) -> Tensor:
    assert self.rotation is not None
    larger = replace(self.rotation, table=self.rotation.table / self.rotation.table.abs())
    return _attend(replace(self, rotation=larger), qkv, runs)


def see_any_distance(self: Attention, qkv: Tensor, runs: list[Run], prefix: Any = None) -> Tensor:
    return _attend(replace(self, window=None), qkv, runs)


def see_later_tokens(self: Attention, qkv: Tensor, runs: list[Run], prefix: Any = None) -> Tensor:
    return _attend(replace(self, is_causal=False), qkv, runs)


def position_one_off(self: Embeddings, layout: Layout, num_tokens: int, dtype: torch.dtype) -> Tensor:
    assert self.positions is not None
    return _embed(replace(self, positions=self.positions.roll(-1, dims=0)), layout, num_tokens, dtype)


def swap_the_last_two_tokens(self: FusedForward, layout: Layout) -> Tensor:
    hidden = _run(self, layout)
    places = torch.arange(len(hidden))
    places[-61:] = places[-61:].roll(1)
    return hidden[places]


@pytest.mark.parametrize(
    ("where", "error", "family", "dtype"),
    [
        (Attention, attend_across_borders, "bert", "float32"),
        (Attention, attend_across_the_borders_of_a_run, "distilbert", "bfloat16"),
        (Attention, forget_the_last_key, "bert", "bfloat16"),
        (Attention, forget_the_last_head, "roberta", "bfloat16"),
        (Attention, forget_the_bias, "mpnet", "float32"),
        (Attention, shift_the_bias, "mpnet", "bfloat16"),
        (Attention, forget_the_rotation, "modernbert", "float32"),
        (Attention, forget_the_scale, "qwen2", "bfloat16"),
        (Attention, see_any_distance, "mistral", "bfloat16"),
        (Attention, see_later_tokens, "qwen2", "bfloat16"),
        (Embeddings, position_one_off, "xlm-roberta", "bfloat16"),
        (FusedForward, swap_the_last_two_tokens, "camembert", "float32"),
    ],
)
def test_a_fused_path_that_goes_wrong_is_caught(
    where: Any,
    error: Callable[..., Tensor],
    family: str,
    dtype: str,
    checkpoint: Checkpoints,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skip_without(dtype)
    # The first token of a text that sees no later one is always the same.
    pooling = "lasttoken" if family in ("qwen2", "mistral") else "cls"
    folder = checkpoint(family, pooling=pooling, initializer_range=0.2)
    monkeypatch.setattr(where, "__call__", error)
    # In float32 the lean engine would come before.
    monkeypatch.setitem(PATHS, "auto", tuple(path for path in PATHS["auto"] if path != "lean"))
    engine = load(folder, dtype=dtype)
    assert (engine.facts["path"], engine.facts["dtype"]) == ("padded" if family == "mpnet" else "packed", dtype)
    assert engine.warnings[0].startswith(f"fused {dtype} is not used: its vectors are not the reference model's")
    batch = random_batch(LENGTHS)
    assert_same_vectors(embed(engine, batch), reference(folder, batch), dtype)


# Only long texts in bfloat16 go this way, so that only the long probes can show what is wrong with it.


def attend_to_whatever_is_in_the_window(
    self: Attention, qkv: Tensor, tokens: slice, num_keys: int, attended: Tensor
) -> None:
    size = -(-(tokens.stop - tokens.start) // 16) * 16
    first = min(tokens.start, qkv.shape[0] - size)
    window = qkv[first : first + size]
    out = Attention.attend(replace(self, bias=None), window, Run(0, 1, size))
    attended[tokens] = out[tokens.start - first : tokens.stop - first]


def attend_with_the_values_before(self: Attention, qkv: Tensor, tokens: slice, num_keys: int, attended: Tensor) -> None:
    own = qkv[tokens].clone()
    own[:, 2 * qkv.shape[1] // 3 :] = own[:, 2 * qkv.shape[1] // 3 :].roll(1, dims=0)
    attended[tokens] = Attention.attend(self, own, Run(0, 1, tokens.stop - tokens.start))


@pytest.mark.parametrize(
    ("error", "family", "sizes", "next_path"),
    [
        (attend_to_whatever_is_in_the_window, "mpnet", (32, 4), "padded"),
        (attend_with_the_values_before, "bert", (128, 2), "packed"),
    ],
)
def test_a_wrong_way_for_long_texts_is_caught(
    family: str,
    sizes: tuple[int, int],
    next_path: str,
    error: Any,
    checkpoint: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In models that attend to few tokens each, like trained ones; where all are attended to alike, a few more make no
    difference that rounding would not."""
    skip_without("bfloat16")
    folder = checkpoint(
        family,
        pooling="cls",
        hidden_size=sizes[0],
        num_attention_heads=sizes[1],
        initializer_range=1.6 / sizes[0] ** 0.5,
        num_hidden_layers=2,
        **LONG_SETTINGS,
    )
    assert load(folder, dtype="bfloat16").facts["path"] == "fused"
    monkeypatch.setattr(Attention, "attend_long", error)
    engine = load(folder, dtype="bfloat16")
    assert (engine.facts["path"], engine.facts["dtype"]) == (next_path, "bfloat16")
    assert engine.warnings[0].startswith("fused bfloat16 is not used: its vectors are not the reference model's")
