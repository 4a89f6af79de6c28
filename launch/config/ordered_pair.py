"""A query with an answer, and with a text about something else, as token ids: by them a reranker's order is checked.

Owns the three texts, and the process that tokenizes them as the gateway does. A model that gets its pairs through a
template ranks without an error, and at random, if the template is not its own. Where the scores are made, in the
workers, there is no tokenizer, so the ids are made here, before any process of the server starts. The check itself is
in `vecd.workers.engines.ordered_pair`, behind the selection of an engine, where a model can still be refused. Called by
`vecd.launch.config.plan`, and by `vecd.launch.child` (write_sequences).
"""

import json
import subprocess
import tempfile
from array import array
from pathlib import Path
from typing import TypeAlias

from vecd.launch.base.exit_codes import EXIT_OK
from vecd.launch.base.programs import run_child
from vecd.shm.card import ModelCard, ModelError

OrderedPair: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The token ids of the pair with the higher score, and of the other one."""

QUERY = "What is the capital of France?"
ANSWER = "Paris is the capital and the largest city of France."
OTHER = "To bake bread, mix flour, water, salt and yeast, and let the dough rest for an hour."
_TIMEOUT_S = 120.0
"""Reading the tokenizer of a large vocabulary takes seconds on a busy machine."""


def ordered_pair(card: ModelCard, max_tokens: int) -> OrderedPair | None:
    """The pair for the model of `card`, whose `tokenizer_file` is set; None for a model without a template.

    Raises ModelError when it cannot be tokenized.
    """
    if card.score is None or card.score.pair_template is None or "rerank" not in card.capabilities:
        return None
    with tempfile.TemporaryFile("w+") as file:
        try:
            status = run_child(
                "pairs", json.dumps(card.to_json()), str(max_tokens), fd=file.fileno(), timeout_s=_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            raise ModelError(f"{card.folder}: a pair is not tokenized within {_TIMEOUT_S:.0f} s") from None
        file.seek(0)
        text = file.read()
    if status != EXIT_OK:
        raise ModelError(text or f"{card.folder}: a pair cannot be tokenized (exit code {status})")
    better, worse = json.loads(text)
    return tuple(better), tuple(worse)


def write_sequences(card_json: str, max_tokens: str, answer: Path) -> None:
    """Write the token ids as JSON: the process that tokenizes. Raises ModelError."""
    from vecd.gateway.tokenization.tokenizer import Tokenizer
    from vecd.gateway.types.errors import ApiError
    from vecd.gateway.types.request import Pair

    card = ModelCard.from_json(json.loads(card_json))
    try:
        inputs = Tokenizer(card, int(max_tokens), "model").tokenize_now([Pair(QUERY, ANSWER), Pair(QUERY, OTHER)])
    except ApiError as error:
        raise ModelError(f"{card.folder}: a pair cannot be tokenized: {error}") from error
    assert inputs is not None, "so short a request is tokenized at once"
    answer.write_text(json.dumps([array("i", item.token_ids).tolist() for item in inputs]))
