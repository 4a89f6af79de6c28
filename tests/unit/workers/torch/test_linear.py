"""Linear layers of each type against torch's own."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from vecd.workers.activations import ACTIVATIONS
from vecd.workers.torch.linear import make_linear, prepack_linears, restore_linears, type_between_layers

TYPES = [dtype for dtype in ("float32", "bfloat16") if type_between_layers(dtype) is not None]
RELATIVE_ERROR = {"float32": 1e-6, "bfloat16": 0.01}


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return torch.randn(96, 64) / 8, torch.randn(96)


def made(layer, dtype):
    weight, bias = layer
    return make_linear(weight, bias, dtype), type_between_layers(dtype)


def relative_error(ours, theirs):
    return float((ours.float() - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num_tokens", [1, 255, 256, 257])
@pytest.mark.parametrize("activation", ["identity", "gelu", "gelu_new", "relu", "silu"])
def test_the_products_are_torch_s(layer, dtype, num_tokens, activation):
    linear, between = made(layer, dtype)
    x = torch.randn(num_tokens, 64)
    expected = functional.linear(x, *layer)
    if "gelu" in activation:
        expected = functional.gelu(expected, approximate=ACTIVATIONS[activation].onednn[1])
    elif activation != "identity":
        expected = getattr(functional, activation)(expected)
    with torch.inference_mode():
        ours = linear(x.to(between), ACTIVATIONS[activation].onednn)
    assert ours.dtype is between
    assert relative_error(ours, expected) < RELATIVE_ERROR[dtype]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num_tokens", [1, 300])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_residual_is_added_and_an_output_multiplied(layer, dtype, num_tokens, has_bias):
    weight, bias = layer[0], layer[1] if has_bias else None
    linear, between = make_linear(weight, bias, dtype), type_between_layers(dtype)
    x, other = torch.randn(num_tokens, 64), torch.randn(num_tokens, 96)
    plain = functional.linear(x, weight, bias)
    with torch.inference_mode():
        times, plus = (compute(x.to(between), other.to(between)) for compute in (linear.times, linear.plus))
    assert times.dtype is between
    assert relative_error(times, plain * other) < RELATIVE_ERROR[dtype]
    assert relative_error(plus, plain + other) < RELATIVE_ERROR[dtype]


def test_there_is_no_layer_for_other_types():
    assert type_between_layers("float16") is None
    assert type_between_layers("int8") is None


# --- the layers of a model ------------------------------------------------------------------------------------------


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 8, bias=False), nn.LayerNorm(8)).eval()


@pytest.mark.parametrize("shape", [(1, 24), (1, 300, 24), (2, 3, 24)])
def test_the_products_are_the_same(model, shape):
    x = torch.randn(shape)
    with torch.inference_mode():
        expected = model(x)
        assert prepack_linears(model) == 2
        assert torch.allclose(model(x), expected, atol=1e-6)


def test_what_was_prepacked_can_be_restored(model):
    with torch.inference_mode():
        prepack_linears(model)
        model[0].weight.zero_()
        x = torch.randn(3, 24)
        with_copy = model[0](x)
        restore_linears(model)
        assert not torch.allclose(with_copy, model[0](x)), "the prepacked copy is no longer used"


def test_other_kinds_of_layers_are_left_alone():
    class Special(nn.Linear):
        pass

    assert prepack_linears(nn.Sequential(Special(4, 4), nn.Conv1d(4, 4, 1), nn.Linear(4, 4).double())) == 0
