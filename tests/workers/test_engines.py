"""Engines with a model: every family against sentence-transformers, and the choice between the paths."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
from transformers import AttentionInterface

from shm.card import ModelError, read_card
from workers import packing
from workers.agreement import vectors_of
from workers.engine import Engine, PackedBatch, load_engine
from workers.engines.fused import Attention
from workers.engines.padded import rectangles
from workers.layout import Run, arrange

Config = Callable[..., Any]
LENGTHS = [5, 1, 30, 60, 7, 5, 2, 1, 12, 12, 59]


def load(config: Any) -> Engine:
    return load_engine(config, lambda stage: None)


def vectors(engine: Engine, batch: PackedBatch, dim: int = 32) -> NDArray[np.float32]:
    return vectors_of(engine, batch, dim)


@pytest.mark.parametrize(
    ("family", "pooling", "paths"),
    [
        ("bert", "mean", ("fused", "packed", "padded")),
        ("roberta", "cls", ("fused", "packed", "padded")),
        ("xlm-roberta", "mean", ("fused", "packed", "padded")),
        ("camembert", "mean", ("fused", "packed", "padded")),
        ("distilbert", "mean", ("fused", "packed", "padded")),
        ("mpnet", "cls", ("fused", "padded")),
        ("electra", "max", ("packed", "padded")),
        ("albert", "mean_sqrt_len_tokens", ("packed", "padded")),
        ("modernbert", "mean", ("packed", "padded")),
        ("qwen2", "lasttoken", ("packed", "padded")),
        ("qwen3", "lasttoken", ("packed", "padded")),
        ("mistral", "weightedmean", ("packed", "padded")),
        ("gemma3_text", "mean", ("packed", "padded")),
        ("gpt2", "lasttoken", ("packed", "padded")),
        ("deberta-v2", "cls", ("padded",)),
        ("t5", "mean", ("padded",)),
        ("gemma2", "mean", ("padded",)),
    ],
)
def test_vectors_are_the_reference_s(
    family: str,
    pooling: str,
    paths: Sequence[str],
    checkpoint: Callable[..., Path],
    worker_config: Config,
    reference: Any,
    random_batch: Any,
) -> None:
    folder = checkpoint(family, pooling=pooling)
    batch = random_batch(LENGTHS)
    expected = reference(folder, batch)
    assert load(worker_config(folder)).facts["path"] == paths[0]
    for path in paths:
        engine = load(worker_config(folder, engine=path))
        assert engine.facts["path"] == path
        np.testing.assert_allclose(vectors(engine, batch), expected, atol=1e-5, rtol=0)


def test_a_family_that_padding_changes_is_run_without_padding(
    checkpoint: Callable[..., Path], worker_config: Config, reference: Any, random_batch: Any
) -> None:
    folder = checkpoint("fnet")
    engine = load(worker_config(folder))
    assert engine.facts["path"] == "unpadded"
    assert [warning.split()[0] for warning in engine.warnings] == ["packed", "padded"]
    batch = random_batch(LENGTHS)
    np.testing.assert_allclose(vectors(engine, batch), reference(folder, batch), atol=1e-5, rtol=0)


def test_a_padding_token_inside_a_text_has_the_position_that_the_reference_gives_it(
    checkpoint: Callable[..., Path], worker_config: Config, reference: Any
) -> None:
    folder = checkpoint("roberta", pooling="cls")
    batch = PackedBatch(np.array([6, 3], dtype=np.int32), np.array([5, 1, 7, 1, 1, 9, 1, 1, 4], dtype=np.int32))
    for path in ("fused", "packed"):
        engine = load(worker_config(folder, engine=path))
        np.testing.assert_allclose(vectors(engine, batch), reference(folder, batch), atol=1e-5, rtol=0)


@pytest.mark.parametrize("path", ["fused", "packed", "padded"])
def test_any_split_into_batches_gives_the_same_vectors(
    path: str, checkpoint: Callable[..., Path], worker_config: Config, random_batch: Any
) -> None:
    engine = load(worker_config(checkpoint("bert"), engine=path))
    batch = random_batch(LENGTHS)
    sequences = np.split(batch.token_ids, np.cumsum(batch.lengths)[:-1])
    together = vectors(engine, batch)

    @settings(max_examples=25, deadline=None)
    @given(st.permutations(range(len(sequences))), st.sets(st.integers(1, len(sequences) - 1)))
    def check(order: list[int], cuts: set[int]) -> None:
        for part in np.split(np.array(order), sorted(cuts)):
            ids = [sequences[index] for index in part]
            lengths = np.array([each.size for each in ids], dtype=np.int32)
            apart = vectors(engine, PackedBatch(lengths, np.concatenate(ids)))
            np.testing.assert_allclose(apart, together[part], atol=1e-5, rtol=0)

    check()


@settings(deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60), st.booleans())
def test_rectangles_cover_every_sequence_once_and_stay_small(lengths: list[int], may_pad: bool) -> None:
    batch = PackedBatch(np.array(lengths, dtype=np.int32), np.zeros(sum(lengths), dtype=np.int32))
    layout = arrange(batch)
    cut = list(rectangles(layout, may_pad=may_pad))
    assert [index for part in cut for index in range(part.start, part.stop)] == list(range(len(lengths)))
    for part in cut:
        longest, count = layout.lengths[part].max(), part.stop - part.start
        assert count == 1 or (count <= 16 and count * longest <= 4096)
        assert may_pad or layout.lengths[part].min() == longest
        num_tokens = layout.lengths[part].sum()
        assert count * longest - num_tokens <= 64 + num_tokens / 4


# --- the choice -------------------------------------------------------------------------------------------------


@pytest.fixture
def borderless_attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plants a packed attention that takes all sequences for one."""

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **arguments: Any) -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=arguments["scaling"])
        return out.transpose(1, 2), None

    monkeypatch.setattr(packing, "packed_attention", attention)
    yield
    monkeypatch.undo()
    packing.register()
    assert AttentionInterface()[packing.PACKED_ATTENTION] is packing.packed_attention


