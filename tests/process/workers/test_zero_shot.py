"""Zero-shot classification by entailment, from texts to scores, against transformers' own pipeline."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, ZeroShotClassificationPipeline

from tests.support.checkpoints import batch_of, engine_of
from tests.support.published import folder_of, layouts
from tests.support.tokenizing import ids_of, tokenize
from vecd.gateway.dialects.zero_shot import scores_of
from vecd.gateway.request import Pair
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.model.card import ModelCard, read_card
from vecd.shm.output import Output
from vecd.workers.parity import vectors_of

LABELS = ["w5", "w6 w7", "w8"]
TEXTS = ["w9 w10 w11", "w12", " ".join(f"w{4 + index % 100}" for index in range(90))]
"""The last one is cut."""


def logits_of_pairs(folder: Path, card: ModelCard, path: str, pairs: list[Pair]) -> Any:
    items = tokenize(Tokenizer(card, card.max_tokens, "model"), pairs)
    batch = replace(
        batch_of([np.array(ids_of(item), dtype=np.int32) for item in items]),
        outputs=np.full(len(pairs), Output.SCORES, dtype=np.uint8),
        borders=np.array([item.border for item in items], dtype=np.int32),
    )
    with torch.inference_mode():
        return vectors_of(engine_of(folder, path), batch, card.num_labels)


@pytest.mark.parametrize("name", [each.name for each in layouts() if re.search("nli|zeroshot", each.name)])
def test_scores_are_those_of_the_pipeline(name: str) -> None:
    [layout] = [each for each in layouts() if each.name == name]
    folder = folder_of(layout)
    card = read_card(folder)
    assert card.score is not None
    [entailment] = [index for index, label in enumerate(card.score.labels) if label.lower() == "entailment"]
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True).eval()
    pipeline: Any = ZeroShotClassificationPipeline(model=model, tokenizer=AutoTokenizer.from_pretrained(folder))
    template = "w20 {} w21"
    for labels, is_multi in ((LABELS, False), (LABELS, True), (LABELS[:1], False)):
        pairs = [Pair(text, template.replace("{}", label)) for text in TEXTS for label in labels]
        found = scores_of(logits_of_pairs(folder, card, layout.path, pairs), len(labels), entailment, is_multi=is_multi)
        made = pipeline(TEXTS, labels, hypothesis_template=template, multi_label=is_multi)
        by_label = [dict(zip(each["labels"], each["scores"], strict=True)) for each in made]
        expected = np.array([[scores[label] for label in labels] for scores in by_label])
        assert np.ptp(expected) > 1e-3
        np.testing.assert_allclose(found, expected, atol=1e-5)
