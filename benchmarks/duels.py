"""vecd's engine and its peers in one process on one core, in turns.

Owns what is measured of them and how it becomes a finding. Called by `benchmarks.engine` in a process whose core and
environment are set already, because torch reads them when it is imported.

A figure is a median over the rounds; a ratio is of speeds, and the median of the rounds' ratios. vecd gets its batches
in the order of arrival, up to 2,048 tokens each; a peer gets them sorted by length, padded, and in the size that suits
it best. Cutting the batches is nobody's time.
"""

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, PretrainedConfig

from benchmarks.cpu import Neighbours
from benchmarks.exports import NotExportable
from benchmarks.findings import Finding, rounded
from benchmarks.linear import LINEAR_FLOP, LINEAR_NAME, linear_pass, model_flop
from benchmarks.machine import processor_class
from benchmarks.ours import NotMeasurable, load_vecd
from benchmarks.peers import Peer, Peers
from benchmarks.targets import CONTESTS, Contest
from benchmarks.turns import Clock, Pass, fastest, median_interval, paired_ratios, take_turns
from benchmarks.workload import Work, is_large, make_works, packed_batches, padded_batches
from vecd.model.card import ModelCard, read_card
from vecd.shm.output import MAX_BATCH_TOKENS
from vecd.workers.batch import Engine
from vecd.workers.families import FUSED_FAMILIES

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
    sections: Sequence[str]
    """Whose works are measured: "equal", "mixed"."""
    num_rounds: int
    turn_s: float
    tell: Tell
    clock: Clock = time.perf_counter
    """time.process_time leaves out what other programs take of the core, but not what they take of its caches."""
    processor: str = field(default_factory=processor_class)

    def fight(self, dtypes: Sequence[str]) -> None:
        """Measure every work of the sections in every format. What cannot be measured here is said on stderr, and left
        out."""
        torch.set_num_threads(1)
        card = read_card(self.model_folder)
        peers = Peers(self.model_folder, has_memory_for_all=not is_large(card))
        (self.folder / "cache").mkdir(mode=0o700)
        for dtype in dtypes:
            try:
                self._fight(card, dtype, peers)
            except NotMeasurable as error:
                _say(error)

    def _fight(self, card: ModelCard, dtype: str, peers: Peers) -> None:
        """Raises NotMeasurable. Side effect: the engines of a format are gone before the next one's are loaded."""
        contest = CONTESTS[dtype]
        works = [work for work in make_works(card) if work.section in self.sections]
        config = AutoConfig.from_pretrained(card.weights_folder)
        engine = load_vecd(card, dtype, self.folder / "cache")
        rivals = _load_peers(peers, contest)
        ratios: dict[str, list[list[float]]] = defaultdict(list)
        for work in works:
            ours = _ours(engine, work, card.dim)
            contenders = {_VECD: ours, **_rivals(ours, rivals, work, self.clock)}
            for name, of_rounds in self._measure(work, dtype, contest, contenders, config).items():
                if work.section == "equal":
                    ratios[name].append(of_rounds)
        num_equal = sum(work.section == "equal" for work in works)
        for name in [name for name, of_works in ratios.items() if len(of_works) == num_equal]:
            self.tell(self._geometric_mean(dtype, contest, name, ratios[name]))

    def _measure(
        self, work: Work, dtype: str, contest: Contest, contenders: Mapping[str, Contender], config: PretrainedConfig
    ) -> dict[str, list[float]]:
        """vecd's speed ÷ each peer's, of each round."""
        passes = {name: contender.run for name, contender in contenders.items()}
        has_flop = config.model_type in FUSED_FAMILIES and hasattr(config, "intermediate_size")  # T5 calls it d_ff
        if work.name == "mixed" and contest.linear_dtype and has_flop:
            passes[_LINEAR] = linear_pass(contest.linear_dtype)
        neighbours = Neighbours()
        seconds = take_turns(passes, self.num_rounds, self.turn_s, self.clock)
        others_cores = neighbours.cores()
        if _LINEAR in passes:
            self.tell(_linear_finding(work, dtype, contest, config, seconds, others_cores))
        unit = "ms" if work.is_latency else "tokens/s"
        figures = {name: _figures(work, of_rounds) for name, of_rounds in seconds.items() if name in contenders}
        ratios = {name: paired_ratios(seconds[name], seconds[_VECD]) for name in contenders if name != _VECD}
        for name, of_rounds in ratios.items():
            self.tell(
                Finding(
                    section=work.section,
                    work=_title(work),
                    dtype=dtype,
                    unit=unit,
                    ours=statistics.median(figures[_VECD]),
                    peer=f"{name} {contest.peers[name]}",
                    theirs=statistics.median(figures[name]),
                    ratio=statistics.median(of_rounds),
                    interval=median_interval(of_rounds),
                    target=contest.target(work.name, name, self.processor),
                    others_cores=others_cores,
                    details=_rounds(figures[_VECD], figures[name])
                    | {"engine": contenders[_VECD].details}
                    | contenders[name].details,
                )
            )
        return ratios

    def _geometric_mean(self, dtype: str, contest: Contest, name: str, ratios: Sequence[Sequence[float]]) -> Finding:
        """`ratios`: of each work, those of its rounds."""
        means = [statistics.geometric_mean(of_round) for of_round in zip(*ratios, strict=True)]
        is_first = name == next(iter(contest.peers))
        return Finding(
            section="equal",
            work="geometric mean of the above",
            dtype=dtype,
            unit="×",
            ours=statistics.median(means),
            peer=f"{name} {contest.peers[name]}",
            ratio=statistics.median(means),
            interval=median_interval(means),
            target=contest.geometric_mean if is_first else None,
            others_cores=0.0,
        )


