"""Where the tokens of a sequence are in their text, for outputs by token that are shown beside the text.

Owns how the offsets of a text's own tokens become those of its sequences. Tokenizes nothing. Called by
`vecd.gateway.tokenization.tokenizer` for requests that want offsets: the library makes an object for each.
"""

import numpy as np
from numpy.typing import NDArray

from vecd.gateway.tokenization.truncation import TruncationPolicy
from vecd.gateway.types.request import Overflow, TokenizedInput


def no_offsets(num: int) -> NDArray[np.int32]:
    """[num, 2] of tokens that are nowhere in the text."""
    return np.full((num, 2), -1, np.int32)


def with_offsets(
    item: TokenizedInput, offsets: NDArray[np.int32], own_ids: list[int], truncation: TruncationPolicy
) -> TokenizedInput:
    """The input with its offsets. `offsets`, [n, 2]: those of its tokens, the prompt's included, as far as they are
    kept."""
    prefix, suffix = (no_offsets(len(ids)) for ids in truncation.template)
    num_prompt = len(truncation.prompt_of(own_ids))
    before, parts = num_prompt, [len(own_ids) - num_prompt]
    if item.chunks:
        parts = [chunk.weight for chunk in item.chunks]
    elif item.is_truncated and truncation.overflow is Overflow.TRUNCATE_LEFT:
        num_kept = item.num_tokens - truncation.template.num_tokens - num_prompt
        before, parts = len(own_ids) - num_kept, [num_kept]
    else:
        parts = [item.num_tokens - truncation.template.num_tokens - num_prompt]
    rows = []
    for num in parts:
        rows += [prefix, no_offsets(num_prompt), offsets[before : before + num], suffix]
        before += num
    return item._replace(offsets=np.concatenate(rows))
