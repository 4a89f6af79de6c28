"""The nodes of a fleet compared: what each says of its models, and what it makes of the same texts.

Owns the requests to a node, and the decision which nodes differ: those that are not with the majority, and all where
there is none. Prints nothing. Called by `vecd.launch.check.fleet_command`.
"""

import asyncio
import base64
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from vecd.client.connection import (
    BadResponse,
    ClientConnection,
    Target,
    TlsMismatch,
    check_not_tls,
    connect,
    name_failure,
    render_request,
)

TEXTS = (
    "The ferry to the island leaves at half past six in the morning.",
    "She repaired the old radio with parts from two broken ones.",
    "Interest rates were left unchanged for the third month in a row.",
    "Boil the potatoes for twenty minutes before you peel them.",
    "The defendant has thirty days to appeal against the decision.",
    "A cold front will bring heavy rain to the coast on Thursday.",
    "He could not remember where he had parked the car.",
    "The enzyme loses its activity above sixty degrees.",
    "Their second album sold better than anyone had expected.",
    "Please restart the router and wait until the light is green.",
    "The bridge was closed because of cracks in two of its cables.",
    "Wolves returned to the valley after more than a century.",
    "The function returns an empty list if no file was found.",
    "Our guide spoke four languages and knew every street.",
    "The patient was given antibiotics and recovered within a week.",
    "Tickets for children under twelve cost half the price.",
    "The goalkeeper saved a penalty in the last minute.",
    "This translation keeps the rhythm of the original poem.",
    "The company will hire two hundred engineers next year.",
    "Light from that galaxy has travelled for two billion years.",
)
"""What every node is sent."""
MIN_COSINE = 0.9999
"""Of the vectors of one text by two nodes with one number format."""
MAX_SCORE_DIFFERENCE = 0.01
"""Of the scores of one text, between 0 and 1 for most models."""
_TRIES, _PAUSE_S = 3, 1.0
_BUSY = (429, 503)
_IDENTITY_TRIES = 10
"""A server that has just started may be reading its weights."""
_MAX_SHOWN_BYTES = 200
# Without the tokens of a batch, which follow from the hardware.
_LIMITS = ("max_inputs", "max_body_bytes", "max_requests", "max_wait_s", "max_priority", "overflow")
_OF_MODEL = ("max_tokens", "capabilities", "dimensions", "pooling", "normalized", "prompt", "prompts", "matryoshka",
             "alias_defaults", "alias_identities")  # fmt: skip
_OF_TEI = {"max_input_length": "max_tokens", "max_client_batch_size": "max_inputs", "model_dtype": "dtype"}
"""What `/info` says to those who are no operators, and what it is called otherwise."""

Floats: TypeAlias = NDArray[np.float64]


class NodeFailed(Exception):
    """Raised for a node that does not answer as it has to. The message says how, in one line."""


@dataclass(slots=True)
class NodeModel:
    """What a node says of one model, and what it computes with it."""

    facts: dict[str, Any]
    """Among them "identity" and "dtype"."""
    rows: list[Floats]
    """A vector for each of TEXTS, or one with the scores of all."""
    are_scores: bool


@dataclass(slots=True)
class Node:
    target: Target
    url: str
    """As it was given."""
    error: str = ""
    """Why nothing is known of it; empty if all is."""
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


async def ask_all(nodes: Sequence[Node], api_key: str | None, timeout_s: float) -> None:
    """Fill each node, all at the same time."""
    await asyncio.gather(*(_ask(node, api_key, timeout_s) for node in nodes))


async def _ask(node: Node, api_key: str | None, timeout_s: float) -> None:
    try:
        await _Questions(node.target, api_key, timeout_s).fill(node)
    except NodeFailed as error:
        node.error = str(error)
    except (LookupError, StopIteration, TypeError, ValueError) as error:
        node.error = f"its answers are not those of a vecd server of this version ({type(error).__name__}: {error})"


