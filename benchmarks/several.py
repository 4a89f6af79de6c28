"""One server of several models: its configuration, and requests whose right responses are known.

Owns the TOML file, the shapes of requests and responses of each kind of model, and the comparison of a response with
what the model's own server has answered. Called by `benchmarks.models` and `benchmarks.trials`.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from benchmarks.alone import CHECKOUT
from benchmarks.loads import SHORT
from benchmarks.requests import SUCCESS, Exchange
from benchmarks.servers import Server, ServerFailure, announcing
from vecd.base.target import Target, parse_target
from vecd.client.bench.texts import draw_texts
from vecd.client.http import render_request

_MAX_DIFFERENCE = 1e-4
"""Of each figure of a response in float32: batches differ, and so does the order of sums."""
_MAX_VOCAB_SIZE = 1 << 18
_NUM_DOCUMENTS = 4
_OF_SEVERAL = ("load", "keep-alive")
"""Settings that say when a model is loaded: a server of it alone loads it at the start."""

Figures = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Kind:
    """What requests a model gets."""

    path: str
    """`{model}` in it is replaced: where the body has no field for it."""
    body: Callable[[Sequence[str]], dict[str, Any]]
    """Of the texts of one request, the query first."""
    figures: Callable[[Any], Figures]
    """Of the JSON of a response. Raises LookupError, TypeError or ValueError when it has none."""
    num_texts: int = 1
    """Of a request that `draw_requests` makes."""


def _embeddings(told: Any) -> Figures:
    return np.concatenate([np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in told["data"]])


def _scores(told: Any) -> Figures:
    by_index = {result["index"]: result["relevance_score"] for result in told["results"]}
    return np.array([by_index[index] for index in range(len(by_index))], np.float32)


def _weights(told: Any) -> Figures:
    weights = np.zeros(_MAX_VOCAB_SIZE, np.float32)
    for entry in told[0]:
        weights[entry["index"]] = entry["value"]
    return weights


KINDS: Mapping[str, Kind] = {
    "dense": Kind("/v1/embeddings", lambda texts: {"input": list(texts), "encoding_format": "base64"}, _embeddings),
    "rerank": Kind(
        "/v1/rerank",
        lambda texts: {"query": texts[0], "documents": list(texts[1:]), "raw_scores": True},
        _scores,
        1 + _NUM_DOCUMENTS,
    ),
    "sparse": Kind("/m/{model}/embed_sparse", lambda texts: {"inputs": texts[0]}, _weights),
}


@dataclass(frozen=True, slots=True)
class ModelTable:
    """A model of a server, as `[models.NAME]` of its configuration says."""

    name: str
    source: Path
    kind: str = "dense"
    """Of `KINDS`."""
    settings: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def render(self, target: Target, texts: Sequence[str], **fields: object) -> bytes:
        """A request of `texts`, with further `fields` of its body."""
        kind = KINDS[self.kind]
        content = orjson.dumps({"model": self.name, **kind.body(texts), **fields})
        return render_request(target, kind.path.format(model=self.name), content, api_key=None)


def write_config(file: Path, tables: Sequence[ModelTable]) -> Path:
    """A configuration of these models alone, in `file`, which it returns."""
    lines = []
    for table in tables:
        lines += [f"[models.{table.name}]", f"source = {orjson.dumps(str(table.source)).decode()}"]
        lines += [f"{name} = {orjson.dumps(value).decode()}" for name, value in table.settings.items()]
    file.write_text("\n".join([*lines, ""]))
    return file


def serving_all(tables: Sequence[ModelTable], folder: Path, *flags: str) -> AbstractContextManager[Server]:
    """A server of this checkout with these models, with an admin listener. `folder` has its configuration, which is
    `vecd.toml`, and its cache."""
    file = write_config(folder / "vecd.toml", tables)
    common = ("--dtype", "float32", "--cache-dir", str(folder), "--admin-port", "0", "--drain-grace", "0")
    return announcing(*common, *flags, config=file, checkout=CHECKOUT)


@dataclass(frozen=True, slots=True)
class Question:
    """A request, and the figures that its response must have."""

    request: bytes
    kind: Kind
    expected: Figures

    def problem(self, response: bytes) -> str:
        """What is wrong with a response of status 200; "" if nothing is."""
        try:
            found = figures_of(self.kind, response)
        except (LookupError, TypeError, ValueError) as error:
            return f"no figures: {error!r}"
        if found.shape != self.expected.shape:
            return f"{found.size} figures instead of {self.expected.size}"
        difference = float(np.abs(found - self.expected).max())
        return "" if difference <= _MAX_DIFFERENCE else f"wrong figures: they differ by {difference:.2g}"


def figures_of(kind: Kind, response: bytes) -> Figures:
    """Of a whole response. Raises LookupError, TypeError or ValueError when it has none."""
    return kind.figures(orjson.loads(response.partition(b"\r\n\r\n")[2]))


@dataclass(frozen=True, slots=True)
class Canaries:
    """Texts of one model and the figures that are right for them."""

    table: ModelTable
    texts: Sequence[Sequence[str]]
    expected: Sequence[Figures]

    def questions(self, server: Server) -> list[Question]:
        target, kind = parse_target(server.url), KINDS[self.table.kind]
        requests = [self.table.render(target, texts) for texts in self.texts]
        return [Question(*of_one) for of_one in zip(requests, [kind] * len(requests), self.expected, strict=True)]


def draw_requests(table: ModelTable, num: int, seed: int = 0) -> list[Sequence[str]]:
    """The texts of `num` short requests."""
    size = KINDS[table.kind].num_texts
    drawn = draw_texts(num * size, SHORT, seed)
    return [drawn[start : start + size] for start in range(0, len(drawn), size)]


def learn_canaries(table: ModelTable, texts: Sequence[Sequence[str]], folder: Path, *flags: str) -> Canaries:
    """What a server of `table` alone answers to requests of `texts`, one by one. Raises ServerFailure."""
    settings = {name: value for name, value in table.settings.items() if name not in _OF_SEVERAL}
    alone = ModelTable(table.name, table.source, table.kind, settings)
    with serving_all([alone], folder, *flags) as server, closing(Exchange(parse_target(server.url))) as exchange:
        return Canaries(table, texts, [_ask(exchange, alone, server, each) for each in texts])


def _ask(exchange: Exchange, table: ModelTable, server: Server, texts: Sequence[str]) -> Figures:
    response = exchange.response(table.render(parse_target(server.url), texts))
    if not response.startswith(SUCCESS):
        raise ServerFailure(f"{table.name} in a server of its own answered {response[:300]!r}")
    return figures_of(KINDS[table.kind], response)
