"""The order in which `vecd check` loads, compares and measures a model, each engine in a process of its own.

Owns the texts, how many of them a model can afford, the turns in which dtypes are measured, and the words for why a
path was chosen. What happens in the processes is `vecd.workers.check.orders`'s. Called by `vecd.launch.check.command`.
"""

import importlib.metadata
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

from vecd.client.bench.texts import FixedWords, draw_text
from vecd.launch.check.children import Child
from vecd.launch.check.report import Machine, Measurements, Model, Parity, Path, Scaling, Speed
from vecd.launch.config.plan import Plan
from vecd.launch.processes.children import self_command
from vecd.shm.batch_limits import FULL_BATCH_S, MAX_BATCH_TOKENS
from vecd.shm.card import ModelError
from vecd.workers.config import WorkerConfig

_ROUNDS = 5
_SHORT_TOKENS, _LONG_TOKENS = 24, 256
_LARGER_BATCHES = (4096, 8192)
_MAX_SEQUENCES = 512
_PILOT_TOKENS, _PILOT_S = 256, 0.1

_AFFORDABLE = 5e11
"""Products of weights for all texts together: some 10 s on a core."""
_LEAST_TOKENS = 500
_MAX_TEXTS = 200
_WORDS = (1, 8, 180, 3, 25, 400, 12, 50, 5, 100, 2, 35)
_ROUNDS_OF_TEXTS = 3
_LONG_WORDS = 1500
_AWKWARD = (
    "Ünïcödé, ﬁ ligatures and e\u0301 combining",
    "你好，世界。这是一个测试。",
    "🙂🙃 👩‍👩‍👧‍👦 🇪🇺",
    "https://example.org/a?b=c&d=%20#e f(x) = x**2; // 3.14159e-10",
    "   blanks \t and\n\nlines   ",
    "word" * 60,
)
_MISSING = (
    "not compared with sentence-transformers, which is not installed: pip install sentence-transformers to have it"
)
_TIMEOUT_S = 600.0
_USED_MEMORY = 0.8

_ATTENTION = {
    "fused": "SDPA over runs of texts of equal length",
    "packed": "SDPA over runs of texts of equal length, in the place of transformers' own",
    "padded": "transformers' own, with a mask over the padding",
    "unpadded": "transformers' own, over texts of equal length, without padding",
}

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wishes:
    texts: tuple[str, ...]
    """The user's; empty for the built-in ones."""
    is_quick: bool
    seconds: float
    """For each dtype and length of text, over all rounds."""


def load_and_compare(
    stack: ExitStack, plan: Plan, model: Model, wishes: Wishes, say: Say
) -> tuple[Child, Path, list[str]]:
    """The served engine's process, which lives as long as `stack`; what is known of its path; and warnings.

    Raises ModelError for whatever keeps the model from being served.
    """
    config, timeout_s = plan.workers[0], max(_TIMEOUT_S, plan.settings.start_timeout)
    texts, sequences, warnings = _tokenized(plan, model, wishes, say)
    child = stack.enter_context(Child("check", say))
    not_finite = child.ask(timeout_s, do="scan", card=config.card.to_json())["not_finite"]
    if not_finite:
        more = f" and {len(not_finite) - 1} more" if len(not_finite) > 1 else ""
        raise ModelError(f"{not_finite[0]}{more}: weights are not finite (nan or infinity)")
    loaded = child.ask(timeout_s, do="load", config=config.to_json(), choose_command=self_command("choose"))
    path = _path(config, loaded, child.ask(timeout_s, do="native")["dtypes"])
    folder = FilePath(stack.enter_context(tempfile.TemporaryDirectory(prefix="vecd-check-")))
    agreements, not_compared = _compare(child, folder, plan, model, path, texts, sequences, say)
    return child, replace(path, agreements=tuple(agreements), not_compared=tuple(not_compared)), warnings


# --- texts ------------------------------------------------------------------------------------------------------


def built_in_texts() -> list[str]:
    """Of 1 to 400 words, some that are awkward, and a long one: the same ones every time."""
    rng = random.Random(0)
    texts = [draw_text(FixedWords(num_words), rng) for num_words in _WORDS * _ROUNDS_OF_TEXTS]
    return [*texts, *_AWKWARD, draw_text(FixedWords(_LONG_WORDS), rng)]