class _Questions:
    """Requests to one node, one after the other on one connection."""

    def __init__(self, target: Target, api_key: str | None, timeout_s: float) -> None:
        self._target, self._api_key, self._timeout_s = target, api_key, timeout_s
        self._connection: ClientConnection | None = None

    async def fill(self, node: Node) -> None:
        """Raises NodeFailed, and KeyError, TypeError or ValueError for answers of another shape."""
        try:
            listed = (await self._get("/v1/models"))["data"]
            names = list(dict.fromkeys(str(each["root"]) for each in listed))
            for name in names:
                prefix = f"/m/{quote(name)}" if len(names) > 1 else ""
                capabilities = next(each["capabilities"] for each in listed if each["root"] == name)
                rows, are_scores = await self._compute(prefix, name, capabilities)
                # Only now: a model that is loaded on demand has no number format before.
                own, info = await self._describe(prefix, name), await self._get(f"{prefix}/info")
                node.version = str(info["version"])
                node.models[name] = NodeModel(_facts_of(own, info), rows, are_scores)
        finally:
            if self._connection is not None:
                self._connection.close()

    async def _describe(self, prefix: str, model: str) -> dict[str, Any]:
        """The model's entry of `/v1/models`. Raises NodeFailed if its identity does not become known."""
        for attempt in range(_IDENTITY_TRIES):
            if attempt:
                await asyncio.sleep(_PAUSE_S)
            described = (await self._get(f"{prefix}/v1/models"))["data"]
            own: dict[str, Any] = next(each for each in described if each["id"] == model)
            if own["identity"] is not None:
                return own
        raise NodeFailed(f"cannot be compared: the identity of {model} is not known there")

    async def _compute(self, prefix: str, model: str, capabilities: Sequence[str]) -> tuple[list[Floats], bool]:
        """The rows of TEXTS by the first thing that the model can do, and whether these are scores."""
        first = capabilities[0]
        if first == "dense":
            body = {"model": model, "input": TEXTS, "encoding_format": "base64"}
            data = (await self._post(f"{prefix}/v1/embeddings", body))["data"]
            rows = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4").astype(np.float64) for each in data]
            return rows, False
        if first == "sparse":
            found = await self._post(f"{prefix}/embed_sparse", {"inputs": TEXTS})
            pairs = [{entry["index"]: entry["value"] for entry in text} for text in found]
            rows = [np.zeros(1 + max(each, default=0)) for each in pairs]
            for row, each in zip(rows, pairs, strict=True):
                row[list(each)] = list(each.values())
            return rows, False
        if first in ("classify", "token-classify"):
            # A list of texts may be a pair to a model that classifies texts.
            inputs = [[text] for text in TEXTS] if first == "classify" else TEXTS
            found = await self._post(f"{prefix}/predict", {"inputs": inputs})
            return [np.array(sorted(_numbers(text))) for text in found], True
        ranked = await self._post(f"{prefix}/rerank", {"model": model, "query": TEXTS[0], "documents": TEXTS[1:]})
        results = ranked["results"] if isinstance(ranked, dict) else ranked
        scores = {each["index"]: each.get("relevance_score", each.get("score")) for each in results}
        return [np.array([scores[index] for index in sorted(scores)], np.float64)], True

    async def _get(self, path: str) -> Any:
        return await self._exchange(path, None)

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return await self._exchange(path, json.dumps(body).encode())

    async def _exchange(self, path: str, body: bytes | None) -> Any:
        """The JSON of the answer. Raises NodeFailed."""
        request = render_request(self._target, path, body, api_key=self._api_key, user_agent="vecd-check")
        for attempt in range(1, _TRIES + 1):
            try:
                if self._connection is None or not self._connection.is_open:
                    self._connection = await connect(self._target, self._timeout_s)
                response = await self._connection.exchange(request, self._timeout_s)
            except TlsMismatch as error:
                raise NodeFailed(str(error)) from None
            except (OSError, BadResponse) as error:
                await self._check_tls()
                raise NodeFailed(f"cannot be reached: {name_failure(error)}") from None
            if response.status not in _BUSY or attempt == _TRIES:
                break
            await asyncio.sleep(_PAUSE_S)
        if response.status in (401, 403):
            raise NodeFailed(f"answers {response.status} at {path}: give a key with --api-key or VECD_API_KEY")
        if response.status != 200:
            said = response.body[:_MAX_SHOWN_BYTES].decode(errors="replace")
            raise NodeFailed(f"answers {response.status} at {path}: {' '.join(said.split())}")
        return json.loads(response.body)

    async def _check_tls(self) -> None:
        try:
            await check_not_tls(self._target)
        except TlsMismatch as error:
            raise NodeFailed(str(error)) from None


def _numbers(value: Any) -> list[float]:
    """All scores in an answer of `/predict`."""
    if isinstance(value, dict):
        return [float(value["score"])]
    return [number for part in value for number in _numbers(part)]


def _facts_of(own: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, Any]:
    """`own`: the model's entry of `/v1/models`."""
    identity = own["identity"]
    facts: dict[str, Any] = {name: info[theirs] for theirs, name in _OF_TEI.items()}
    facts |= {"identity": identity, "capabilities": own["capabilities"]}
    if "model" in info:  # to operators
        described, limits = info["model"], info["limits"]
        facts |= {name: described.get(name) for name in _OF_MODEL} | {name: limits[name] for name in _LIMITS}
    facts["dtype"] = identity.partition(";dtype=")[2]
    return facts


# --- comparing --------------------------------------------------------------------------------------------------


def compare(nodes: Sequence[Node]) -> list[Difference]:
    """What differs among the nodes that have answered."""
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
