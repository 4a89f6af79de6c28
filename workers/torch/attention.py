"""Attention over packed sequences, for the fused path: rotary positions, grouped key heads, causal masks and windows.

Owns the choice between SDPA and oneDNN's bfloat16 kernels. Knows no family and no file, and does not import
transformers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vecd.workers.batch import Run
from vecd.workers.description import RotaryScaling, frequencies_of, window_band
from vecd.workers.torch.checkpoint import PrefixStates


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary positions of queries and keys, in float32, after a norm of each head where the family has one. A rotated
    pair is a complex number, so the rows of the weights are reordered (`paired`), which changes no product of a query
    and a key, and the rotation is one multiplication."""

    table: Tensor
    """complex64 [M, head dim / 2], by position. Contains the root of the scores' scale."""
    norm: Tensor | None
    """RMSNorm's weights, float32 [heads + key heads, head dim], paired."""
    epsilon: float

    def rotate_(self, heads: Tensor, first: int = 0) -> None:
        """Rotate float32 [count, length, heads + key heads, head dim] in place; positions begin at `first`."""
        if self.norm is not None:
            normalize_rms_(heads, self.epsilon).mul_(self.norm)
        pairs = torch.view_as_complex(heads.view(*heads.shape[:-1], heads.shape[-1] // 2, 2))
        pairs.mul_(self.table[first : first + heads.shape[1], None])


def normalize_rms_(x: Tensor, epsilon: float) -> Tensor:
    """Divide each row of float32 [..., H] by the root of its mean square."""
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x.mul_(norms.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_())


def rotations(theta: float, scaling: RotaryScaling, head_dim: int, num_positions: int) -> Tensor:
    """The table of a `Rotation`. float32 at every step, as in transformers."""
    frequencies = torch.from_numpy(frequencies_of(theta, scaling, head_dim))
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.polar(torch.tensor(head_dim**-0.25), angles)


def paired(rows: Tensor, head_dim: int) -> Tensor:
    """[heads · head dim, ...], with the rows of the two halves of each head alternating: a pair side by side."""
    halves = rows.view(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


@dataclass(frozen=True, slots=True)
class RelativePositions:
    """DeBERTa's two terms of the scores that depend on the distance of two tokens, in one layer."""

    keys: Tensor
    queries: Tensor
    """Float32 [heads, rows, head dim]; the queries contain the scale."""
    key_rows: Tensor
    query_rows: Tensor
    """Int64 [2 · M]: see `vecd.workers.description.relative_rows`."""

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Each [count, heads, length, head dim] → [count, heads, length, length]."""
        length, middle = query.shape[2], len(self.key_rows) // 2
        distances = slice(middle - length, middle + length)
        of_queries = query @ self.keys[:, self.key_rows[distances]].mT
        of_keys = key @ self.queries[:, self.query_rows[distances]].mT
        return _by_tokens(of_queries) + _by_tokens(of_keys).mT


def _by_tokens(scores: Tensor) -> Tensor:
    """A view [..., length, length] of [..., length, 2 · length]. The distance of row i and column c is c - i - length:
    without the first elements and with rows that are one shorter, each begins at the distance of its first token."""
    length = scores.shape[-2]
    flat = scores.flatten(-2)[..., length:]
    return flat.view(*scores.shape[:-1], 2 * length - 1)[..., :length]


@dataclass(frozen=True, slots=True)
class Attention:
    """Each sequence attends only to itself. The query weights, or the rotation, contain the scale."""

    num_heads: int
    num_key_heads: int
    bias: Tensor | None = None
    """Added to the scores, float32 [heads, M, M] for texts of up to M tokens; shorter texts use its corner."""
    rotation: Rotation | None = None
    is_causal: bool = False
    window: "SlidingWindow | None" = None
    """None: a token sees any distance."""
    relative: RelativePositions | None = None
    norms: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None
    """Of all heads of the queries together, and of the keys, float32 [T, heads · head dim]. The first contains the
    scale."""

    @property
    def can_share(self) -> bool:
        return self.is_causal and self.window is None and self.bias is None

    def __call__(self, qkv: Tensor, runs: list[Run], prefix: PrefixStates | None = None) -> Tensor:
        """qkv [T', (heads + 2 key heads) · head dim] → [T', heads · head dim]; rows behind the runs are zero. May
        overwrite `qkv`. `prefix`: its computed tokens come before those of the runs; only if `can_share`."""
        num_tokens = qkv.shape[0]
        if prefix is not None:
            return self._attend_behind(qkv, runs, prefix)
        if len(runs) == 1 and runs[0].stop == num_tokens and not self._is_long(runs[0].length, qkv):
            return self.attend(qkv, runs[0])
        attended = qkv.new_empty(num_tokens, self.num_heads * self._head_dim(qkv))
        for run in runs:
            if self._is_long(run.length, qkv):
                for index in range(run.count):
                    start = run.start + index * run.length
                    num_keys = run.attended[index] if run.attended else run.length
                    self.attend_long(qkv, slice(start, start + run.length), num_keys, attended)
            else:
                attended[run.start : run.stop] = self.attend(qkv[run.start : run.stop], run)
        attended[runs[-1].stop :] = 0
        return attended

    def _head_dim(self, qkv: Tensor) -> int:
        return qkv.shape[1] // (self.num_heads + 2 * self.num_key_heads)

    def attend(self, qkv: Tensor, run: Run) -> Tensor:
        """qkv [tokens of the run, W] → [tokens of the run, heads · head dim]."""
        query, key, value = self._split(qkv, run)
        keys = torch.from_numpy(run.attended_keys()) if run.attended else None
        if self.window is not None and self.window.changes(run.length):
            pieces = self.window.pieces(run.length)
            parts = [
                self._sdpa(query[:, :, q], key[:, :, k], value[:, :, k], _hiding(mask, keys, k))
                for q, k, mask in pieces
            ]
            out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        else:
            bias = None if self.bias is None else self.bias[None, :, : run.length, : run.length]
            if self.relative is not None:
                bias = self.relative.scores(query, key)
            if keys is not None and self.is_causal:
                bias = torch.full((run.length, run.length), -torch.inf).triu(1)
            is_causal = self.is_causal and run.length > 1 and keys is None
            out = self._sdpa(query, key, value, _hiding(bias, keys), is_causal)
        return out.transpose(1, 2).reshape(qkv.shape[0], -1).to(qkv.dtype)

    def _split(self, qkv: Tensor, run: Run, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key, value: float32 [count, heads or key heads, length, head dim], at positions from `first` on."""
        # SDPA's kernel for processors is no faster in bfloat16 than in float32, and slower for short sequences.
        num_heads, head_dim = self.num_heads + 2 * self.num_key_heads, self._head_dim(qkv)
        rows = qkv.float()
        if self.norms is not None:
            sizes = [heads * head_dim for heads in (self.num_heads, self.num_key_heads, self.num_key_heads)]
            queries, keys, values = torch.split(rows, sizes, dim=1)
            rows = torch.cat([self.norms[0](queries), self.norms[1](keys), values], dim=1)
        heads = rows.view(run.count, run.length, num_heads, head_dim)
        if self.rotation is not None:
            self.rotation.rotate_(heads[:, :, : self.num_heads + self.num_key_heads], first)
        query, key, value = torch.split(
            heads.transpose(1, 2), [self.num_heads, self.num_key_heads, self.num_key_heads], dim=1
        )
        return query, key, value

    def _attend_behind(self, qkv: Tensor, runs: list[Run], prefix: PrefixStates) -> Tensor:
        attended = qkv.new_empty(qkv.shape[0], self.num_heads * self._head_dim(qkv))
        num_before = prefix.num_computed
        of_prefix = Run(start=0, count=1, length=num_before)
        query, key, value = self._split(qkv[:num_before], of_prefix, prefix.num_known)
        keys, values = prefix.of_next_layer(key, value)
        if num_before:
            attended[:num_before] = self._attend_back(query, keys, values)
        for run in runs:
            tokens = slice(num_before + run.start, num_before + run.stop)
            query, key, value = self._split(qkv[tokens], run, prefix.num_tokens)
            key = torch.cat([keys.expand(run.count, -1, -1, -1), key], dim=2)
            value = torch.cat([values.expand(run.count, -1, -1, -1), value], dim=2)
            attended[tokens] = self._attend_back(query, key, value)
        attended[num_before + runs[-1].stop :] = 0
        return attended

    def _attend_back(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[tokens, heads · head dim] of queries that are the last of the keys' tokens."""
        num_queries, num_keys = query.shape[2], key.shape[2]
        if num_queries == num_keys:
            out = self._sdpa(query, key, value, None, True)
        else:
            sees = torch.ones(num_queries, num_keys, dtype=torch.bool).tril_(num_keys - num_queries)
            out = self._sdpa(query, key, value, sees)
        return out.transpose(1, 2).flatten(2).flatten(0, 1)

    def _sdpa(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool = False) -> Tensor:
        is_grouped = self.num_key_heads != self.num_heads
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, scale=1.0, enable_gqa=is_grouped
        )

    def _is_long(self, length: int, qkv: Tensor) -> bool:
        others = (self.rotation, self.window, self.relative, self.norms)
        if qkv.dtype is not torch.bfloat16 or any(other is not None for other in others):
            return False
        return length >= _LONG and qkv.shape[0] >= up_to(_LONG_STEP, length)

    def attend_long(self, qkv: Tensor, tokens: slice, num_keys: int, attended: Tensor) -> None:
        """One sequence, some heads at a time, by oneDNN's bfloat16 kernels. Writes its rows of `attended`. Its first
        `num_keys` tokens are attended to. Only few lengths are computed: the rest is filled with neighbouring tokens,
        with scores of -inf and values of zero."""
        length = tokens.stop - tokens.start
        size = up_to(_LONG_STEP, length)
        first = min(tokens.start, qkv.shape[0] - size)
        own = slice(tokens.start - first, tokens.stop - first)
        window = qkv[first : first + size].view(size, 3, self.num_heads, -1)
        query, key, value = window.permute(1, 2, 0, 3).unbind(0)  # each [heads, size, head dim]
        if size != length:
            values = torch.zeros_like(value)
            values[:, own] = value[:, own]
            value = values
        out = attended[tokens].view(length, self.num_heads, -1).transpose(0, 1)
        step = max(1, _LONG_SCORES_BYTES // (2 * size * size))
        for start in range(0, self.num_heads, step):
            heads = slice(start, start + step)
            scores = torch.bmm(query[heads], key[heads].transpose(1, 2))
            if self.bias is not None:
                scores[:, own, own] += self.bias[heads, :length, :length]
            scores[:, :, : own.start] = -torch.inf
            scores[:, :, own.start + num_keys :] = -torch.inf
            out[heads] = torch.bmm(scores.softmax(dim=-1), value[heads])[:, own]


def _hiding(scores: Tensor | None, keys: Tensor | None, of: slice = slice(None)) -> Tensor | None:
    """What is added to the scores of the keys `of` a run, with -inf where `keys` says that one is not attended to; bool
    without `scores`."""
    if keys is None:
        return scores
    return keys[..., of] if scores is None else scores.masked_fill(~keys[..., of], -torch.inf)


_LONG = 160
"""From this number of tokens on, bfloat16 attention is faster with oneDNN's kernels than with SDPA: at 512 tokens 10.1
instead of 13.2 µs per token and layer of all-MiniLM-L6-v2, measured on an AVX512-BF16 core without AMX. Not used after
a rotation: they round scores to bfloat16, and a random ModernBERT with large scores has a cosine of 0.994 instead of
0.998, for a pass that is 1.00 to 1.05 times as fast (a Qwen3: 1.02 to 1.14)."""

_LONG_STEP = 16
_LONG_SCORES_BYTES = 1 << 20
"""The size of a core's second-level cache; half or three times as much makes little difference."""


class SlidingWindow:
    """A largest distance between a token and those that it sees. A text is cut into pieces of at most PIECE_TOKENS
    queries, each with only those keys that one of its queries sees."""

    def __init__(self, distance: int, is_causal: bool, slopes: Sequence[float] = ()) -> None:
        """`slopes`: of each head, how much a score falls with every token between the two."""
        self._before, self._after = distance, 0 if is_causal else distance
        self._scores = torch.from_numpy(window_band(PIECE_TOKENS, self._before, self._after, falls=bool(slopes)))
        """[PIECE_TOKENS, keys], the first of them `_before` the first query."""
        self._slopes = torch.tensor(slopes)[None, :, None, None] if slopes else None

    def changes(self, length: int) -> bool:
        return self._slopes is not None or length - 1 > self._before

    def pieces(self, length: int) -> Iterator[tuple[slice, slice, Tensor]]:
        """Queries, keys, and what is added to their scores, [queries, keys] or [1, heads, queries, keys]: -inf where a
        query does not see a key."""
        for first in range(0, length, PIECE_TOKENS):
            last = min(first + PIECE_TOKENS, length)
            keys = slice(max(0, first - self._before), min(length, last + self._after))
            shift = self._before - first
            scores = self._scores[: last - first, keys.start + shift : keys.stop + shift]
            yield slice(first, last), keys, scores if self._slopes is None else scores * self._slopes


PIECE_TOKENS = 256
"""Not measured; as in the lean engine."""


def up_to(step: int, number: int) -> int:
    return -(-number // step) * step