def _load_peers(peers: Peers, contest: Contest) -> dict[str, list[Peer]]:
    """All variants of each, without peers that this model cannot be exported for."""
    found = {}
    for name, dtype in contest.peers.items():
        try:
            found[name] = peers.load(name, dtype)
        except NotExportable as error:
            _say(f"{name} is left out: {error}")
    return found


def _rivals(ours: Contender, peers: Mapping[str, Sequence[Peer]], work: Work, clock: Clock) -> dict[str, Contender]:
    """Each peer at its best, without those whose vectors are not vecd's."""
    found = {}
    for name, variants in peers.items():
        best = _best(variants, work, clock)
        least = float((ours.vectors() * best.vectors()).sum(axis=1).min())
        if least >= _MIN_COSINE:
            found[name] = replace(best, details={**best.details, "least_cosine": round(least, 6)})
        else:
            _say(f"{name} is left out of {_title(work)}: cosine {least:.4f} with vecd's vectors")
    return found


def _say(what: object) -> None:
    print(f"benchmarks.engine: {what}", file=sys.stderr, flush=True)


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


def _best(variants: Sequence[Peer], work: Work, clock: Clock) -> Contender:
    """The fastest of a peer's variants and batch sizes for this work, found in a quick first look."""
    candidates = {(peer.variant, size): _theirs(peer, work, size) for peer in variants for size in work.batch_sizes}
    return candidates[fastest({key: candidate.run for key, candidate in candidates.items()}, clock=clock)]


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
    ratios = paired_ratios(ours, theirs)
    return Finding(
        section=work.section,
        work=f"{_title(work)}: linear and attention FLOPs of real tokens",
        dtype=dtype,
        unit="GFLOP/s",
        ours=statistics.median(ours),
        peer=f"{LINEAR_NAME} {contest.linear_dtype}",
        theirs=statistics.median(theirs),
        ratio=statistics.median(ratios),
        interval=median_interval(ratios),
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
    num_texts = len(work.sequences)
    if len(set(work.lengths)) > 1:
        return f"mixed lengths ({num_texts} texts, {work.num_tokens} tokens)"
    return f"{num_texts} text{'s' * (num_texts > 1)} of {work.lengths[0]} tokens"
