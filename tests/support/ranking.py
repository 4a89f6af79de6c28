"""Models that rank, and results of theirs, for tests of dialects in process."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from tests.support.asking import PLAIN, ask, body_of, embedded_of
from vecd.gateway.api.model_info import ModelInfo
from vecd.gateway.api.operations import Operation
from vecd.gateway.encoding.max_sim import MaxSimRows
from vecd.gateway.encoding.scores import ScoreRows
from vecd.gateway.encoding.token_rows import DroppedTokens
from vecd.gateway.types.request import Embedded, EmbedRequest, Tokenizing
from vecd.shm.heads import PairTemplate, ScoreHead, TokenHead
from vecd.shm.output import Output

CROSS_ENCODER = replace(
    PLAIN,
    max_inputs=6,
    capabilities=("rerank", "classify"),
    outputs=frozenset({Output.SCORES}),
    num_labels=1,
    score=ScoreHead(labels=("LABEL_0",), activation="identity", pooling="cls"),
)
TWO_LABELS = replace(
    CROSS_ENCODER, num_labels=2, score=ScoreHead(labels=("no", "yes"), activation="softmax", pooling="cls")
)
WITH_INSTRUCTION = replace(
    CROSS_ENCODER,
    score=ScoreHead(
        labels=("LABEL_0",),
        activation="sigmoid",
        pooling="lasttoken",
        pair_template=PairTemplate("<Instruct>: {instruction}\n<Query>: ", "\n<Document>: ", "", "rank"),
    ),
)
MULTI_VECTOR = replace(
    PLAIN,
    max_inputs=6,
    capabilities=("multi-vector",),
    outputs=frozenset({Output.TOKEN_VECTORS}),
    token_dim=2,
    tokens=TokenHead(steps=()),
)
CLASSIFIER = replace(
    CROSS_ENCODER,
    capabilities=("classify",),
    num_labels=3,
    score=ScoreHead(labels=("a", "b", "c"), activation="softmax", pooling="cls"),
)


def of_logits(logits: Sequence[Any], **changes: Any) -> Embedded:
    """Of a model with scores: a number for each input, or a list with one for each label."""
    rows = np.array(logits, dtype=np.float32).reshape(len(logits), -1)
    collector = ScoreRows(*rows.shape)
    collector.put(0, rows)
    return embedded_of(collector, **changes)


def of_matrices(*matrices: NDArray[np.float32], num_queries: int = 1, is_mean: bool = False) -> Embedded:
    """Of a multi-vector model: the vectors of the tokens of each input, the queries first."""
    request = EmbedRequest(["text"] * len(matrices), tokenizing=Tokenizing(num_queries=num_queries))
    dropped = DroppedTokens(TokenHead(steps=()), request, (), drops_first=False)
    collector = MaxSimRows(len(matrices), num_queries, dropped, is_mean=is_mean)
    for index, matrix in enumerate(matrices):
        collector.put_tokens(index, matrix, 0)
    return embedded_of(collector)


def rank(
    operation: Operation,
    body: Mapping[str, Any],
    logits: Sequence[Any],
    model_info: ModelInfo = CROSS_ENCODER,
    **changes: Any,
) -> Any:
    """The body of the answer, where the inputs have these logits."""
    asked = ask(operation, body, model_info=model_info)
    assert len(asked.request.inputs) == len(logits)
    return orjson.loads(body_of(asked.render(of_logits(logits, **changes))))