@pytest.mark.usefixtures("borderless_attention")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_attention_across_borders_is_caught(
    dtype: str, checkpoint: Callable[..., Path], worker_config: Config, reference: Any, random_batch: Any
) -> None:
    folder = checkpoint("electra")
    engine = load(worker_config(folder, dtype=dtype))
    assert engine.facts["path"] == "padded"
    assert engine.facts["dtype"] == dtype
    (warning,) = engine.warnings
    assert warning.startswith(f"packed {dtype} is not used")
    assert "largest difference" in warning
    assert "smallest cosine 0." in warning
    batch = random_batch(LENGTHS)
    atol = 1e-5 if dtype == "float32" else 0.03
    np.testing.assert_allclose(vectors(engine, batch), reference(folder, batch), atol=atol, rtol=0)


@pytest.mark.usefixtures("borderless_attention")
def test_insisting_on_a_path_that_disagrees_is_refused(checkpoint: Callable[..., Path], worker_config: Config) -> None:
    with pytest.raises(ModelError, match=r"packed float32 is not used.*largest difference"):
        load(worker_config(checkpoint("bert"), engine="packed"))


def test_a_fused_path_that_goes_wrong_is_caught(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[..., Path], worker_config: Config
) -> None:
    attend = Attention.__call__

    def attend_across_borders(self: Attention, qkv: Any, runs: list[Run]) -> Any:
        return attend(self, qkv, [Run(start=0, count=1, length=runs[-1].stop)])

    monkeypatch.setattr(Attention, "__call__", attend_across_borders)
    engine = load(worker_config(checkpoint("bert")))
    assert engine.facts["path"] == "packed"
    (warning,) = engine.warnings
    assert warning.startswith("fused float32 is not used: its vectors are not the plain model's")


@pytest.mark.parametrize(
    ("family", "settings"),
    [("electra", {}), ("bert", {"is_decoder": True}), ("bert", {"hidden_act": "silu"})],
)
def test_what_cannot_be_fused_is_packed_without_a_warning(
    family: str, settings: dict[str, Any], checkpoint: Callable[..., Path], worker_config: Config
) -> None:
    folder = checkpoint(family, **settings)
    engine = load(worker_config(folder))
    assert (engine.facts["path"], engine.warnings) == ("packed", [])
    with pytest.raises(ModelError, match="fused float32 is not used"):
        load(worker_config(folder, engine="fused"))


