"""vecd's engine and its peers in one process on one core, in turns.

Owns what is measured of them and how it becomes a finding. Called by `benchmarks.engine` in a process whose core and
environment are set already, because torch reads them when it is imported.

A figure is a median over the rounds; a ratio is the median of the rounds' ratios. vecd gets its batches in the order
of arrival, up to 2,048 tokens each; a peer gets them sorted by length, padded, and in the size that suits it best.
Cutting the batches is nobody's time.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, PretrainedConfig

from benchmarks.cpu import Neighbours
from benchmarks.findings import Finding, rounded
from benchmarks.linear import LINEAR_FLOP, LINEAR_NAME, linear_pass, model_flop
from benchmarks.ours import NotMeasurable, load_vecd
from benchmarks.peers import Peer, Peers
from benchmarks.targets import CONTESTS, Contest
from benchmarks.turns import Pass, fastest, paired_ratio, take_turns
from benchmarks.workload import Work, make_works, packed_batches, padded_batches
from vecd.shm.batch_limits import MAX_BATCH_TOKENS
from vecd.shm.card import read_card
from vecd.workers.engine import Engine

_MIN_COSINE = 0.99
"""Peers that embed something else are not measured. bfloat16 keeps 0.999 on this model."""
_VECD, _LINEAR = "vecd", "linear"

Tell: TypeAlias = Callable[[Finding], None]


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to do one work."""

    run: Pass
    vectors: Callable[[], NDArray[np.float32]]
    """Does it once and returns [B, D], in the work's order."""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Duels:
    """What all measurements have in common."""

    model_folder: Path
    folder: Path
    """For files that last no longer than this process."""
    num_rounds: int
    turn_s: float
    tell: Tell

    def fight(self, dtypes: Sequence[str]) -> None:
        """Measure every work in every format. Raises NotMeasurable."""
        torch.set_num_threads(1)
        card = read_card(self.model_folder)
        works = make_works(self.model_folder / "tokenizer.json", card.max_tokens)
        peers = Peers(self.model_folder, self.folder)
        config = AutoConfig.from_pretrained(self.model_folder)
        cache_folder = self.folder / "cache"
        cache_folder.mkdir(mode=0o700)
        for dtype in dtypes:
            contest = CONTESTS[dtype]
            engine = load_vecd(card, dtype, cache_folder)
            rivals = {name: peers.load(name, peer_dtype) for name, peer_dtype in contest.peers.items()}
            for work in works.values():
                contenders = {_VECD: _ours(engine, work, card.dim)}
                contenders |= {name: _best(variants, work) for name, variants in rivals.items()}
                self._measure(work, dtype, contest, contenders, config)

    def _measure(
        self, work: Work, dtype: str, contest: Contest, contenders: Mapping[str, Contender], config: PretrainedConfig
    ) -> None:
        cosines = {name: _least_cosine(contenders[_VECD], contenders[name], name) for name in contest.peers}
        passes = {name: contender.run for name, contender in contenders.items()}
        if work.name == "mixed" and contest.linear_dtype:
            passes[_LINEAR] = linear_pass(contest.linear_dtype)
        neighbours = Neighbours()
        seconds = take_turns(passes, self.num_rounds, self.turn_s)
        others_cores = neighbours.cores()
        if _LINEAR in passes:
            self.tell(_linear_finding(work, dtype, contest, config, seconds, others_cores))
        unit = "ms" if work.is_latency else "tokens/s"
        figures = {name: _figures(work, of_rounds) for name, of_rounds in seconds.items() if name in contenders}
        for name in contest.peers:
            details = {**contenders[name].details, "least_cosine": cosines[name]}
            self.tell(
                Finding(
                    work=_title(work),
                    dtype=dtype,
                    unit=unit,
                    ours=statistics.median(figures[_VECD]),
                    peer=f"{name} {contest.peers[name]}",
                    theirs=statistics.median(figures[name]),
                    ratio=paired_ratio(figures[_VECD], figures[name]),
                    target=contest.ratios.get((work.name, name)),
                    others_cores=others_cores,
                    details=_rounds(figures[_VECD], figures[name]) | {"engine": contenders[_VECD].details} | details,
                )
            )