def affordable(lengths: Sequence[int], num_parameters: int) -> int:
    """Of texts of so many tokens, how many from the first on can be compared with a model of this size; at least 1."""
    most = max(_LEAST_TOKENS, int(_AFFORDABLE / max(1, num_parameters)))
    total = 0
    for count, length in enumerate(lengths):
        total += length
        if count >= _MAX_TEXTS or (count and total > most):
            return count
    return len(lengths)


def _tokenized(plan: Plan, model: Model, wishes: Wishes, say: Say) -> tuple[list[str], list[list[int]], list[str]]:
    """Texts, their token ids, and warnings. Raises ModelError."""
    texts = list(wishes.texts[: _MAX_TEXTS + 1]) or built_in_texts()
    say("tokenizing")
    with Child("check_tokens", say) as child:
        card, max_tokens = plan.gateway.card.to_json(), plan.gateway.max_tokens
        result = child.ask(_TIMEOUT_S, do="tokenize", card=card, max_tokens=max_tokens, texts=texts)
    sequences: list[list[int]] = result["sequences"]
    count = affordable([len(ids) for ids in sequences], model.num_parameters)
    warnings = []
    if wishes.texts and count < len(wishes.texts):
        warnings.append(f"of {len(wishes.texts)} texts the first {count} were compared, to bound the time")
    if result["num_truncated"] and wishes.texts:
        warnings.append(f"{result['num_truncated']} of the texts are longer than {max_tokens} tokens, and were cut")
    return texts[:count], sequences[:count], warnings


# --- the path ---------------------------------------------------------------------------------------------------


def _path(config: WorkerConfig, loaded: dict[str, Any], native: Sequence[str]) -> Path:
    facts = loaded["facts"]
    gpu = f" ({facts['gpu']})" if "gpu" in facts else ""
    return Path(
        path=facts["path"],
        dtype=facts["dtype"],
        device=config.device + gpu,
        attention=_attention(facts["path"], facts["dtype"], config.device),
        reasons=(_why_path(config, facts["path"], loaded["not_fused"]), _why_dtype(config, facts["dtype"], native)),
        refused=tuple(loaded["warnings"]),
        probes=facts.get("agreement", {}),
        is_remembered=loaded["is_remembered"],
        choosing_s=loaded["choosing_s"],
        load_s=loaded["load_s"],
        shared_mb=loaded["shared_mb"],
    )


def _attention(path: str, dtype: str, device: str) -> str:
    if path == "packed" and device.startswith("cuda"):
        return "torch's variable-length attention where the GPU has it, else SDPA"
    # Source: vecd.workers.engines.torch.fused.
    is_long_by_products = path == "fused" and dtype in ("bfloat16", "int8")
    return _ATTENTION.get(path, "unknown") + ("; oneDNN's products for long ones" if is_long_by_products else "")


def _why_path(config: WorkerConfig, path: str, not_fused: str) -> str:
    if config.engine != "auto":
        return f"--engine {config.engine} was given"
    match path:
        case "fused":
            return f"fused: {config.card.model_type} is a family that it takes, and it agrees with the plain model"
        case "packed":
            return f"packed: {not_fused}; it agrees with the plain model, and is the next fastest"
    return f"{path}: {not_fused}, and packed is refused"


def _why_dtype(config: WorkerConfig, dtype: str, native: Sequence[str]) -> str:
    if config.dtype != "auto":
        return f"{dtype}: --dtype {config.dtype} was given" + ("" if dtype == config.dtype else ", and cannot be had")
    if dtype != "float32":
        return f"{dtype}: computed natively here, and it agrees with the plain model"
    if config.device == "cpu" and "bfloat16" not in native:
        return "float32: the processor does not compute bfloat16 natively"
    return "float32: a shorter type is refused"


# --- agreement --------------------------------------------------------------------------------------------------


