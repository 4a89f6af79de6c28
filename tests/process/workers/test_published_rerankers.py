"""Rerankers that are causal models: from two texts to the score, as their publishers compute it from the same texts."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.checkpoints import batch_of, engine_of
from tests.support.published import folder_of, layouts
from tests.support.tokenizing import ids_of, tokenize
from vecd.gateway.request import Pair
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.launch.config.templates import with_pair_template
from vecd.model.card import ModelError, card_of
from vecd.model.folder import ModelFolder
from vecd.shm.output import Output
from vecd.workers.check.vectors import rows_of_texts
from vecd.workers.parity import vectors_of

PAIRS = [
    Pair("what is a fox", "A fox is an animal.\nIt is red."),
    Pair(" 狐狸 😀", "naïve <|im_end|> text"),
    Pair("what is a fox", ""),
]


@pytest.mark.parametrize(("settings", "scale"), [({"yes": "no", "no": "yes"}, 1.0), ({"yes": "yes"}, 1.0), ({}, 2.0)])
def test_a_library_that_scores_by_other_tokens_is_no_reference(settings: Mapping[str, str], scale: float) -> None:
    """Where no module says otherwise, sentence-transformers goes by "yes" and "no"."""
    [layout] = [each for each in layouts() if "legal" in each.name]
    card, other = (card_of(ModelFolder(folder_of(layout), **given)) for given in ({}, settings))
    assert other.score is not None
    steps = tuple(replace(step, scale=scale) for step in other.score.steps)
    assert rows_of_texts(card, 80, ["a fox"])[0].rows.shape == (1, 1)
    with pytest.raises(ModelError, match="scores this model by other tokens"):
        rows_of_texts(replace(other, score=replace(other.score, steps=steps)), 80, ["a fox"])


@pytest.mark.parametrize("name", ["zerank-1-small", "zerank-2-reranker", "ctxl", "legal"])
def test_the_score_of_two_texts(name: str) -> None:
    [layout] = [each for each in layouts() if name in each.name]
    assert layout.ids is not None
    folder = ModelFolder(folder_of(layout))
    card = with_pair_template(card_of(folder), folder)
    assert card.capabilities == ("rerank",)
    of_template = layout.ids(folder.path)
    expected_ids = [of_template(*pair)[0] for pair in PAIRS]
    found_ids = [ids_of(item) for item in tokenize(Tokenizer(card, card.max_tokens, "model"), PAIRS)]
    assert found_ids == expected_ids
    reference = layout.reference(folder.path)
    expected = np.stack([reference(np.array(ids, dtype=np.int64), 0) for ids in expected_ids])
    batch = batch_of([np.array(ids, dtype=np.int32) for ids in found_ids])
    batch = replace(batch, outputs=np.full(len(PAIRS), Output.SCORES, dtype=np.uint8))
    with torch.inference_mode():
        found = vectors_of(engine_of(folder.path, "packed"), batch, 1)
    assert len({round(float(score), 3) for score in expected[:, 0]}) == len(PAIRS)
    np.testing.assert_allclose(found, expected, atol=1e-5 * max(1.0, float(np.abs(expected).max())), rtol=0)
