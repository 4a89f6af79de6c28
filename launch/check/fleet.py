"""`vecd check --fleet URL…`: what each node says of its models, and what it makes of the same texts.

Owns the requests to a node, and the decision which nodes differ: those that are not with the majority, and all where
there is none. Reads no settings of a server, and loads nothing.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vecd.base.failures import EXIT_BAD_CONFIGURATION, EXIT_OK
from vecd.base.files import JsonMapping, JsonObject
from vecd.base.flags import Command, TlsOptions, flag, parse
from vecd.base.target import Target, parse_target
from vecd.client.aio import AsyncClient
from vecd.client.bench.texts import Lengths, draw_texts
from vecd.client.exchanges import Piece, ServerError, VecdError
from vecd.client.sockets import TlsMismatch, name_failure

TEXTS = tuple(draw_texts(20, Lengths(12, 0.5), seed=0))
"""What every node is sent."""
MIN_COSINE = 0.9999
"""Of the vectors of one text by two nodes with one number format."""
MAX_SCORE_DIFFERENCE = 0.01
"""Of the scores of one text, between 0 and 1 for most models."""
_IDENTITY_TRIES = 10
"""A server that has just started may be reading its weights."""
_MAX_SHOWN_CHARS = 300
# Without the tokens of a batch, which follow from the hardware.
_LIMITS = ("max_inputs", "max_body_bytes", "max_requests", "max_wait_s", "max_priority", "overflow")
_OF_MODEL = ("max_tokens", "capabilities", "dimensions", "pooling", "normalized", "prompt", "prompts", "matryoshka",
             "alias_defaults", "alias_identities")  # fmt: skip
_OF_TEI = {"max_input_length": "max_tokens", "max_client_batch_size": "max_inputs", "model_dtype": "dtype"}
"""What `/info` says to those who are no operators, and what it is called otherwise."""

Floats: TypeAlias = NDArray[np.float64]


@dataclass(slots=True)
class NodeModel:
    """One model, as a node has it."""

    facts: JsonObject
    """Among them "identity" and "dtype"."""
    rows: list[Floats]
    """A vector for each of TEXTS, or one with the scores of all."""
    are_scores: bool


@dataclass(slots=True)
class Node:
    target: Target
    url: str
    error: str = ""
    """Why it is not compared, or ""."""
    version: str = ""
    models: dict[str, NodeModel] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Difference:
    """One node has something else than the majority, or than another where there is no majority."""

    url: str
    model: str
    """"" for what is not of a model."""
    what: str
    value: str
    others: str
    """What the majority has; where there is none, what all others have."""

    def __str__(self) -> str:
        of_model = f"{self.model}: " if self.model else ""
        return f"{self.url}: {of_model}{self.what} is {self.value}, elsewhere {self.others}"


# --- asking -----------------------------------------------------------------------------------------------------


async def ask_all(nodes: Sequence[Node], api_key: str | None, timeout_s: float, pause_s: float = 1.0) -> None:
    """Fill all nodes at the same time. `pause_s`: before a question is repeated."""
    await asyncio.gather(*(_fill(node, api_key, timeout_s, pause_s) for node in nodes))


async def _fill(node: Node, api_key: str | None, timeout_s: float, pause_s: float) -> None:
    """Side effects: `error` of the node is set if it does not answer as it has to."""

    def client_of(model: str | None) -> AsyncClient:
        # As long as three tries with pauses take.
        options = {"api_key": api_key, "timeout": timeout_s, "retry_for": 2 * pause_s}
        return AsyncClient.of_command(node.target, "vecd-check", model=model, **options)

    try:
        async with client_of(None) as listing:
            listed = (await listing.answer(Piece("/v1/models")))["data"]
            names = list(dict.fromkeys(str(each["root"]) for each in listed))
            for name in names:
                capabilities = next(each["capabilities"] for each in listed if each["root"] == name)
                async with client_of(name if len(names) > 1 else None) as client:
                    rows, are_scores = await _compute(client, capabilities)
                    # Only now: a model that is loaded on demand has no number format before.
                    own, info = await _describe(listing, name, pause_s), await client.info()
                node.version = str(info["version"])
                node.models[name] = NodeModel(_facts_of(own, info), rows, are_scores)
    except ServerError as error:
        node.error = f"its answers are not those of a vecd server of this version ({error})"
    except VecdError as error:
        node.error = _in_a_line(error)
    except (AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
        node.error = f"its answers are not those of a vecd server of this version ({type(error).__name__}: {error})"


async def _describe(client: AsyncClient, model: str, pause_s: float) -> JsonObject:
    """The model's entry of `/v1/models`. Raises VecdError if its identity does not become known."""
    for attempt in range(_IDENTITY_TRIES):
        if attempt:
            await asyncio.sleep(pause_s)
        described = (await client.answer(Piece("/v1/models")))["data"]
        own: JsonObject = {each["id"]: each for each in described}[model]
        if own["identity"] is not None:
            return own
    raise VecdError(f"cannot be compared: the identity of {model} is not known there")