def _compare(
    child: Child, folder: FilePath, plan: Plan, model: Model, path: Path, texts: list[str],
    sequences: list[list[int]], say: Say,
) -> tuple[list[Parity], list[str]]:  # fmt: skip
    """With the plain model and with sentence-transformers, one after the other in a process of theirs. Raises
    ModelError for vectors that are none, and when the plain model cannot be run."""
    vectors = str(folder / "vectors.npy")
    say(f"embedding {len(texts)} texts")
    if not child.ask(_TIMEOUT_S, do="embed", sequences=sequences, path=vectors)["has_all"]:
        raise ModelError(f"{model.folder}: the vectors of some texts contain nan or infinity")
    config, lengths = replace(plan.workers[0], device="cpu"), [len(ids) for ids in sequences]
    common = {"vectors": vectors, "vectors_dtype": path.dtype}
    found: list[Parity] = []
    version, dtype = _version_of("sentence-transformers"), _plain_dtype(plan, model, path)
    with Child("check", say) as others:
        order: dict[str, Any] = {"config": config.to_json(), "dtype": dtype, "sequences": sequences}
        result = others.ask(_TIMEOUT_S, do="compare_plain", **order, **common)
        found.append(_agreement(f"the plain model in {dtype}", result))
        if version is None:
            return found, [_MISSING]
        order = {"folder": model.folder, "max_tokens": plan.gateway.max_tokens, "texts": texts, "lengths": lengths}
        try:
            result = others.ask(_TIMEOUT_S, do="compare_reference", **order, **common)
        except ModelError as error:  # or its death; the plain model's answer is here
            return found, [f"not compared with sentence-transformers {version}: {error}"]
        found.append(_agreement(f"sentence-transformers {version} in float32", result))
    return found, []


def _plain_dtype(plan: Plan, model: Model, path: Path) -> str:
    """float32, unless weights that are stored in a shorter type would not fit into memory twice over."""
    if path.dtype == "float32" or "float32" in model.weights_dtypes[:1]:
        return "float32"
    from vecd.launch.check.machine import read_machine

    needed_mb = 2 * 4 * model.num_parameters >> 20  # here and in sentence-transformers
    if needed_mb < _USED_MEMORY * read_machine().available_mb:
        return "float32"
    return "bfloat16" if path.dtype == "int8" else path.dtype


