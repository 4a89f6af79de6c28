"""Decode token ids of cl100k_base, the vocabulary of OpenAI's embedding models, to text.

Owns the table of bytes by id, which is read when it is first needed. Cannot encode.

    lengths   0 1 1 1 … 7 4 13          starts   sums of the lengths
    tokens    !"#$ … <|endoftext|>      an id's bytes, one id after the other

Clients that know only OpenAI's models send these ids, LangChain by default. It splits lists of more than 8,191 ids at
any place, so a list may begin and end inside a character: the rest of one becomes U+FFFD, as in tiktoken's own
`decode`. Any other list that is not UTF-8 is of another vocabulary. The ids of special tokens become their names, such
as "<|endoftext|>".

Source: `cl100k_base.tiktoken` of tiktoken, whose licence (MIT) lies beside the data. `tools/make_cl100k.py` makes the
file and knows its format.

Measured: 10 ms to read, of which 3 ms hold the GIL; 1.6 MB of memory; 8,191 ids of English 0.3 ms.
"""

import codecs
import zlib
from array import array
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vecd.gateway.request import TokenIds

NUM_IDS = 100_277
"""Ids are below this. Some of the last ones have no token."""
FIRST_UNKNOWN_ID = 100_256
"""The lowest of these."""

FILE = Path(__file__).with_name("data") / "cl100k_base.bin"
SLICE_IDS = 4096
"""Ids decoded at once: 0.15 ms of English."""


class _Table(NamedTuple):
    lengths: NDArray[np.uint8]
    """[N] the number of bytes of each id's token; 0 for ids without a token."""
    starts: NDArray[np.int32]
    """[N] where each token begins in `tokens`."""
    tokens: NDArray[np.uint8]


class NotText(ValueError):
    """Ids whose bytes are not UTF-8, though no character's beginning or end is missing."""


def is_loaded() -> bool:
    return load.cache_info().currsize > 0


@cache
def load() -> _Table:
    content = zlib.decompress(FILE.read_bytes())
    num_ids = int.from_bytes(content[:4], "little")
    assert num_ids == NUM_IDS
    lengths = np.frombuffer(content, np.uint8, num_ids, offset=4)
    starts = np.zeros(num_ids, np.int32)
    np.cumsum(lengths[:-1], out=starts[1:])
    return _Table(lengths, starts, np.frombuffer(content, np.uint8, offset=4 + num_ids))


def lengths_of(ids: TokenIds) -> NDArray[np.uint8]:
    """The number of bytes of each of `ids`, each 0 … NUM_IDS - 1; 0 for one that has no token. Loads the table."""
    return load().lengths[_as_array(ids)]


def decode_steps(ids: TokenIds, max_chars: int, slice_ids: int = SLICE_IDS) -> Generator[None, None, str]:
    """The text of known ids, or of the first of them that make more than `max_chars` characters. Raises NotText."""
    table = load()
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    parts: list[str] = []
    num_chars = 0
    for start in range(0, len(ids), slice_ids):
        encoded = _bytes_of(table, _as_array(ids[start : start + slice_ids]))
        if not start:
            begun = encoded[:3]  # may be the rest of a character
            num_stray = next((at for at, byte in enumerate(begun) if not 0x80 <= byte < 0xC0), len(begun))
            parts.append("\ufffd" * num_stray)
            encoded = encoded[num_stray:]
        try:
            part = decoder.decode(encoded)
        except UnicodeDecodeError:
            raise NotText from None  # the cause would hold the bytes
        parts.append(part)
        num_chars += len(part)
        if num_chars > max_chars:
            break
        yield
    rest, _ = decoder.getstate()
    parts.append(rest.decode("utf-8", "replace"))
    return "".join(parts)


def _as_array(ids: TokenIds) -> NDArray[np.int32]:
    return np.frombuffer(ids, np.int32) if isinstance(ids, array) else np.array(ids, np.int32)


def _bytes_of(table: _Table, ids: NDArray[np.int32]) -> bytes:
    lengths = table.lengths[ids].astype(np.int32)
    ends = np.cumsum(lengths)
    # Byte k of the text is byte k + (its token's start in the table - its token's start in the text) of the table.
    shifts = np.repeat(table.starts[ids] - (ends - lengths), lengths)
    return table.tokens[shifts + np.arange(len(shifts), dtype=np.int32)].tobytes()