async def _compute(client: AsyncClient, capabilities: Sequence[str]) -> tuple[list[Floats], bool]:
    """The rows of TEXTS by the first thing that the model can do, and whether these are scores."""
    match capabilities[0]:
        case "dense":
            return list((await client.embed(TEXTS)).astype(np.float64)), False
        case "sparse":
            found = await client.sparse(TEXTS)
            rows = [np.zeros(1 + int(each.indices.max(initial=0))) for each in found]
            for row, each in zip(rows, found, strict=True):
                row[each.indices] = each.values
            return rows, False
        case "classify" | "token-classify" as first:
            labels = await (client.classify(TEXTS) if first == "classify" else client.entities(TEXTS))
            return [np.array(sorted(label.score for label in each)) for each in labels], True
        case _:
            ranked = sorted(await client.rerank(TEXTS[0], TEXTS[1:]), key=lambda document: document.index)
            return [np.array([document.score for document in ranked], np.float64)], True


def _in_a_line(error: VecdError) -> str:
    if error.status in (401, 403):
        return f"answers {error.status}: give a key with --api-key or VECD_API_KEY"
    cause = error.__cause__ or error  # without the address, which is in front of the line
    if isinstance(cause, OSError) and not isinstance(cause, TlsMismatch | VecdError):
        return f"cannot be reached: {name_failure(cause)}"
    said = " ".join(str(cause).split())[:_MAX_SHOWN_CHARS]
    return said if error.status is None else f"answers {error.status}: {said}"


def _facts_of(own: JsonMapping, info: JsonMapping) -> JsonObject:
    identity = own["identity"]
    facts: JsonObject = {name: info[theirs] for theirs, name in _OF_TEI.items()}
    facts |= {"identity": identity, "capabilities": own["capabilities"]}
    if "model" in info:  # to operators
        described, limits = info["model"], info["limits"]
        facts |= {name: described.get(name) for name in _OF_MODEL} | {name: limits[name] for name in _LIMITS}
    facts["dtype"] = identity.partition(";dtype=")[2]
    return facts


# --- comparing --------------------------------------------------------------------------------------------------


def compare(nodes: Sequence[Node]) -> list[Difference]:
    nodes = [node for node in nodes if not node.error]
    found = _compare_values(nodes, "", "version", [node.version for node in nodes])
    found += _compare_values(nodes, "", "models", [", ".join(sorted(node.models)) for node in nodes])
    for model in dict.fromkeys(name for node in nodes for name in node.models):
        having = [node for node in nodes if model in node.models]
        facts = [node.models[model].facts for node in having]
        for what in dict.fromkeys(name for each in facts for name in each):
            # A caller without the scope for it is not told everything by each node.
            told = [(node, each[what]) for node, each in zip(having, facts, strict=True) if what in each]
            values = [_in_words(value) for _, value in told]
            found += _compare_values([node for node, _ in told], model, what, values)
        found += _compare_rows(having, model)
    return found


def _in_words(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, sort_keys=True, ensure_ascii=False)


def _compare_values(nodes: Sequence[Node], model: str, what: str, values: Sequence[str]) -> list[Difference]:
    counts = Counter(values)
    if len(counts) <= 1:
        return []
    [(commonest, num), *_] = counts.most_common()
    majority = commonest if 2 * num > len(nodes) else None
    return [
        Difference(node.url, model, what, value, majority or " or ".join(other for other in counts if other != value))
        for node, value in zip(nodes, values, strict=True)
        if value != majority
    ]


def _compare_rows(nodes: Sequence[Node], model: str) -> list[Difference]:
    likeness = [[likeness_of(a.models[model], b.models[model]) for b in nodes] for a in nodes]
    num_alike = [sum(is_alike for is_alike, _ in row) for row in likeness]
    if min(num_alike, default=0) == len(nodes):
        return []
    middle = num_alike.index(max(num_alike))
    has_majority = 2 * num_alike[middle] > len(nodes)
    found = []
    for index, node in enumerate(nodes):
        if has_majority and likeness[middle][index][0]:
            continue
        worst = min(likeness[index], key=lambda each: each[0])[1] if not has_majority else likeness[middle][index][1]
        what = "the scores of the texts" if node.models[model].are_scores else "the vectors of the texts"
        found.append(Difference(node.url, model, what, worst, "the same" if has_majority else "others, too"))
    return found


