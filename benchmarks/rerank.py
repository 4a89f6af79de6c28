"""The speed of rerank beside other servers, and what it leaves to interactive requests: `make bench-rerank`.

Owns the order of the sections, and the servers' turns at the same requests. Fairness is `benchmarks.fairness`';
findings are recorded as those of `benchmarks.engine`, and shown on the same page. Called as
`python -m benchmarks.rerank`.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import orjson

from benchmarks.alone import Experiment, compare
from benchmarks.checkpoints import save_cross_encoder
from benchmarks.cpu import Neighbours, await_asleep
from benchmarks.engine import RESULTS, parse_names, record
from benchmarks.fairness import measure_fairness
from benchmarks.findings import Finding, Journal, rounded
from benchmarks.machine import commit_of, num_cores
from benchmarks.pairs import EQUAL, MIXED, PATH, DocumentLengths, RerankBody, TextSource
from benchmarks.recipes import Unavailable, cross_encoder, infinity_of
from benchmarks.servers import Recipe, Server, ServerFailure, announcing, serving
from benchmarks.steady import NUM_CLIENTS, SteadyLoad
from benchmarks.targets import RERANK_EQUAL, RERANK_MIXED, Target
from benchmarks.turns import alternate

_NUM_BODIES = 208
"""Those that are sent once, and so many that none comes again within minutes."""
_MAX_DIFFERENCE = 1e-4
"""Of a peer's logits to vecd's."""
_TIMEOUT_S = 120.0
_LOOK_S = 6.0
"""At each way to run FastAPI, to find the faster one."""
_SEED = 0
_FLAGS = ("--max-wait", "600")
"""Of vecd: peers refuse nobody, however slow the machine is."""


@dataclass(frozen=True, slots=True)
class Mix:
    title: str
    lengths: DocumentLengths
    target: Target


MIXES: Mapping[str, Mix] = {
    "mixed": Mix("documents of 20–400 tokens, 100 on average", MIXED, RERANK_MIXED),
    "equal": Mix("documents of 100 tokens", EQUAL, RERANK_EQUAL),
}


def measure_rerank(experiment: Experiment, mixes: Sequence[str], peers: Sequence[str]) -> Iterator[Finding]:
    """Each of `mixes`, against each of `peers`, of PEERS, and against `experiment.base`. A peer that cannot be
    had, or whose scores are others, is said on stderr, and left out. Raises ServerFailure."""
    source = TextSource(experiment.model, _SEED)
    bodies = {name: [source.body(mix.lengths) for _ in range(_NUM_BODIES)] for name, mix in MIXES.items()}
    with ExitStack() as stack:
        ours = stack.enter_context(experiment.serving(*experiment.flags))
        servers = {"vecd": ours}
        details: dict[str, dict[str, object]] = {}
        if experiment.base is not None:
            flags = ("--dtype", "float32", "--cache-dir", str(experiment.folder), *experiment.flags)
            base = announcing(*flags, model=str(experiment.model), checkout=experiment.base)
            servers[f"vecd {commit_of(experiment.base)}"] = stack.enter_context(base)
        for name in peers:
            try:
                _say(f"starting {name} …")
                recipe, facts = PEERS[name](experiment.model, bodies["mixed"])
                server = stack.enter_context(serving(recipe))
                samples = [of_mix[0] for of_mix in bodies.values()]
                facts["largest_difference"] = rounded(require_same_scores(ours, server, samples))
            except (Unavailable, ServerFailure) as error:
                _say(f"{name} is left out: {error}")
            else:
                title = f"{name} {recipe.version}, {recipe.remark}"
                servers[title], details[title] = server, facts
        sessions = [server.session for server in servers.values()]
        for name in mixes:
            mix = MIXES[name]
            await_asleep(sessions)
            neighbours = Neighbours(sessions)
            rates = _take_turns(servers, bodies[name], experiment)
            others_cores = neighbours.cores()
            work = f"{NUM_CLIENTS} clients, {len(bodies[name][0].documents)} documents in a request, {mix.title}"
            for title in list(servers)[1:]:
                facts = details.get(title, {}) | {"others_cores": others_cores}
                unit = "documents/s"
                yield compare("rerank", work, rates["vecd"], title, rates[title], mix.target, facts, unit=unit)


def _say(what: object) -> None:
    print(f"benchmarks.rerank: {what}", file=sys.stderr, flush=True)


def _take_turns(
    servers: Mapping[str, Server], bodies: Sequence[RerankBody], experiment: Experiment
) -> dict[str, list[float]]:
    """Documents per second of each server, round by round."""
    with ExitStack() as stack:
        loads = {
            name: stack.enter_context(closing(SteadyLoad(server, bodies, stops=not name.startswith("vecd"))))
            for name, server in servers.items()
        }
        return alternate(
            {name: partial(load.turn, experiment.turn_s) for name, load in loads.items()}, experiment.num_rounds
        )


# --- peers ------------------------------------------------------------------------------------------------------


def _infinity(model: Path, _: Sequence[RerankBody]) -> tuple[Recipe, dict[str, object]]:
    return infinity_of(str(model)), {}


def _fastapi(model: Path, bodies: Sequence[RerankBody]) -> tuple[Recipe, dict[str, object]]:
    """The faster of a process with a thread for each core, and one process with as many threads."""
    recipes = [cross_encoder(str(model), num_cores(), 1), cross_encoder(str(model), 1, num_cores())]
    rates = []
    for recipe in recipes:
        with serving(recipe) as server, closing(SteadyLoad(server, bodies, stops=False)) as load:
            rates.append(load.turn(_LOOK_S))
            _say(f"{recipe.remark}: {rates[-1]:.1f} documents/s")
    looks = {recipe.remark: rounded(rate) for recipe, rate in zip(recipes, rates, strict=True)}
    return recipes[rates.index(max(rates))], {"looks": looks}


PEERS: Mapping[str, Callable[[Path, Sequence[RerankBody]], tuple[Recipe, dict[str, object]]]] = {
    "infinity": _infinity,
    "fastapi": _fastapi,
}
"""How each is run, as a recipe, and what belongs to its findings. Each raises Unavailable or ServerFailure."""


def require_same_scores(ours: Server, theirs: Server, bodies: Sequence[RerankBody]) -> float:
    """The largest difference of a logit. Raises ServerFailure when it is too large, or a server fails."""
    differences = []
    for body in bodies:
        expected, found = (_scores(server, body) for server in (ours, theirs))
        differences.append(max(abs(expected[index] - found[index]) for index in range(len(body.documents))))
    if max(differences) > _MAX_DIFFERENCE:
        raise ServerFailure(f"its scores differ from vecd's by up to {max(differences):.2g}")
    return max(differences)


def _scores(server: Server, body: RerankBody) -> dict[int, float]:
    """By the index of the document."""
    data = orjson.dumps({"query": body.query, "documents": list(body.documents), "raw_scores": True})
    request = urllib.request.Request(f"{server.url}{PATH}", data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            results = orjson.loads(response.read())["results"]
        return {result["index"]: result["relevance_score"] for result in results}
    except (urllib.error.URLError, OSError, ValueError, LookupError) as error:
        raise ServerFailure(f"it ranks nothing: {error!r}") from error


# --- the command ------------------------------------------------------------------------------------------------

SECTIONS = ("rerank", "fairness")


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 measured (whatever the figures), 1 something failed, 2 bad arguments, 130 interrupted."""
    arguments = _make_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as an exception: servers are stopped
    experiment = {"rounds": arguments.rounds, "turn_s": arguments.seconds}
    journal = Journal(arguments.results, "minilm cross-encoder", experiment)
    with tempfile.TemporaryDirectory(prefix="vecd-bench-") as name:
        folder = Path(name)
        try:
            model = save_cross_encoder(folder / "model")
        except (ServerFailure, OSError, subprocess.CalledProcessError) as error:
            _say(error)
            return 2
        return record(_measure(arguments, model, folder), journal, arguments.results)


