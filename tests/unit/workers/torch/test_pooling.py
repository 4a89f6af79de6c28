"""Pooling and the steps behind it, against sentence-transformers' modules."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Normalize, Pooling
from torch import Tensor

from tests.support.checkpoints import Checkpoints
from vecd.model.card import ModelCard, ModelError
from vecd.model.steps import POOLINGS, Step
from vecd.workers.activations import ACTIVATIONS
from vecd.workers.batch import Run
from vecd.workers.heads import Head, pool
from vecd.workers.torch.heads import TorchOperations

RUNS = [Run(0, 3, 1), Run(3, 2, 4), Run(11, 1, 9)]
LENGTHS = [run.length for run in RUNS for _ in range(run.count)]
HIDDEN = 6
CPU = torch.device("cpu")


def card_with(folder: Path, *steps: Step) -> ModelCard:
    dim = steps[-1].out_dim or HIDDEN
    return ModelCard(str(folder), str(folder), "bert", HIDDEN, dim, 10, 10, ("mean",), steps, False, "")


OPERATIONS = TorchOperations(card_with(Path("nowhere"), Step("normalize")), CPU)


def hidden_states() -> Tensor:
    return torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(0))


def padded(hidden: Tensor) -> dict[str, Tensor]:
    """As sentence-transformers sees them: one row per sequence, zeros and a mask behind it."""
    sequences = list(torch.split(hidden, LENGTHS))
    return {
        "token_embeddings": torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True),
        "attention_mask": torch.nn.utils.rnn.pad_sequence(
            [torch.ones(n, dtype=torch.long) for n in LENGTHS], batch_first=True
        ),
    }


@pytest.mark.parametrize(
    "modes", [*((mode,) for mode in POOLINGS), *itertools.combinations(POOLINGS, 2), tuple(POOLINGS)[::-1]]
)
def test_pooling_is_the_reference_s(modes: tuple[str, ...]) -> None:
    hidden = hidden_states()
    expected = Pooling(HIDDEN, pooling_mode=modes)(padded(hidden))["sentence_embedding"]
    torch.testing.assert_close(pool(OPERATIONS, hidden, RUNS, modes), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_states_are_pooled_in_float32(dtype: torch.dtype) -> None:
    hidden = hidden_states().to(dtype)
    pooled, expected = (pool(OPERATIONS, states, RUNS, tuple(POOLINGS)) for states in (hidden, hidden.float()))
    assert torch.equal(pooled, expected.float())


def load_head(card: ModelCard) -> Head[Tensor]:
    return Head(card, TorchOperations(card, CPU))


def reference_of(modules: list[Any], pooled: Tensor) -> Tensor:
    features = {"sentence_embedding": pooled}
    with torch.inference_mode():
        for module in modules:
            features = module(features)
    return features["sentence_embedding"]


def test_a_chain_of_steps_is_the_reference_s(tmp_path: Path) -> None:
    torch.manual_seed(1)
    dense, norm = Dense(HIDDEN, 4), LayerNorm(4)
    torch.nn.init.normal_(norm.norm.weight)
    torch.nn.init.normal_(norm.norm.bias)
    for name, module in (("2_Dense", dense), ("3_LayerNorm", norm)):
        (tmp_path / name).mkdir()
        module.save(str(tmp_path / name))
    card = card_with(
        tmp_path,
        Step("dense", "2_Dense", in_dim=HIDDEN, out_dim=4, activation="tanh"),
        Step("layer_norm", "3_LayerNorm", in_dim=4, out_dim=4),
        Step("normalize"),
    )
    hidden = hidden_states()
    expected = reference_of([dense, norm, Normalize()], pool(OPERATIONS, hidden, RUNS, ["mean"]))
    torch.testing.assert_close(load_head(card)(hidden, RUNS), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", [name for name, row in ACTIVATIONS.items() if row.torch])
@pytest.mark.parametrize("bias", [True, False])
def test_every_activation_is_the_reference_s(tmp_path: Path, name: str, bias: bool) -> None:
    torch.manual_seed(2)
    dense = Dense(HIDDEN, 5, bias=bias, activation_function=getattr(torch.nn, ACTIVATIONS[name].torch)())
    dense.save(str(tmp_path))
    card = card_with(tmp_path, Step("dense", "", in_dim=HIDDEN, out_dim=5, bias=bias, activation=name))
    hidden = hidden_states()
    expected = reference_of([dense], pool(OPERATIONS, hidden, RUNS, ["mean"]))
    torch.testing.assert_close(load_head(card)(hidden, RUNS), expected, atol=1e-6, rtol=0)


def test_normalizing_leaves_a_zero_vector_alone(tmp_path: Path) -> None:
    vectors = load_head(card_with(tmp_path, Step("normalize")))(torch.zeros(20, HIDDEN), RUNS)
    assert torch.equal(vectors, torch.zeros(len(LENGTHS), HIDDEN))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda w: {**w, "linear.weight": w["linear.weight"].T.contiguous()}, r"linear.weight is \[6, 5\]"),
        (lambda w: {"linear.weight": w["linear.weight"]}, "should hold"),
    ],
)
def test_a_dense_layer_with_other_tensors_is_refused(
    checkpoint: Checkpoints, spoil: Callable[[dict[str, Tensor]], dict[str, Tensor]], why: str, tmp_path: Path
) -> None:
    Dense(HIDDEN, 5).save(str(tmp_path))
    path = tmp_path / "model.safetensors"
    save_file(spoil(load_file(path)), path)
    with pytest.raises(ModelError, match=why) as refusal:
        load_head(card_with(tmp_path, Step("dense", "", in_dim=HIDDEN, out_dim=5, activation="tanh")))
    assert str(path) in str(refusal.value)


def test_a_missing_or_broken_file_and_an_unknown_activation_are_refused(tmp_path: Path) -> None:
    step = Step("dense", "", in_dim=HIDDEN, out_dim=5, activation="tanh")
    with pytest.raises(ModelError, match="file missing"):
        load_head(card_with(tmp_path, step))
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelError, match="is not a safetensors file: it has 8 bytes"):
        load_head(card_with(tmp_path, step))
    with pytest.raises(ModelError, match="activation prelu"):
        load_head(card_with(tmp_path, Step("dense", "", in_dim=HIDDEN, out_dim=5, activation="prelu")))
