"""When memory does not suffice: what counts as that, and where a batch is cut."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vecd.shm.output import Output
from vecd.workers.engine import PackedBatch
from vecd.workers.out_of_memory import halves, means_no_more_code, means_out_of_memory


def no_memory_for_torch() -> Exception:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 58)
    return raised.value


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (no_memory_for_torch(), True),
        (RuntimeError("shapes"), False),
        (torch.AcceleratorError("device-side assert"), False),
    ],
)
def test_what_means_out_of_memory(error: Exception, expected: bool) -> None:
    assert means_out_of_memory(error) is expected


def test_a_product_that_cannot_be_compiled_means_that_none_will_be() -> None:
    assert means_no_more_code(RuntimeError("could not create a primitive"))


@pytest.mark.parametrize("error", [RuntimeError("shapes"), MemoryError(), ValueError("could not create a primitive")])
def test_other_errors_leave_the_engine_as_it_was(error: Exception) -> None:
    assert not means_no_more_code(error)


@given(st.lists(st.integers(1, 500), min_size=2, max_size=40), st.booleans())
def test_halves_are_the_whole_batch_and_as_even_as_whole_sequences_allow(lengths: list[int], is_mixed: bool) -> None:
    num_tokens = sum(lengths)
    outputs = (np.arange(len(lengths)) % len(Output)).astype(np.uint8) if is_mixed else None
    batch = PackedBatch(np.array(lengths, dtype=np.int32), np.arange(num_tokens, dtype=np.int32), outputs)
    first, second = halves(batch)
    assert [*first.lengths, *second.lengths] == lengths
    assert [*first.token_ids, *second.token_ids] == list(range(num_tokens))
    assert first.num_rows + second.num_rows == batch.num_rows
    if outputs is None:
        assert first.outputs is second.outputs is None
    else:
        assert first.outputs is not None
        assert second.outputs is not None
        assert [*first.outputs, *second.outputs] == outputs.tolist()
    for half in (first, second):
        assert half.lengths.size >= 1
        assert half.token_ids.size == half.lengths.sum()
    best = min(abs(2 * sum(lengths[:count]) - num_tokens) for count in range(1, len(lengths)))
    assert abs(first.token_ids.size - second.token_ids.size) == best