def _measure(arguments: argparse.Namespace, model: Path, folder: Path) -> Iterator[Finding]:
    experiment = Experiment(
        model=model,
        num_rounds=arguments.rounds,
        turn_s=arguments.seconds,
        flags=(*_FLAGS, *arguments.flags.split()),
        folder=folder,
        base=arguments.base and arguments.base.resolve(),
    )
    if "rerank" in arguments.sections:
        yield from measure_rerank(experiment, arguments.mixes, arguments.peers)
    if "fairness" in arguments.sections:
        yield from measure_fairness(experiment)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rerank",
        description="Measure rerank against other servers, in turns, and beside interactive requests.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--sections", type=lambda value: parse_names(value, SECTIONS), default="rerank", help="what is measured")
    add(
        "--peers",
        type=lambda value: parse_names(value, PEERS) if value else [],
        default=",".join(PEERS),
        help="servers that vecd is measured against; '' for none",
    )
    add("--mixes", type=lambda value: parse_names(value, MIXES), default=",".join(MIXES), help="lengths of documents")
    add("--rounds", type=int, default=5, metavar="N", help="turns of each server")
    add("--seconds", type=float, default=5.0, metavar="S", help="least length of a turn")
    add("--flags", default="", help="of vecd; write --flags='…'")
    add("--base", type=Path, metavar="FOLDER", help="a checkout of a commit of vecd that is measured, too")
    add("--results", type=Path, default=RESULTS, metavar="FOLDER", help="where the findings are recorded")
    return parser


if __name__ == "__main__":
    sys.exit(main())
