"""mteb's model of an OpenAI-compatible server, and a task of three pairs of sentences."""

from typing import Any

import mteb
from datasets import Dataset, DatasetDict
from mteb.abstasks.sts import AbsTaskSTS
from mteb.models import OpenAIAPIEncodeWrapper
from serve import rows, serve

_PAIRS: dict[str, list[Any]] = {
    "sentence1": ["hello", "Hello, world", "second text"],
    "sentence2": ["hello world", "hello", "- key: [1, 2]\n  other: ~"],
    "score": [5.0, 3.0, 0.0],
}


class Pairs(AbsTaskSTS):  # type: ignore[misc]  # mypy cannot see mteb
    """Needs no download."""

    metadata = mteb.TaskMetadata(
        name="Pairs", description="Three pairs.", type="STS", category="t2t", modalities=["text"],
        dataset={"path": "none", "revision": "1"}, eval_splits=["test"], eval_langs=["eng-Latn"],
        main_score="cosine_spearman", reference=None, date=None, domains=None, task_subtypes=None, license=None,
        annotations_creators=None, dialect=None, sample_creation=None, bibtex_citation="",
    )  # fmt: skip
    min_score, max_score = 0, 5

    def load_data(self, *_arguments: Any, **_options: Any) -> None:
        self.dataset = DatasetDict({"test": Dataset.from_dict(_PAIRS)})
        self.data_loaded = True


def evaluate(url: str) -> dict[str, Any]:
    """The vectors of the task's sentences as mteb has them, and what mteb makes of them."""
    model = _model(url)
    kept: list[list[float]] = []
    encode = model.encode

    def keeping(*arguments: Any, **options: Any) -> Any:
        vectors = encode(*arguments, **options)
        kept.extend(rows(vectors))
        return vectors

    model.encode = keeping
    [result] = mteb.evaluate(model, Pairs(), cache=None).task_results
    return {
        "texts": [*_PAIRS["sentence1"], *_PAIRS["sentence2"]],
        "vectors": kept,
        "human_scores": _PAIRS["score"],
        "scores": result.scores["test"][0],
        "max_length": model.max_length,
    }


def _model(url: str) -> Any:
    return OpenAIAPIEncodeWrapper(
        url, "all-MiniLM-L6-v2", api_key="unused", modalities=["text"], use_chat_template=False
    )


serve(evaluate)
