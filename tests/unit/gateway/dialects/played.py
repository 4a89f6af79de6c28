"""A gateway of each kind of model in process, whose worker a test plays: the bytes of a body in, the request that
reaches the pipeline and the bytes of the response out."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, TypeAlias, cast
from unittest import mock

import numpy as np
import orjson

from tests.support.asking import body_of, embedded_of
from tests.support.cards import CLASSIFIER, DENSE, HYBRID, MULTI_VECTOR, RERANKER, SPARSE, TOKEN_CLASSIFIER
from tests.unit.gateway.dialects.attributes import Exchange
from tests.unit.gateway.test_service import http_request
from tests.unit.gateway.test_several_models import ALIAS_DEFAULTS, ALIASES, CARDS, Bench, Recorder, json_of
from vecd.gateway.api.operation import ParsedMessages
from vecd.gateway.config import AliasDefaults, GatewayConfig
from vecd.gateway.encoding.result import Encoder
from vecd.gateway.errors import INPUT, ApiError, EngineFailed, Unavailable
from vecd.gateway.request import Embedded, EmbedRequest, FloatRows, InputReport, Source, Token
from vecd.gateway.tokenization.late_chunks import LateChunks
from vecd.model.card import ModelCard
from vecd.model.steps import PairTemplate, ScoreHead, Step

_PROMPTS = (("query", "query: "), ("document", "passage: "), ("own", "own: "))
_TEXTS: dict[str, Any] = {"prompt": "own: ", "prompts": _PROMPTS}
_HAS_INSTRUCTION = PairTemplate("<{instruction}>", "|", "", "rank")
MODELS = {
    "dense": replace(DENSE, dim=16, hidden_size=16, steps=(Step("normalize"),), is_matryoshka=True, **_TEXTS),
    "hybrid": replace(
        HYBRID, dim=16, hidden_size=16, token_dim=16, steps=(Step("normalize"),), is_matryoshka=True, **_TEXTS
    ),
    "sparse": replace(SPARSE, **_TEXTS),
    "multi": replace(MULTI_VECTOR, **_TEXTS),
    "ranker": replace(RERANKER, score=ScoreHead(("score",), "sigmoid", "cls", pair_template=_HAS_INSTRUCTION)),
    "classifier": replace(CLASSIFIER, **_TEXTS),
    "judge": replace(CLASSIFIER, score=ScoreHead(("contradiction", "entailment", "neutral"), "softmax", "cls")),
    "tagger": replace(TOKEN_CLASSIFIER, **_TEXTS),
}  # fmt: skip
"""All but the ranker have prompts."""


Rows: TypeAlias = Callable[[int, int], FloatRows]
"""Makes rows of a number and a width."""


def telling_rows(num: int, width: int) -> FloatRows:
    """They tell forms and activations apart."""
    return (np.arange(num * width) % 5 - 1.5).astype(np.float32).reshape(num, width)


class Played(Recorder):
    """Answers all that is asked. The text "late" is never computed in time, and the engine fails on "poison"."""

    def __init__(self, name: str, card: ModelCard, rows: Rows) -> None:
        super().__init__(name, card)
        self._rows = rows
        self.asked: Any = None
        self.rendered: Any = None

    async def run(self, request: EmbedRequest, *rest: Any) -> Embedded:
        if request.inputs[0] == "late":
            raise Unavailable("No worker is up", retry_after_s=1)
        if request.inputs[0] == "poison":
            raise EngineFailed(f"The engine failed on '{INPUT}[0]'", param=INPUT)
        self.asked = request._replace(inputs=cast(Any, list(request.inputs)))
        return self._embedded(request)

    def _embedded(self, request: EmbedRequest) -> Embedded:
        num, width = len(request.inputs), request.output.width_of(self._card)
        rows = self._rows(2 * num, width)
        ids, offsets = np.array([1, 2], np.int32), np.array([[0, 1], [0, 1]], np.int32)
        spans = np.array([[0, 1]], np.int32), np.array([[0, 2]], np.int32), (0, 0), 2, np.array([False])
        makes = Encoder(self._card, tokenizer=cast(Any, self)).makes(request, [ids] * num)
        if request.late is not None:
            makes[0].made.chunks.extend([LateChunks(*spans)] * num)
        for make in makes:
            if request.output.is_per_token or request.late is not None:
                for index in range(num):
                    make.put(index, rows[2 * index : 2 * index + 2], 0)
            else:
                make.put(0, np.ascontiguousarray(rows[:num]), 0)
        reports = (InputReport(3, False, 1, Source.TEXT),) * num if request.wants_report else ()
        made = [make.made for make in makes]
        return embedded_of(*made, reports=reports, token_ids=(ids,) * num, offsets=(offsets,) * num)

    async def describe(self, parsed: Any, *_: object) -> None:
        self.asked = {"texts": parsed.texts, "add_special_tokens": parsed.add_special_tokens, "prompt": parsed.prompt}
        parsed.collect(0, [Token(7, "t", False, 0, 1)])

    async def render(self, parsed: ParsedMessages, *_: object) -> list[str]:
        self.rendered = orjson.loads(parsed.payload)
        return ["a"] * len(self.rendered["conversations"])

    async def decode(self, parsed: Any, *_: object) -> list[str]:
        self.asked = {"lists": parsed.lists, "skip_special_tokens": parsed.skip_special_tokens}
        return ["a"] * len(parsed.lists)


class Gateway(Bench):
    """Of one model."""

    def __init__(self, name: str, card: ModelCard, rows: Rows, **changes: Any) -> None:
        self._made_of = card, rows
        with mock.patch.dict(CARDS, {name: card}):
            super().__init__((name,), 1, **changes)

    def make_recorder(self, config: GatewayConfig) -> Played:
        self.played = Played(config.model, *self._made_of)
        return self.played

    async def exchange(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Exchange:
        played = self.played
        played.asked = played.rendered = played.kept_s = None
        own_id = headers.get("x-request-id", "id")  # which the reader of heads takes
        request = http_request(path, method=method, body=body, headers=dict(headers), request_id=own_id)
        try:
            response = await self.app.handle(request)
        except ApiError as error:
            response = self.app.render_error(error, request)
        self.app.add_headers(response, request)
        came = played.asked, played.rendered, played.kept_s
        assert isinstance(response.body, bytes | list), "a connection counts its bytes before it sends them"
        written = response.headers, response.content_type, body_of(response)
        return Exchange(response.status, *written, request.request_id, *came)


class Client:
    """Asks the gateways of all models, each of which is made when it is asked first."""

    def __init__(self, models: Mapping[str, ModelCard] = MODELS, rows: Rows = telling_rows, **changes: Any) -> None:
        """`changes`: of the configuration."""
        self._models, self._rows = models, rows
        self._changes = {"matryoshka": True, "client_keep_alive": True, "max_inputs": 8, **changes}
        self._loop = asyncio.new_event_loop()
        self.gateway = cache(self._make)
        """By the model, and the defaults of its alias."""

    def close(self) -> None:
        self._loop.close()

    def _make(self, model: str, **defaults: Any) -> Gateway:
        async def make() -> Gateway:
            aliases = {model: (AliasDefaults("alias", **defaults),)} if defaults else {}
            with mock.patch.dict(ALIASES, {model: ("alias",)}), mock.patch.dict(ALIAS_DEFAULTS, aliases):
                return Gateway(model, self._models[model], self._rows, **self._changes)

        return self._loop.run_until_complete(make())

    def exchange(
        self, model: str, path: str, body: Any, headers: Mapping[str, str], method: str = "POST", **defaults: Any
    ) -> Exchange:
        """`body`: JSON, or bytes. `defaults`: those of the alias."""
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        gateway = self.gateway(model, **defaults)
        return self._loop.run_until_complete(gateway.exchange(method, path, content, headers))

    @cache  # noqa: B019 (a client lives as long as its tests)
    def document(self, model: str) -> Any:
        """The paths in the server's OpenAPI document, with "m" for the name of a model."""
        document = json_of(self._loop.run_until_complete(self.gateway(model).get("/openapi.json")))
        return {**document, "paths": {path.replace("{name}", "m"): at for path, at in document["paths"].items()}}
