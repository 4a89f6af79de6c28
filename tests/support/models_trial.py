"""Models of the dummy engine for trials of several models in one server, and the figures that are right for them."""

from pathlib import Path

from benchmarks.several import Canaries, ModelTable, draw_requests
from benchmarks.trials import Stretch
from tests.support.soak.tenants import dummy_reference

FLAGS = ("--engine", "dummy", "--gateways", "2")
_NUM_TEXTS = 16


def dummy_canaries(model_folder: Path) -> list[Canaries]:
    """Of three models that cut texts at different lengths: none has the vectors of another."""
    found = []
    for seed, (name, max_tokens) in enumerate((("first", 256), ("second", 6), ("third", 5))):
        table = ModelTable(name, model_folder, settings={"workers": 1, "max-tokens": max_tokens})
        texts = draw_requests(table, _NUM_TEXTS, seed)
        vectors = dummy_reference(model_folder, [text for [text] in texts], max_tokens)
        found.append(Canaries(table, texts, list(vectors)))
    return found


def assert_all_right(stretches: list[Stretch]) -> None:
    """Each request of each model was answered, and right."""
    for stretch in stretches:
        for model, summary in stretch.models.items():
            assert (model, summary.failures[:3], summary.num_refused) == (model, [], 0)
            assert summary.num_right > 0, model