def test_a_family_that_cannot_be_packed_says_so(checkpoint: Callable[..., Path], worker_config: Config) -> None:
    (warning,) = load(worker_config(checkpoint("deberta-v2"))).warnings
    assert warning.startswith("packed float32 is not used: PackingError: ")


@pytest.mark.parametrize(("dtype", "path"), [("bfloat16", "fused"), ("float16", "packed")])
def test_sixteen_bits_are_compared_with_float32(
    dtype: str, path: str, checkpoint: Callable[..., Path], worker_config: Config, reference: Any, random_batch: Any
) -> None:
    folder = checkpoint("bert")
    engine = load(worker_config(folder, dtype=dtype))
    assert (engine.facts["dtype"], engine.facts["path"]) == (dtype, path)
    assert 0.998 <= engine.facts["agreement"]["min_cosine"] < 0.9999999
    batch = random_batch(LENGTHS)
    cosines = (vectors(engine, batch) * reference(folder, batch)).sum(axis=1)
    assert cosines.min() > 0.998


def test_a_type_that_cannot_hold_the_model_is_given_up_for_float32(
    checkpoint: Callable[..., Path], worker_config: Config, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint("bert"), tmp_path / "large")
    path = folder / "model.safetensors"
    weights = load_file(path)
    # Beyond float16's 65,504, and harmless in float32: a layer norm follows.
    weights["embeddings.word_embeddings.weight"] *= 1e6
    save_file(weights, path, metadata={"format": "pt"})
    engine = load(worker_config(folder, dtype="float16"))
    assert (engine.facts["dtype"], engine.facts["path"]) == ("float32", "fused")
    assert [warning.split()[:2] for warning in engine.warnings] == [
        ["packed", "float16"],
        ["padded", "float16"],
        ["unpadded", "float16"],
    ]


def test_a_model_that_gives_nan_is_refused(
    checkpoint: Callable[..., Path], worker_config: Config, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint("bert"), tmp_path / "nan")
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["encoder.layer.1.output.dense.bias"][3] = torch.nan
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="nan"):
        load(worker_config(folder))


def test_the_stages_of_loading_are_reported(checkpoint: Callable[..., Path], worker_config: Config) -> None:
    stages: list[str] = []
    engine = load_engine(worker_config(checkpoint("bert")), stages.append)
    assert stages == [
        "loading the plain model, to compare with",
        "embedding probes of up to 60 tokens with it",
        "comparing fused float32 with it",
    ]
    assert engine.facts["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert engine.facts["agreement"]["max_abs_diff"] < 1e-5


def test_the_weightless_engine_is_loaded_without_a_model(
    checkpoint: Callable[..., Path], worker_config: Config
) -> None:
    engine = load(worker_config(checkpoint("bert"), engine="weightless"))
    assert engine.facts == {"dtype": "float32", "path": "weightless"}


# --- the real model ---------------------------------------------------------------------------------------------

TEXTS = [
    "A text-embedding server.",
    "Zwei Sätze. Ein kurzer und ein etwas längerer, der bis hierher reicht.",
    "x",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "東京は日本の首都です。",
]


@pytest.mark.parametrize("path", ["fused", "packed", "padded"])
def test_minilm_gives_the_reference_s_vectors(path: str, minilm: Path, worker_config: Config) -> None:
    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(read_card(minilm).max_tokens)
    ids = [encoding.ids for encoding in tokenizer.encode_batch(TEXTS)]
    batch = PackedBatch(np.array([len(each) for each in ids], dtype=np.int32), np.concatenate(ids).astype(np.int32))
    expected = SentenceTransformer(str(minilm), device="cpu", local_files_only=True).encode(TEXTS)
    engine = load(worker_config(minilm, engine=path))
    np.testing.assert_allclose(vectors(engine, batch, 384), expected, atol=1e-5, rtol=0)
