"""The attention function: each sequence attends to itself alone, and nothing that is asked for is ignored."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from tests.support.workers import varlen_by_hand
from vecd.workers.batch import Run
from vecd.workers.torch import cuda
from vecd.workers.torch import packed as packing
from vecd.workers.torch.packed import (
    PackingError,
    SequenceMask,
    packed_attention,
    rule_key,
    running,
    sequence_mask,
    suits_varlen,
    window_of,
)

RUNS = [Run(0, 3, 1), Run(3, 2, 4), Run(11, 1, 9)]
NUM_TOKENS = 20
HEADS, HEAD_DIM = 4, 8


def attention_inputs(key_heads: int = HEADS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def states(heads: int) -> Tensor:
        # As models make them: [1, T, heads, head dim] with two axes swapped, not contiguous.
        return torch.randn(1, NUM_TOKENS, heads, HEAD_DIM, generator=generator).transpose(1, 2)

    return states(HEADS), states(key_heads), states(key_heads)


def attend(module: Any, *states: Tensor, mask: Any = None, **arguments: Any) -> Tensor:
    query, key, value = states
    with running(RUNS):
        return packed_attention(module, query, key, value, mask, **arguments)[0]


def by_hand(
    query: Tensor, key: Tensor, value: Tensor, rule: Any, scaling: float = HEAD_DIM**-0.5, cap: float = 0.0
) -> Tensor:
    """Softmax attention over a T × T mask in which sequences do not see each other; [1, T, heads, head dim]."""
    sequence = torch.tensor(
        [index for index, length in enumerate(r.length for r in RUNS for _ in range(r.count)) for _ in range(length)]
    )
    place = torch.tensor([place for r in RUNS for _ in range(r.count) for place in range(r.length)])
    zero = torch.zeros((), dtype=torch.long)
    allowed = rule(zero, zero, place[:, None], place[None, :]) & (sequence[:, None] == sequence[None, :])
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(2, 3)) * scaling
    scores = cap * torch.tanh(scores / cap) if cap else scores
    return (scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize(
    ("module", "argument", "rule"),
    [
        (SimpleNamespace(is_causal=False), None, bidirectional_mask_function),
        (SimpleNamespace(is_causal=True), None, causal_mask_function),
        (SimpleNamespace(), None, causal_mask_function),
        (SimpleNamespace(is_causal=False), True, causal_mask_function),
        (SimpleNamespace(is_causal=True), False, bidirectional_mask_function),
    ],
)
def test_without_a_mask_the_module_says_whether_it_is_causal(module: Any, argument: bool | None, rule: Any) -> None:
    states = attention_inputs()
    out = attend(module, *states, is_causal=argument)
    torch.testing.assert_close(out, by_hand(*states, rule), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("mask", "arguments"),
    [
        (None, {"position_bias": torch.zeros(1)}),
        (None, {"something_new": 1}),
        (None, {"sliding_window": 4}),
        (torch.zeros(1, 1, NUM_TOKENS, NUM_TOKENS), {}),
    ],
)
def test_what_is_not_known_is_refused(mask: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(PackingError):
        attend(SimpleNamespace(is_causal=False), *attention_inputs(), mask=mask, **arguments)


@pytest.mark.parametrize("key_heads", [HEADS, 2])
@pytest.mark.parametrize("rule", [causal_mask_function, sliding_window_bidirectional_mask_function(2)])
def test_scores_are_capped(rule: Any, key_heads: int) -> None:
    states = attention_inputs(key_heads)
    out = attend(SimpleNamespace(), *states, mask=SequenceMask(rule), softcap=0.5, scaling=0.4)
    torch.testing.assert_close(out, by_hand(*states, rule, 0.4, 0.5), atol=1e-6, rtol=0)
    assert not torch.allclose(out, by_hand(*states, rule, 0.4), atol=1e-3)


def test_what_is_asked_for_in_another_place_is_refused() -> None:
    with pytest.raises(PackingError):  # a cache of earlier tokens
        sequence_mask(mask_function=causal_mask_function, q_offset=3)
    with pytest.raises(PackingError):  # outside a packed pass
        packed_attention(torch.nn.Identity(), *attention_inputs(), None)


def test_a_rule_about_places_in_the_batch_is_refused() -> None:
    rule = chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))
    with pytest.raises(PackingError, match="where in the batch"):
        SequenceMask(rule).of_run(Run(start=3, count=1, length=6), torch.device("cpu"))


# --- one kernel for all lengths ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device_type", "dtype", "head_dim", "value_head_dim", "expected"),
    [
        ("cuda", torch.float16, 64, 64, True),
        ("cuda", torch.float32, 64, 64, False),
        ("cpu", torch.bfloat16, 64, 64, False),
        ("cuda", torch.float16, 264, 264, False),
        ("cuda", torch.float16, 20, 20, False),
        ("cuda", torch.float16, 64, 128, False),
    ],
)
def test_what_the_kernel_for_variable_lengths_takes(
    device_type: str, dtype: torch.dtype, head_dim: int, value_head_dim: int, expected: bool
) -> None:
    assert suits_varlen(device_type, dtype, head_dim, value_head_dim) is expected


def block_rule(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query // 4 == key // 4


def strided_rule(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (query - key) % 2 == 0


@pytest.mark.parametrize(
    ("rule", "window"),
    [
        (bidirectional_mask_function, (-1, -1)),
        (causal_mask_function, (-1, 0)),
        (sliding_window_causal_mask_function(3), (2, 0)),  # itself and two before
        (sliding_window_bidirectional_mask_function(2), (2, 2)),
        (sliding_window_causal_mask_function(5000), (-1, 0)),
        (and_masks(causal_mask_function, bidirectional_mask_function), (-1, 0)),
        (strided_rule, None),
    ],
)
def test_a_rule_is_a_window_or_it_is_not(rule: Any, window: Any) -> None:
    mask, device = SequenceMask(rule), torch.device("cpu")
    for _ in range(2):  # evaluated, and remembered
        assert mask.window(RUNS[-1], device) == window
    assert SequenceMask(rule).window(Run(0, 1, 2000), device) == window


def test_a_window_is_no_window_for_longer_texts_than_it_was_looked_at_with() -> None:
    device = torch.device("cpu")
    assert SequenceMask(sliding_window_causal_mask_function(1500)).window(Run(0, 1, 900), device) == (-1, 0)
    assert SequenceMask(sliding_window_causal_mask_function(1500)).window(Run(0, 1, 1600), device) == (1499, 0)


def test_a_rule_that_holds_tensors_is_looked_at_no_farther_than_the_batch_reaches() -> None:
    visible = torch.ones(20, dtype=torch.bool)

    def rule(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return visible[key] & (key <= query)

    assert rule_key(rule) is None
    assert SequenceMask(rule).window(RUNS[-1], torch.device("cpu")) == (-1, 0)


def test_a_rule_about_places_in_the_batch_is_no_window() -> None:
    with pytest.raises(PackingError, match="where in the batch"):
        SequenceMask(block_rule).window(RUNS[-1], torch.device("cpu"))


def test_rules_made_anew_are_known_again() -> None:
    make = sliding_window_causal_mask_function
    assert rule_key(make(3)) == rule_key(make(3))
    assert rule_key(make(3)) != rule_key(make(4))
    assert rule_key(make(3)) != rule_key(sliding_window_bidirectional_mask_function(3))
    assert rule_key(chunked_causal_mask_function(4, torch.zeros(1))) is None
    assert rule_key(SimpleNamespace()) is None


def test_windows_are_the_masks_that_they_are_read_from() -> None:
    positions = torch.arange(7)
    for before in range(7):
        for behind in range(7):
            distance = positions[None, :] - positions[:, None]
            allowed = (distance >= -before) & (distance <= behind)
            expected = (-1 if before == 6 else before, -1 if behind == 6 else behind)
            assert window_of(allowed) == expected
            if 0 < before < 6:
                allowed[5, 5 - before] = False
                assert window_of(allowed) is None


@pytest.mark.parametrize("key_heads", [HEADS, 2, 1])
@pytest.mark.parametrize(
    "rule",
    [
        bidirectional_mask_function,
        causal_mask_function,
        sliding_window_causal_mask_function(3),
        sliding_window_bidirectional_mask_function(2),
        strided_rule,
    ],
)
def test_every_sequence_attends_to_itself_by_the_model_s_rule(
    rule: Any, key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run by run, and by the kernel for variable lengths, which is asked wherever the rule is a window."""
    calls: list[Any] = []

    def varlen(*arguments: Any, **options: Any) -> Tensor:
        inspect.signature(varlen_attn).bind(*arguments, **options)
        calls.append(options["window_size"])
        return varlen_by_hand(*arguments, **options)

    states, mask = attention_inputs(key_heads), sequence_mask(mask_function=rule)
    ignored = {"softcap": None, "output_attentions": False, "use_cache": True}
    for scaling, expected in ((None, by_hand(*states, rule)), (0.7, by_hand(*states, rule, 0.7))):
        by_runs = attend(SimpleNamespace(), *states, mask=mask, scaling=scaling, **ignored)
        torch.testing.assert_close(by_runs, expected, atol=1e-6, rtol=0)
        with monkeypatch.context() as patched:
            patched.setattr(packing, "suits_varlen", lambda *tensors: True)
            patched.setattr(cuda, "varlen_attention", lambda device: varlen)
            at_once = attend(SimpleNamespace(), *states, mask=mask, scaling=scaling)
        torch.testing.assert_close(at_once, expected, atol=1e-6, rtol=0)
    assert len(calls) == (0 if rule is strided_rule else 2)
