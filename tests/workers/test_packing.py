"""The attention function: each sequence attends to itself alone, and nothing that is asked for is ignored."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from workers.layout import Run
from workers.packing import PackingError, SequenceMask, packed_attention, running, sequence_mask

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


def by_hand(query: Tensor, key: Tensor, value: Tensor, rule: Any, scaling: float = HEAD_DIM**-0.5) -> Tensor:
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
    return (scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("key_heads", [HEADS, 2, 1])
@pytest.mark.parametrize(
    "rule",
    [
        bidirectional_mask_function,
        causal_mask_function,
        sliding_window_causal_mask_function(3),
        sliding_window_bidirectional_mask_function(2),
    ],
)
def test_every_sequence_attends_to_itself_by_the_model_s_rule(rule: Any, key_heads: int) -> None:
    states = attention_inputs(key_heads)
    out = attend(SimpleNamespace(), *states, mask=sequence_mask(mask_function=rule))
    torch.testing.assert_close(out, by_hand(*states, rule), atol=1e-6, rtol=0)


def test_scores_are_scaled_as_the_model_says() -> None:
    states = attention_inputs()
    out = attend(SimpleNamespace(is_causal=False), *states, scaling=0.7)
    torch.testing.assert_close(out, by_hand(*states, bidirectional_mask_function, 0.7), atol=1e-6, rtol=0)


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
        (None, {"softcap": 50.0}),
        (None, {"s_aux": torch.zeros(1)}),
        (None, {"something_new": 1}),
        (None, {"dropout": 0.1}),
        (None, {"sliding_window": 4}),
        (torch.zeros(1, 1, NUM_TOKENS, NUM_TOKENS), {}),
    ],
)
def test_what_is_not_known_is_refused(mask: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(PackingError):
        attend(SimpleNamespace(is_causal=False), *attention_inputs(), mask=mask, **arguments)


def test_absent_extras_are_accepted() -> None:
    attend(SimpleNamespace(is_causal=False), *attention_inputs(), softcap=None, output_attentions=False, use_cache=True)


def test_a_rule_about_places_in_the_batch_is_refused() -> None:
    rule = chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))
    with pytest.raises(PackingError, match="where in the batch"):
        SequenceMask(rule).of_run(Run(start=3, count=1, length=6), torch.device("cpu"))


def test_a_cache_of_earlier_tokens_is_refused() -> None:
    with pytest.raises(PackingError):
        sequence_mask(mask_function=causal_mask_function, q_offset=3)


def test_attention_outside_a_packed_pass_is_refused() -> None:
    with pytest.raises(PackingError):
        packed_attention(torch.nn.Identity(), *attention_inputs(), None)
