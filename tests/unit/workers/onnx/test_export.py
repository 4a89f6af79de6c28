"""ONNX exports: their vectors, what they are compared with, and which graphs are refused."""

import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from tests.support.checkpoints import (
    HIDDEN_SIZE,
    VOCAB_SIZE,
    Checkpoints,
    assert_same_vectors,
    embed,
    random_batch,
    reference,
    worker_config,
)
from tests.support.exports import export_of, float32_table, halved, odd_export, quantized
from tests.support.score_checkpoints import logits_of, save_classifier
from vecd.model.card import ModelError, card_of, read_card
from vecd.model.folder import ModelFolder
from vecd.model.steps import ScoreHead
from vecd.shm.output import Output
from vecd.workers.batch import PackedBatch
from vecd.workers.config import REFERENCE_FILE
from vecd.workers.load import expected_path, load_engine
from vecd.workers.onnx.engine import LeanEngine
from vecd.workers.parity import Reference as Remembered
from vecd.workers.parity import random_batch as probes_of
from vecd.workers.parity import vectors_of, vectors_one_by_one, write_reference
from vecd.workers.select import recall

pytest.importorskip("onnx")

LENGTHS = [5, 1, 30, 60, 7, 5, 2, 1, 12, 12, 59]
TABLE = float32_table(VOCAB_SIZE, HIDDEN_SIZE)