def _ours(engine: Engine, work: Work, dim: int) -> Contender:
    batches = packed_batches(work.sequences, MAX_BATCH_TOKENS)
    rows = np.empty((max(len(batch.lengths) for batch in batches), dim), np.float32)

    def run() -> None:
        for batch in batches:
            engine.embed(batch, rows)

    def vectors() -> NDArray[np.float32]:
        parts = []
        for batch in batches:
            engine.embed(batch, rows)
            parts.append(rows[: len(batch.lengths)].copy())
        return np.concatenate(parts)

    return Contender(run, vectors, engine.facts | {"max_batch_tokens": MAX_BATCH_TOKENS})


def _best(variants: Sequence[Peer], work: Work) -> Contender:
    """The fastest of a peer's variants and batch sizes for this work, found in a quick first look."""
    candidates = {(peer.variant, size): _theirs(peer, work, size) for peer in variants for size in work.batch_sizes}
    return candidates[fastest({key: candidate.run for key, candidate in candidates.items()})]


def _theirs(peer: Peer, work: Work, batch_size: int) -> Contender:
    batches = padded_batches(work.sequences, batch_size)

    def run() -> None:
        for batch in batches:
            peer.embed(batch.token_ids, batch.mask)

    def vectors() -> NDArray[np.float32]:
        order = np.concatenate([batch.order for batch in batches])
        found = np.concatenate([peer.embed(batch.token_ids, batch.mask) for batch in batches])
        return found[np.argsort(order)]

    return Contender(run, vectors, {"variant": peer.variant, "batch_size": batch_size})


def _least_cosine(ours: Contender, theirs: Contender, name: str) -> float:
    """Raises NotMeasurable when a peer's vectors are not vecd's."""
    least = float((ours.vectors() * theirs.vectors()).sum(axis=1).min())
    if not least >= _MIN_COSINE:
        raise NotMeasurable(f"{name} embeds something else: cosine {least:.4f} with vecd's vectors")
    return round(least, 6)


def _linear_finding(
    work: Work,
    dtype: str,
    contest: Contest,
    config: PretrainedConfig,
    seconds: Mapping[str, Sequence[float]],
    others_cores: float,
) -> Finding:
    ours = [model_flop(config, work.lengths) / of_round / 1e9 for of_round in seconds[_VECD]]
    theirs = [LINEAR_FLOP / of_round / 1e9 for of_round in seconds[_LINEAR]]
    return Finding(
        work=f"{_title(work)}: linear and attention FLOPs of real tokens",
        dtype=dtype,
        unit="GFLOP/s",
        ours=statistics.median(ours),
        peer=f"{LINEAR_NAME} {contest.linear_dtype}",
        theirs=statistics.median(theirs),
        ratio=paired_ratio(ours, theirs),
        target=contest.linear_share,
        others_cores=others_cores,
        details=_rounds(ours, theirs),
    )


def _figures(work: Work, seconds: Sequence[float]) -> list[float]:
    """Of each round: milliseconds of a latency's work, tokens per second of the others."""
    return [1e3 * of_pass if work.is_latency else work.num_tokens / of_pass for of_pass in seconds]


def _rounds(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    return {"rounds": {"vecd": [rounded(figure) for figure in ours], "peer": [rounded(figure) for figure in theirs]}}


def _title(work: Work) -> str:
    match work.name:
        case "single":
            return f"one text of {work.num_tokens} tokens"
        case "long":
            return f"texts of {work.lengths[0]} tokens"
        case _:
            return f"mixed lengths ({len(work.sequences)} texts, {work.num_tokens} tokens)"
