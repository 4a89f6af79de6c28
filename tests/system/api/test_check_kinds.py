"""`vecd check` on models without dense vectors: compared by what they give, with the libraries that made them."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.multi_vector_checkpoints import save_own
from tests.support.published import encoders
from tests.support.score_checkpoints import save_classifier
from tests.support.serving import clean_environment
from tests.support.soak.form import only_long
from tests.support.sparse_checkpoints import save_masked_words


def _save_reranker(folder: Path) -> Path:
    save_classifier(folder, activation_fn="torch.nn.modules.activation.Sigmoid")
    path = folder / "tokenizer_config.json"  # as a BertTokenizer has it
    config = {**json.loads(path.read_text()), "model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    path.write_text(json.dumps(config))
    return folder


_ST, _HF = "sentence-transformers", "transformers"
KINDS: dict[str, tuple[Callable[[Path], Path], str, str, str, str]] = {
    "reranker": (_save_reranker, "auto", "scores", _ST, "(classifier)"),
    "token classifier": (
        lambda folder: save_classifier(folder, labels=["O", "B-PER"], is_of_tokens=True), "auto", "scores", _HF,
        "(classifier)",
    ),
    "masked words": (save_masked_words, "sparse", "sparse weights", _ST, "(cls.predictions.transform.dense)"),
    "multi-vector": (lambda folder: save_own(folder, "bert"), "auto", "vectors", _ST, "Dense 32 → 8"),
}  # fmt: skip


def checked(folder: Path, tmp_path: Path, *flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "vecd", "check", str(folder), "--json", "--quick", "--dtype", "float32", *flags]
    environment = {**clean_environment(tmp_path, {"HF_HOME": str(tmp_path)}), "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@only_long
@pytest.mark.parametrize("name", KINDS)
def test_a_model_of_each_kind_agrees_with_the_library_that_made_it(name: str, tmp_path: Path) -> None:
    save, kind, outputs, library, head = KINDS[name]
    folder = save(tmp_path / "model")
    report = checked(folder, tmp_path, "--kind", kind)
    assert report["path"]["outputs"] == outputs
    assert report["path"]["not_compared"] == []
    of_reference, of_library = report["path"]["agreements"]
    assert of_reference["against"] == "the reference model in float32"
    assert of_library["against"].startswith(f"{library} ")
    for found in (of_reference, of_library):
        assert found["is_within_bounds"]
        assert found["num_texts"] > 15
        assert (found["min_cosine"] is None) is (outputs == "scores")
        assert found["same_order"] == (1.0 if outputs == "scores" else None)
    steps = [step for steps in report["model"]["heads"].values() for step in steps]
    assert any(head in step for step in steps), steps


def test_the_tokenizer_of_a_library_that_differs_is_said_and_not_called_a_wrong_model(tmp_path: Path) -> None:
    """As of DeBERTa-v3: transformers' class does not make what tokenizer.json says. Here it lowers the case."""
    folder = _save_reranker(tmp_path / "model")
    path = folder / "tokenizer_config.json"
    of_class = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    path.write_text(json.dumps({**json.loads(path.read_text()), **of_class}))
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"w{i} w{i + 1} w{i + 2}\n" for i in range(5, 13)) + "W7 w8\nw9 W10 w5\n")
    found = checked(folder, tmp_path, "--texts", str(texts))["path"]
    [why] = found["not_compared"]
    assert re.match(r"sentence-transformers \S+ makes other token ids of 2 of 10 texts than tokenizer\.json", why)
    assert re.search(r"Text 9, token \d+: id \d+ there, id \d+ here$", why)
    of_reference, of_library = found["agreements"]
    assert (of_reference["num_texts"], of_library["num_texts"]) == (10, 8)
    assert of_reference["is_within_bounds"]
    assert of_library["is_within_bounds"]


@pytest.mark.full
def test_a_library_that_would_read_another_architecture_is_not_asked(tmp_path: Path) -> None:
    """transformers' BERT would give random numbers to the layers of Jina's, which have other names."""
    [layout] = (each for each in encoders.LAYOUTS if each.name.endswith("v2-small-en"))
    (tmp_path / "model").mkdir()
    layout.save(tmp_path / "model")
    report = checked(tmp_path / "model", tmp_path)
    [why] = report["path"]["not_compared"]
    assert why == "not compared with sentence-transformers, which reads config.json as one of type 'bert'"
    [of_reference] = report["path"]["agreements"]
    assert of_reference["is_within_bounds"]