def likeness_of(one: NodeModel, other: NodeModel) -> tuple[bool, str]:
    """Whether the rows of the texts are the same, and by how much they differ at most, in words."""
    if len(one.rows) != len(other.rows) or one.are_scores != other.are_scores:
        return False, "of another kind"
    pairs = list(zip(one.rows, other.rows, strict=True))
    if one.are_scores:
        if any(a.shape != b.shape for a, b in pairs):
            return False, "of another number"
        largest = max((float(np.abs(a - b).max(initial=0.0)) for a, b in pairs), default=0.0)
        return largest <= MAX_SCORE_DIFFERENCE, f"off by up to {largest:.4f}"
    least = min((_cosine(a, b) for a, b in pairs), default=1.0)
    return least >= MIN_COSINE, f"at a cosine down to {least:.5f}"


def _cosine(a: Floats, b: Floats) -> float:
    """Also of rows of different lengths, as of sparse vectors without zeros at their ends."""
    length = max(a.size, b.size)
    a, b = np.pad(a, (0, length - a.size)), np.pad(b, (0, length - b.size))
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms else float(np.array_equal(a, b))


# --- the command ------------------------------------------------------------------------------------------------

EXIT_DIFFERENT, EXIT_UNREACHABLE = 1, EXIT_BAD_CONFIGURATION


@dataclass(frozen=True, kw_only=True)
class FleetOptions(TlsOptions):
    fleet: Sequence[str] = flag(
        (), "the nodes: http://host:port, https://host:port or unix:/path", names=("fleet",), word="URL"
    )
    json: bool = flag(False, "print the comparison as one JSON object")
    api_key: str | None = flag(
        None,
        "of all nodes; prefer the variable VECD_API_KEY. Without the scope metrics less is compared",
        word="KEY",
        variable="VECD_API_KEY",
    )
    timeout: float = flag(60.0, "seconds for each answer (60)", above=0, at_most=3600, unit="seconds")

    def __post_init__(self) -> None:
        if len(set(self.fleet)) < max(2, len(self.fleet)):
            raise ValueError(f"--fleet: takes two nodes or more, each once (given: {' '.join(self.fleet)})")
        self.nodes()

    def nodes(self) -> list[Node]:
        """Raises ValueError for an address."""
        return [
            Node(self.read_target(url) if url.startswith("https:") else parse_target(url), url) for url in self.fleet
        ]


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 the nodes may be mixed, 1 they differ, 2 bad arguments, or a node that cannot be asked."""
    options = parse(
        FleetOptions,
        [word.removeprefix("--fleet=") for word in argv if word != "--fleet"],
        Command(
            "vecd check",
            usage="vecd check --fleet URL URL… [--json] [--api-key KEY] [--ca FILE | --insecure] [--timeout SECONDS]",
            description="Compare the nodes of a fleet: identity, number format, version, settings, and what they make "
            f"of the same {len(TEXTS)} texts.",
        ),
    )
    nodes = options.nodes()
    asyncio.run(ask_all(nodes, options.api_key, options.timeout))
    differences = compare(nodes)
    if options.json:
        print(json.dumps(_as_json(nodes, differences), ensure_ascii=False))
    else:
        lines = [*(f"{node.url}: {node.error}" for node in nodes if node.error), *map(str, differences)]
        alike = f"All {len(nodes)} nodes may be mixed: they have one identity and the same settings."
        print("\n".join(lines or [alike]))
    if any(node.error for node in nodes):
        return EXIT_UNREACHABLE
    return EXIT_DIFFERENT if differences else EXIT_OK


def _as_json(nodes: Sequence[Node], differences: Sequence[Difference]) -> JsonObject:
    return {
        "is_uniform": not differences and not any(node.error for node in nodes),
        "differing": list(dict.fromkeys(each.url for each in differences)),
        "differences": [asdict(each) for each in differences],
        "nodes": [
            {
                "url": node.url,
                "error": node.error or None,
                "version": node.version or None,
                "models": {name: model.facts for name, model in node.models.items()},
            }
            for node in nodes
        ],
    }
