"""Every setting of a model's JSON files with a value of another type: the model is read or refused, and never more."""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.model import test_multi_vector_card as multi_vector
from tests.unit.model import test_sparse_card as sparse
from tests.unit.model.test_score_card import Classifier
from vecd.base.files import dump, load
from vecd.model.card import ModelCard, ModelError, read_card

WRONG: list[Any] = [None, True, -1, 1.5, 10**30, float("nan"), "x", [], [1], {}, {"a": 1}]
LARGEST_ROW_DIM = 2**31
QWEN3 = {"model_type": "qwen3", "num_hidden_layers": 2, "tie_word_embeddings": True, "final_logit_softcapping": 1.0}
TOKENIZER = {"model": {"vocab": {"yes": 3, "no": 4}}, "added_tokens": [{"content": "[A]", "id": 5}]}


def _modern_bert(path: Path) -> None:
    settings = {"classifier_pooling": "mean", "norm_eps": 1e-5, "auto_map": {}, "pad_token_id": 0}
    Classifier(path, "ModernBertForSequenceClassification", model_type="modernbert", num_labels=2, **settings)


def _causal_classifier(path: Path) -> None:
    Classifier(path, "Qwen3ForSequenceClassification", **QWEN3, id2label={"0": "a"}, sentence_transformers={}).state(
        model_type="CrossEncoder", activation_fn="torch.nn.Sigmoid", prompts={"query": "q: "}
    )


def _llm_reranker(path: Path) -> None:
    Classifier(path, "Qwen3ForCausalLM", **QWEN3).write("tokenizer.json", TOKENIZER)


def _splade(path: Path) -> None:
    sparse.Folder(path).change("sentence_bert_config.json", tokenizer_args={}, processing_kwargs={"chat_template": {}})


def _routed(path: Path) -> None:
    folder = sparse.Folder(path)
    folder.route([sparse.STATIC])
    folder.write_weights("weight", module=sparse.STATIC)
    folder.write(f"{sparse.STATIC}/config.json", {"path": "idf.json"})
    folder.write(f"{sparse.STATIC}/idf.json", {})


def _electra(path: Path) -> None:
    settings = {**sparse.CONFIG, "model_type": "electra", "embedding_size": 16}
    folder = sparse.Folder(path).without_modules()
    folder.write("config.json", settings)
    names = ["generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head"]
    folder.write_weights(*(f"{name}.weight" for name in names))


def _pylate(path: Path) -> None:
    multi_vector.save_pylate(path)


def _own(path: Path) -> None:
    folder = multi_vector.save_own(path)
    expansion = {"strategy": "min", "length": 8, "token": "[MASK]", "attend": True}
    folder.write("sentence_bert_config.json", {"query_expansion": expansion, "document_length": 20})


def _stanford(path: Path) -> None:
    multi_vector.save_stanford(path).change("artifact.metadata", query_token_id="[unused0]")


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Those of all values but the outermost, and of no more than two elements of a list."""
    if place:
        yield place
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, part in items:
        yield from _places(part, (*place, key))


def _changed(value: Any, place: tuple[Any, ...], wrong: Any) -> Any:
    changed = copy.deepcopy(value)
    part = changed
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = wrong
    return changed


def _read(folder: Path, kind: str) -> tuple[str, ModelCard | None]:
    """The message of a refusal, or the card."""
    try:
        return "", read_card(folder, kind)
    except ModelError as error:
        return str(error), None


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (_modern_bert, "auto"),
        (_causal_classifier, "auto"),
        (_llm_reranker, "rerank"),
        (_splade, "auto"),
        (_routed, "auto"),
        (_electra, "sparse"),
        (_pylate, "auto"),
        (_own, "auto"),
        (_stanford, "auto"),
    ],
)
def test_a_value_of_another_type_is_accepted_or_refused_with_its_file(
    make: Callable[[Path], None], kind: str, tmp_path: Path
) -> None:
    folder = tmp_path / "qwen3-reranker"
    make(folder)
    assert read_card(folder, kind).capabilities != ("dense",)
    for path in [*folder.rglob("*.json"), *folder.glob("artifact.metadata")]:
        stated = json.loads(path.read_text())
        for place in _places(stated):
            for wrong in WRONG:
                path.write_text(json.dumps(_changed(stated, place, wrong)))
                refusal, card = _read(folder, kind)
                assert refusal.startswith(str(folder)) or card is not None, (place, wrong)
                assert "\n" not in refusal
                if card is not None:
                    assert load(ModelCard, json.loads(json.dumps(dump(card)))) == card
                    assert hash(card)
                    assert card.row_dim < LARGEST_ROW_DIM, (place, wrong)
        path.write_text(json.dumps(stated))
