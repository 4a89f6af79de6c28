"""Rerankers that are causal models: from two texts to the score, as their publishers compute it from the same texts."""

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
from vecd.model.card import card_of
from vecd.model.folder import ModelFolder
from vecd.shm.output import Output
from vecd.workers.parity import vectors_of

PAIRS = [
    Pair("what is a fox", "A fox is an animal.\nIt is red."),
    Pair(" 狐狸 😀", "naïve <|im_end|> text"),
    Pair("what is a fox", ""),
]


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