def _version_of(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _agreement(against: str, result: dict[str, Any]) -> Parity:
    return Parity(against=against, **{**result, "by_length": tuple(result["by_length"])})


# --- speed ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Case:
    """What is measured in turns with others."""

    child: Child
    dtype: str
    path: str
    text_tokens: int
    lengths: tuple[int, ...]
    batch_tokens: int
    """What was aimed at: whole texts come close to it."""
    num_workers: int = 1


class Speeds:
    """Measures dtypes, batches and numbers of workers in turns, so that what disturbs one disturbs all."""

    def __init__(
        self, stack: ExitStack, child: Child, plan: Plan, path: Path, machine: Machine, wishes: Wishes, say: Say
    ):
        self._stack = stack
        self._child = child
        self._plan = plan
        self._path = path
        self._machine = machine
        self._turn_s = wishes.seconds / _ROUNDS
        self._say = say
        self._not_measured: dict[str, str] = {}
        self._agreements = {path.dtype: path.probes}

    def measure(self) -> Measurements:
        """Raises ModelError when the served engine cannot be measured."""
        engines = [(self._child, self._path.dtype, self._path.path), *self._others()]
        max_tokens = self._plan.gateway.max_tokens
        cases: list[_Case] = []
        for child, dtype, path in engines:
            for text_tokens in sorted({min(_SHORT_TOKENS, max_tokens), min(_LONG_TOKENS, max_tokens)}):
                cases += self._cases(child, dtype, path, text_tokens)
        private_mb = max(self._turn(case, _PILOT_S)["private_mb"] for case in cases if case.child is self._child)
        cases += self._several_workers(cases, private_mb)
        turns: dict[_Case, list[dict[str, Any]]] = {case: [] for case in cases}
        for number in range(_ROUNDS):
            self._say(f"measuring, round {number + 1} of {_ROUNDS}")
            for case in cases:
                turns[case].append(self._turn(case, self._turn_s))
        return self._summed(turns)

    def _turn(self, case: _Case, turn_s: float) -> dict[str, Any]:
        return case.child.ask(
            _TIMEOUT_S, do="turn", num_workers=case.num_workers, lengths=list(case.lengths), turn_s=turn_s
        )

    def _others(self) -> Iterator[tuple[Child, str, str]]:
        """Engines of the other dtypes that the processor computes natively."""
        config = self._plan.workers[0]
        if config.device != "cpu":
            self._not_measured["others"] = "on GPUs the served type alone is measured"
            return
        native = self._child.ask(_TIMEOUT_S, do="native")["dtypes"]
        for dtype in ("float32", "bfloat16", "int8"):
            if dtype == self._path.dtype:
                continue
            if dtype not in native:
                self._not_measured[dtype] = "this processor does not compute it natively"
                continue
            self._say(f"loading the model in {dtype}")
            child = self._stack.enter_context(Child("check", self._say))
            order = replace(config, dtype=dtype).to_json()
            try:
                loaded = child.ask(_TIMEOUT_S, do="load", config=order, choose_command=self_command("choose"))
            except ModelError as error:
                self._not_measured[dtype] = str(error)
                continue
            if loaded["facts"]["dtype"] == dtype:
                self._agreements[dtype] = loaded["facts"].get("agreement", {})
                yield child, dtype, loaded["facts"]["path"]
            else:
                self._not_measured[dtype] = "; ".join(loaded["warnings"]) or "the model has no path for it"

    def _cases(self, child: Child, dtype: str, path: str, text_tokens: int) -> Iterator[_Case]:
        """A batch as it is served: no larger than what is computed in a quarter of a second; of the served type also
        larger ones, where the worker is fast enough for them."""
        pilot = _Case(child, dtype, path, text_tokens, _lengths(text_tokens, _PILOT_TOKENS), _PILOT_TOKENS)
        most = int(self._turn(pilot, _PILOT_S)["tokens_per_s"] * FULL_BATCH_S)
        sizes = [max(text_tokens, min(MAX_BATCH_TOKENS, most))]
        if child is self._child and text_tokens <= _SHORT_TOKENS:
            sizes += [size for size in _LARGER_BATCHES if size <= most]
        for size in sizes:
            yield replace(pilot, lengths=_lengths(text_tokens, size), batch_tokens=size)

    def _several_workers(self, cases: Sequence[_Case], private_mb: int) -> Iterator[_Case]:
        """As many as there are cores, physical and logical, where memory suffices."""
        if self._plan.workers[0].device != "cpu":
            return
        [case] = [case for case in cases if case.child is self._child][-1:]
        room_mb = _USED_MEMORY * self._machine.available_mb - self._path.shared_mb
        for count in sorted({self._machine.num_usable_physical_cores, self._machine.num_usable_cores} - {1}):
            if count * private_mb < room_mb:
                yield replace(case, num_workers=count)

    def _summed(self, turns: dict[_Case, list[dict[str, Any]]]) -> Measurements:
        speeds, scaling = [], []
        for case, results in turns.items():
            share = statistics.median(result["core_share"] for result in results)
            rates = [result["tokens_per_s"] for result in results]
            median = statistics.median(rates)
            if case.num_workers > 1:
                scaling.append(Scaling(case.num_workers, median, share))
                continue
            private_mb = max(result["private_mb"] for result in results)
            speeds.append(
                Speed(
                    case.dtype,
                    case.path,
                    case.text_tokens,
                    case.batch_tokens,
                    median,
                    min(rates),
                    max(rates),
                    private_mb,
                    share,
                )
            )
        if scaling:
            [alone] = [speed for speed in speeds if speed.dtype == self._path.dtype][-1:]
            scaling.insert(0, Scaling(1, alone.tokens_per_s, alone.core_share))
        return Measurements(tuple(speeds), tuple(scaling), self._not_measured, self._agreements, _ROUNDS, self._turn_s)


def _lengths(text_tokens: int, batch_tokens: float) -> tuple[int, ...]:
    return (text_tokens,) * max(1, min(_MAX_SEQUENCES, int(batch_tokens) // text_tokens))
