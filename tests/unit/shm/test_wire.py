from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vecd.shm.wire import (
    Alive,
    Batch,
    Done,
    Failed,
    FailureCode,
    Incarnation,
    Probe,
    WireError,
    decode_to_gateway,
    decode_to_worker,
    encode,
)

u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))


def make_batch(lengths: list[int], outputs: bytes = b"", num_threads: int = 0, scope: int = 0) -> Batch:
    ids, packed_lengths = np.arange(sum(lengths), dtype="<i4").tobytes(), np.array(lengths, dtype="<i4").tobytes()
    return Batch(1, 2, 0, len(lengths), sum(lengths), packed_lengths, ids, outputs, num_threads, scope=scope)


lengths_of_batches = st.lists(st.integers(1, 20), min_size=1, max_size=20)
batches = lengths_of_batches.map(make_batch) | lengths_of_batches.flatmap(
    lambda lengths: st.builds(
        make_batch, st.just(lengths), st.binary(min_size=len(lengths), max_size=len(lengths)), u16, u64
    )
)


@given(st.builds(Probe, u32) | batches)
def test_messages_to_a_worker_come_back_the_same(message):
    assert decode_to_worker(encode(message)) == message


@given(
    st.builds(Alive, u32)
    | st.builds(Done, u32, u64, u16, u32, u32, u32, u16)
    | st.builds(Failed, u32, u64, u16, st.sampled_from(FailureCode))
)
def test_messages_to_the_gateway_come_back_the_same(message):
    assert decode_to_gateway(encode(message)) == message


@given(st.lists(st.binary(max_size=64), max_size=4))
@pytest.mark.parametrize("decode", [decode_to_worker, decode_to_gateway])
def test_junk_is_refused_and_nothing_else_happens(decode, frames):
    with suppress(WireError):
        decode(frames)


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param(lambda f: [f[0], f[1], f[2][:-4]], id="a token id short"),
        pytest.param(lambda f: [f[0], f[1][:-4], f[2]], id="a length short"),
        pytest.param(lambda f: [f[0][:1] + b"\x09" + f[0][2:], f[1], f[2]], id="another version"),
        pytest.param(lambda f: f[:2], id="a frame short"),
    ],
)
def test_a_damaged_batch_is_refused(frames):
    with pytest.raises(WireError):
        decode_to_worker(frames(encode(make_batch([3, 4]))))


@pytest.mark.parametrize("outputs", [b"", bytes(1), bytes(3)])
def test_as_many_outputs_as_sequences_or_none_at_all(outputs):
    header, lengths, token_ids = encode(make_batch([3, 4]))
    with pytest.raises(WireError, match=f"2 sequences and {len(outputs)} outputs"):
        decode_to_worker([header, lengths, token_ids, outputs])


def test_a_batch_of_vectors_alone_has_three_frames():
    assert len(encode(make_batch([3, 4]))) == 3
    assert len(encode(make_batch([3, 4], bytes([0, 2])))) == 4


def test_each_life_has_an_identity_of_its_own():
    assert Incarnation(1, 1).identity != Incarnation(1, 2).identity != Incarnation(11, 2).identity
