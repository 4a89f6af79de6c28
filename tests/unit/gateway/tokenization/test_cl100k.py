"""The table is the published one, and ids are decoded as by a plain look-up."""

import hashlib
import re
import zlib
from array import array

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vecd.gateway.tokenization import cl100k
from vecd.gateway.tokenization.text_tokens import exhaust

UNPACKED_SHA256 = "92f1d27648e6c0aa11d4687800a6069da9abc1f04000f4b15e5762a05341c619"
"""As `tools/make_cl100k.py` printed it, which had checked the digest of the table that tiktoken publishes."""
NO_TOKENS = [100_256, *range(100_261, 100_276)]


@pytest.fixture(scope="module")
def tokens() -> list[bytes]:
    content = zlib.decompress(cl100k.FILE.read_bytes())
    assert hashlib.sha256(content).hexdigest() == UNPACKED_SHA256
    lengths = content[4 : 4 + cl100k.NUM_IDS]
    start, tokens = 4 + cl100k.NUM_IDS, []
    for length in lengths:
        tokens.append(content[start : start + length])
        start += length
    assert start == len(content)
    return tokens


@pytest.fixture(scope="module")
def id_of_byte(tokens: list[bytes]) -> dict[bytes, int]:
    return {token: index for index, token in enumerate(tokens) if len(token) == 1}


def test_ids_that_are_no_token_s_are_known():
    for token_id in (*NO_TOKENS, 0, 100_255, 100_257, 100_260, 100_276):
        assert (not cl100k.lengths_of([5, token_id]).all()) == (token_id in NO_TOKENS)
    assert NO_TOKENS[0] == cl100k.FIRST_UNKNOWN_ID


@given(st.lists(st.integers(0, 100_255) | st.integers(0, 255), max_size=60))
@example([1, 101, 102, 103, 104])
@example([101, 102, 103, 104])
@example([101, 102, 103])
@example([0, 101, 0])
def test_decoding_is_looking_up(tokens, ids):
    encoded = b"".join(tokens[token_id] for token_id in ids)
    assert cl100k.lengths_of(ids).sum() == len(encoded)
    try:
        text = exhaust(cl100k.decode_steps(array("i", ids), 10**9))
    except cl100k.NotText:
        with pytest.raises(UnicodeDecodeError):
            re.sub(rb"\A[\x80-\xbf]{0,3}", b"", encoded).decode()
        return
    assert text == encoded.decode(errors="replace")


def test_no_more_is_decoded_than_is_wanted(id_of_byte):
    assert exhaust(cl100k.decode_steps([id_of_byte[b"a"]] * 100, 10, 4)) == 12 * "a"


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=200), st.data())
def test_utf_8_is_decoded_in_slices_of_any_size(id_of_byte, text, data):
    ids = [id_of_byte[bytes([byte])] for byte in text.encode()]
    start = data.draw(st.integers(0, len(ids)))
    size = data.draw(st.integers(4, 9))
    assert exhaust(cl100k.decode_steps(ids, 10**9, size)) == text
    part = exhaust(cl100k.decode_steps(ids[start:], 10**9, size))
    assert part == text.encode()[start:].decode(errors="replace")
    few = exhaust(cl100k.decode_steps(ids, 10, size))
    assert text.startswith(few.rstrip("\ufffd")) if len(few) > 10 else few == text