@pytest.fixture(scope="module")
def exported(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_of(checkpoint("bert"), tmp_path_factory.mktemp("exported") / "model")


@pytest.fixture
def odd(exported: Path, tmp_path: Path) -> Callable[..., Path]:
    """Puts another graph into a model's folder."""

    def make(table: Any = TABLE, **odds: Any) -> Path:
        folder = shutil.copytree(exported, tmp_path / "odd")
        odd_export(folder / "onnx/model.onnx", table, **odds)
        return folder

    return make


def with_reference(folder: Path, target: Path, plain: Path) -> Path:
    """A copy of `folder` with the reference vectors of the model in `plain`, as `vecd check --remember` writes them."""
    shutil.copytree(folder, target)
    lengths = (5, 1, 34, 3, 13, 1, 55, 2, 5, 8, 3, 6, 60)
    vectors = reference(plain, probes_of(read_card(plain), lengths))
    write_reference(Remembered(lengths, vectors), "0" * 64, target / REFERENCE_FILE)
    return target


def test_vectors_are_those_of_the_model(exported: Path, checkpoint: Checkpoints) -> None:
    engine, batch = LeanEngine(read_card(exported)), random_batch(LENGTHS)
    kinds = [Output.VECTORS, Output.TOKENS, Output.UNNORMALIZED]
    outputs = np.array([kinds[index % 3] for index in range(len(LENGTHS))], dtype=np.uint8)
    for each in (batch, PackedBatch(batch.lengths, batch.token_ids, outputs)):
        assert_same_vectors(embed(engine, each), reference(checkpoint("bert"), each))
    before = embed(engine, batch)
    engine.use_threads(2)
    np.testing.assert_allclose(embed(engine, batch), before, atol=1e-6, rtol=0)


CLASSES = [(AutoModelForSequenceClassification, False), (AutoModelForTokenClassification, True)]


@pytest.mark.parametrize(("auto", "is_of_tokens"), CLASSES)
def test_logits_are_those_of_the_model(auto: Any, is_of_tokens: bool, tmp_path: Path) -> None:
    """With types for the second parts of pairs."""
    plain = save_classifier(tmp_path / "plain", "bert", labels=3, is_of_tokens=is_of_tokens)
    folder = export_of(plain, tmp_path / "export", auto, "logits")
    card, batch = read_card(folder), random_batch(LENGTHS)
    outputs = np.full(len(LENGTHS), card.main_output, dtype=np.uint8)
    borders = None if is_of_tokens else (batch.lengths // 2).astype(np.int32)
    batch = PackedBatch(batch.lengths, batch.token_ids, outputs, borders)
    engine, expected = LeanEngine(card), logits_of(plain, batch, is_of_tokens=is_of_tokens)
    assert_same_vectors(embed(engine, batch, 3), expected)
    assert_same_vectors(vectors_one_by_one(engine, batch, 3), expected)
    engine.use_threads(2)
    assert_same_vectors(embed(engine, batch, 3), expected)


def test_leased_batches_have_the_vectors_of_one_thread(exported: Path) -> None:
    engine, batch = LeanEngine(read_card(exported)), random_batch(LENGTHS)
    expected = embed(engine, batch)
    assert list(engine.allow_leases(3, may_copy_weights=True)) == [1, 3]
    assert engine.facts["wide_session_bytes"] == (exported / "onnx/model.onnx").stat().st_size
    deadline = time.monotonic() + 30
    while engine.lease(3) != 3:
        assert time.monotonic() < deadline, "the session is not made"
        time.sleep(0.01)
    np.testing.assert_allclose(embed(engine, batch), expected, atol=1e-6, rtol=0)


def test_an_export_that_was_replaced_meanwhile_is_not_read(
    odd: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = odd()
    engine = LeanEngine(read_card(folder))
    odd_export(folder / "onnx/model.onnx", TABLE * 2)
    engine.allow_leases(3, may_copy_weights=True)
    assert engine.lease(3) == 1
    for thread in threading.enumerate():
        if thread.name == "wide-session":
            thread.join()
    assert engine.lease(3) == 1
    assert "the file has changed" in caplog.text


def test_it_is_compared_with_the_vectors_beside_it(exported: Path, checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = with_reference(exported, tmp_path / "model", checkpoint("bert"))
    config = worker_config(folder, dtype="auto", cache_dir=tmp_path / "cache")
    assert expected_path(config) == "export"
    stages: list[str] = []
    engine = load_engine(config, stages.append)
    assert stages == ["comparing export float32 with the remembered reference vectors"]
    assert (engine.facts["path"], engine.facts["dtype"], engine.warnings) == ("export", "float32", [])
    assert engine.facts["agreement"]["max_abs_diff"] < 1e-5
    engine = load_engine(replace(config, dtype="bfloat16"), lambda stage: None)
    assert engine.warnings == ["bfloat16 is not available: the ONNX export is computed in float32"]
    # Remembered, until a file of the export changes.
    assert recall(config) is not None
    (folder / "onnx/model.onnx_data").write_bytes(b"1")
    assert recall(config) is None


def test_other_vectors_than_those_beside_it_are_refused(
    exported: Path, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    other = checkpoint("bert", layer_norm_eps=0.1)
    config = worker_config(with_reference(exported, tmp_path / "model", other), unverified=True)
    with pytest.raises(ModelError, match=f"model.onnx: its vectors are not those of {REFERENCE_FILE}: largest"):
        load_engine(config, lambda stage: None)


def test_without_vectors_beside_it_a_flag_is_needed(exported: Path, tmp_path: Path) -> None:
    config = worker_config(exported, cache_dir=tmp_path / "cache")
    assert expected_path(config) == "export", "no other engine is looked for"
    with pytest.raises(ModelError, match=f"copy {REFERENCE_FILE} from .* or serve it uncompared with --unverified"):
        load_engine(config, lambda stage: None)
    engine = load_engine(replace(config, unverified=True), lambda stage: None)
    assert engine.facts["agreement"] is None
    assert "the vectors are not compared with the reference model's" in engine.warnings[0]
    assert recall(config) is None, "otherwise the next start would need no flag"


def test_a_text_must_not_depend_on_its_neighbours(odd: Callable[..., Path]) -> None:
    def centre_over_batch(model: Any) -> None:
        import onnx

        model.graph.node[1].output[0] = "same"
        model.graph.node.extend(
            [
                onnx.helper.make_node("ReduceMean", ["same"], ["mean"], axes=[0]),
                onnx.helper.make_node("Sub", ["same", "mean"], ["last_hidden_state"]),
            ]
        )

    config = worker_config(odd(change=centre_over_batch), unverified=True)
    with pytest.raises(ModelError, match="another vector in a batch than alone"):
        load_engine(config, lambda stage: None)


def test_float16_is_converted(odd: Callable[..., Path]) -> None:
    card = read_card(odd(TABLE.astype(np.float16)))
    engine, batch = LeanEngine(replace(card, steps=())), random_batch([3])
    assert engine.facts["dtype"] == "float16"
    expected = TABLE.astype(np.float16).astype(np.float32)[batch.token_ids].mean(axis=0)
    np.testing.assert_allclose(vectors_of(engine, batch, HIDDEN_SIZE)[0], expected, atol=1e-6, rtol=0)


# --- one of several -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def several(exported: Path, checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports in three formats, and the safetensors that they were made of."""
    folder = shutil.copytree(exported, tmp_path_factory.mktemp("several") / "model")
    for make in (quantized, halved):
        make(folder / "onnx/model.onnx")
    for path in checkpoint("bert").glob("*.safetensors"):
        shutil.copy(path, folder)
    return folder


@pytest.mark.parametrize(
    ("file", "dtype", "most"),
    [("model", "float32", 1e-5), ("model_fp16", "float16", 0.01), ("model_quantized", "int8", 1)],
)
def test_one_that_is_named_is_compared_with_the_safetensors_beside_it(
    file: str, dtype: str, most: float, several: Path, tmp_path: Path
) -> None:
    card = card_of(ModelFolder(several, file=f"onnx/{file}.onnx"))
    config = replace(worker_config(several, dtype="auto", cache_dir=tmp_path / "cache"), card=card)
    assert expected_path(config) is None, "torch computes the reference"
    engine = load_engine(config, lambda stage: None)
    assert (engine.facts["path"], engine.facts["dtype"], engine.warnings) == ("export", dtype, [])
    assert 0 < engine.facts["agreement"]["max_abs_diff"] < most
    assert recall(config) is not None
    assert not read_card(several).export_file


def test_another_model_s_safetensors_beside_it_refuse_it(
    several: Path, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder = shutil.copytree(several, tmp_path / "model")
    shutil.copy(checkpoint("bert", layer_norm_eps=0.1) / "config.json", folder)
    card = card_of(ModelFolder(folder, file="onnx/model_quantized.onnx"))
    with pytest.raises(ModelError, match=r"model_quantized.onnx: its vectors are not those of the safetensors beside"):
        load_engine(replace(worker_config(folder), card=card), lambda stage: None)


def test_int8_scaled_by_the_batch_gives_each_text_the_vector_that_it_has_alone(several: Path) -> None:
    engine = LeanEngine(card_of(ModelFolder(several, file="onnx/model_quantized.onnx")))
    batch = random_batch([9] * 8)
    alone = vectors_one_by_one(engine, batch, HIDDEN_SIZE)
    np.testing.assert_array_equal(embed(engine, batch), alone)


def test_a_scale_of_the_batch_is_found_in_a_branch_of_the_graph(odd: Callable[..., Path]) -> None:
    def change(model: Any) -> None:
        onnx = pytest.importorskip("onnx")
        helper, kind = onnx.helper, onnx.TensorProto
        back = helper.make_node("DequantizeLinear", ["whole", "scale", "zero"], ["made"])
        outputs = [helper.make_tensor_value_info("made", kind.FLOAT, None)]
        cut = helper.make_node("DynamicQuantizeLinear", ["rows"], ["whole", "scale", "zero"])
        branch = helper.make_graph([cut, back], "branch", [], outputs)
        model.graph.initializer.append(helper.make_tensor("yes", kind.BOOL, [], [True]))
        node = helper.make_node("If", ["yes"], ["last_hidden_state"], then_branch=branch, else_branch=branch)
        model.graph.node[1].CopyFrom(node)

    engine = LeanEngine(read_card(odd(change=change)))
    batch = random_batch([9] * 8)
    np.testing.assert_array_equal(embed(engine, batch), vectors_one_by_one(engine, batch, HIDDEN_SIZE))


def test_the_first_choice_is_the_most_exact(several: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(several, tmp_path / "model")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    for name in ("model", "model_fp16", "model_quantized"):
        card = read_card(folder)
        assert card.export_file == f"{folder}/onnx/{name}.onnx"
        assert card.weight_files == [Path(card.export_file)]
        Path(card.export_file).unlink()
    shutil.copy(several / "onnx/model.onnx", folder)
    assert read_card(folder).weight_files == [folder / "model.onnx"], "as optimum saves it"


# --- graphs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("odds", "message"),
    [
        ({"inputs": ("input_ids", "past_key_values.0.key")}, r"its input past_key_values\.0\.key, tensor\(int64\), is"),
        ({"output": "sentence_embedding"}, "its outputs are sentence_embedding; one must be last_hidden_state or"),
        ({"operator": ("Special", "com.example")}, r"ONNX Runtime cannot load it: .*com\.example"),
        ({"shape": (1, 60)}, "ONNX Runtime cannot run it: .*input_ids"),
        ({"table": TABLE[:, :9]}, "its hidden states have 9 elements, and config.json says 32"),
    ],
)
def test_a_graph_of_another_kind_is_refused_in_a_line(
    odds: dict[str, Any], message: str, odd: Callable[..., Path]
) -> None:
    folder = odd(**odds)
    with pytest.raises(ModelError, match=message) as error:
        LeanEngine(read_card(folder))
    assert str(error.value).startswith(f"{folder.resolve()}/onnx/model.onnx: ")
    assert "\n" not in str(error.value)
    (folder / "onnx/model.onnx").write_bytes(b"version https://git-lfs\n")
    with pytest.raises(ModelError, match="ONNX Runtime cannot load it"):
        LeanEngine(read_card(folder))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("last_hidden_state", "its outputs are last_hidden_state; one must be logits"),
        ("logits", r"its logits .* are \[4, 32\], and should be \[2, 1\]"),
    ],
)
def test_an_export_without_the_logits_of_sequences_is_refused(
    output: str, message: str, odd: Callable[..., Path]
) -> None:
    head = ScoreHead(("score",), "sigmoid", "cls")
    with pytest.raises(ModelError, match=message):
        LeanEngine(replace(read_card(odd(output=output)), score=head, num_labels=1, capabilities=("rerank",)))


def test_positions_of_roberta_are_not_guessed(odd: Callable[..., Path]) -> None:
    card = read_card(odd(inputs=("input_ids", "position_ids")))
    assert LeanEngine(card).facts["path"] == "export"
    with pytest.raises(ModelError, match="its input position_ids"):
        LeanEngine(replace(card, model_type="roberta"))


@pytest.mark.parametrize("location", ["absolute", "link", "part/../../outside", "nowhere"])
def test_weights_outside_the_folder_are_refused(location: str, odd: Callable[..., Path], tmp_path: Path) -> None:
    location = str(tmp_path / "odd/outside") if location == "absolute" else location
    folder = odd(location=location)
    (folder / "outside").write_bytes(TABLE.tobytes())
    (folder / "onnx/part").mkdir()
    os.symlink("../outside", folder / "onnx/link")
    with pytest.raises(ModelError, match=r"ONNX Runtime cannot load it: .*(escapes|not allowed|does not exist)"):
        LeanEngine(read_card(folder))


@pytest.mark.parametrize("location", ["model.onnx_data", "part/table"])
def test_weights_within_the_folder_are_read(location: str, odd: Callable[..., Path]) -> None:
    folder, batch = odd(location=location), random_batch([3])
    path = folder / "onnx" / location
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(TABLE.tobytes())
    engine = LeanEngine(replace(read_card(folder), steps=()))
    expected = TABLE[batch.token_ids].mean(axis=0)
    np.testing.assert_allclose(vectors_of(engine, batch, HIDDEN_SIZE)[0], expected, atol=1e-6, rtol=0)
