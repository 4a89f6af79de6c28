"""Asks a dialect's operations in process: a body in, what is asked for out, and rows in, an answer out."""

from collections.abc import Mapping
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from numpy.typing import NDArray

from tests.support.pipelines import planned_config
from vecd.gateway.api.large_json import Bounds, FieldNames, PieceReader
from vecd.gateway.api.operation import Operation, ParsedEmbed
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.config import GatewayConfig
from vecd.gateway.dialects.ask import read
from vecd.gateway.dispatch.residence import Residence
from vecd.gateway.encoding.result import Encoder
from vecd.gateway.errors import ApiError
from vecd.gateway.request import Durations, Embedded, Identity, InputReport, Overflow, Response, Source
from vecd.model.card import ModelCard
from vecd.model.steps import Step

REQUEST_ID = "req_1"
DURATIONS = Durations(0.0, 0.001, 0.001, 0.002, 0.0, 0.004)
_CARD = ModelCard("/models/minilm", "", "bert", 384, 384, 256, 30522, ("mean",), (Step("normalize"),), False, "")
_OF_CARD = frozenset(each.name for each in fields(ModelCard))
_OF_CONFIG = frozenset(each.name for each in fields(GatewayConfig)) - {"pooling"}


def changed(model_info: ModelInfo, **changes: Any) -> ModelInfo:
    """The model with these changes of its configuration, of its card where the configuration has no such field, or of
    itself."""
    if (prompts := changes.get("prompts")) is not None:
        changes["prompts"] = tuple(prompts.items())
    if isinstance(overflow := changes.get("overflow"), Overflow):
        changes["overflow"] = overflow.value
    of_config = {name: changes.pop(name) for name in _OF_CONFIG & changes.keys()}
    of_card = {name: changes.pop(name) for name in _OF_CARD & changes.keys()}
    config = replace(model_info.config, **{"card": replace(model_info.card, **of_card), **of_config})
    return replace(model_info, config=config, **changes)


PLAIN = changed(
    ModelInfo(
        config=replace(planned_config(), card=_CARD),
        residence=Residence(1, keep_alive_s=None, num_gateways=1, send=lambda message: None),
        identity=Identity(),
        created_at=1_700_000_000,
    ),
    model="minilm", aliases=(), max_tokens=256, max_inputs=4, max_body_bytes=1 << 20, overflow="truncate",
    version="1.2.3", chat_template=None,
)  # fmt: skip
"""A model without prompts, under any name; tests change what they are about."""


def ask(
    operation: Operation,
    body: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
    model_info: ModelInfo = PLAIN,
    *,
    in_pieces: bool = False,
) -> ParsedEmbed:
    """What a body asks for; `in_pieces`: as if it were a large one."""
    assert operation.parse is not None
    fields = read_in_pieces(operation, body) if in_pieces else body
    asked = operation.parse(read(operation.fields, fields, headers or {}, model_info))
    assert isinstance(asked, ParsedEmbed)
    return asked


def refusal(
    operation: Operation, body: Mapping[str, Any], model_info: ModelInfo = PLAIN, *, in_pieces: bool = False
) -> ApiError:
    """The error that a body is refused with, which quotes no secret of it."""
    with pytest.raises(ApiError) as caught:
        ask(operation, body, model_info=model_info, in_pieces=in_pieces)
    assert "secret" not in caught.value.message
    return caught.value


def read_in_pieces(operation: Operation, body: Mapping[str, Any], **bounds: int) -> dict[str, Any]:
    """The fields as they are read of a large body: ids as arrays, and no more of texts and ids than is looked at."""
    limits = Bounds(**{"max_items": 1000, "max_chars": 1000, "max_ids": 1000, "window_bytes": 16, **bounds})
    fields = operation.fields
    steps = PieceReader(orjson.dumps(body), FieldNames(fields.large, fields.small), limits).read_object()
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def embedded_of(*made: Any, **changes: Any) -> Embedded:
    """The result with what was made in each form. `changes`: of the `Embedded`."""
    usual = {"num_tokens": 7, "sources": {Source.TEXT}, "num_chars": 5, "durations": lambda: DURATIONS}
    usual |= {"model": PLAIN.model, "request_id": REQUEST_ID}
    return Embedded(made, **{**usual, **changes})


def reports_of(asked: ParsedEmbed, num_inputs: int) -> list[InputReport]:
    """Those of the inputs, if they are asked for."""
    return [InputReport(3, False, 1, Source.TEXT)] * num_inputs if asked.request.wants_report else []


def answer(asked: ParsedEmbed, rows: NDArray[np.float32], **changes: Any) -> Response:
    """The answer with these rows, one for each input. `changes`: of the `Embedded`."""
    dim = rows.shape[1]
    card: Any = SimpleNamespace(dim=dim, hidden_size=dim, is_normalized=True, truncate_dim=0, is_whole=False)
    makes = Encoder(card).makes(asked.request, [])
    for make in makes:
        make.put(0, rows, 0)
    made = [make.made for make in makes]
    return asked.render(embedded_of(*made, **{"reports": reports_of(asked, len(rows)), **changes}))


def pieces_of(response: Response) -> list[bytes | memoryview]:
    return [response.body] if isinstance(response.body, bytes) else list(response.body)


def body_of(response: Response) -> bytes:
    return b"".join(pieces_of(response))
