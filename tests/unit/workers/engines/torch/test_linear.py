"""Linear layers of each type against torch's own, and what int8 promises: no token depends on another."""

import pytest
import torch
from torch.nn import functional

from vecd.workers.engines.torch.linear import ACTIVATIONS, QuantizedLinear, make_linear, type_between_layers

TYPES = [dtype for dtype in ("float32", "bfloat16", "int8") if type_between_layers(dtype) is not None]
RELATIVE_ERROR = {"float32": 1e-6, "bfloat16": 0.01, "int8": 0.03}


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
@pytest.mark.parametrize("num_tokens", [1, 12, 255, 256, 257, 700])
@pytest.mark.parametrize("activation", ["none", *ACTIVATIONS])
def test_the_products_are_torch_s(layer, dtype, num_tokens, activation):
    linear, between = made(layer, dtype)
    x = torch.randn(num_tokens, 64)
    expected = functional.linear(x, *layer)
    if activation == "relu":
        expected = expected.relu()
    elif activation != "none":
        expected = functional.gelu(expected, approximate=ACTIVATIONS[activation][1])
    with torch.inference_mode():
        ours = linear(x.to(between), ACTIVATIONS.get(activation, ("none", "")))
    assert ours.dtype is between
    assert relative_error(ours, expected) < RELATIVE_ERROR[dtype]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num_tokens", [1, 300])
def test_a_residual_is_added(layer, dtype, num_tokens):
    linear, between = made(layer, dtype)
    x, residual = torch.randn(num_tokens, 64), torch.randn(num_tokens, 96)
    with torch.inference_mode():
        ours = linear.plus(x.to(between), residual.to(between))
    assert relative_error(ours, functional.linear(x, *layer) + residual) < RELATIVE_ERROR[dtype]


needs_int8 = pytest.mark.skipif("int8" not in TYPES, reason="this processor has no int8 products (VNNI)")


@needs_int8
def test_an_int8_product_does_not_depend_on_its_neighbours(layer):
    linear, between = made(layer, "int8")
    x = torch.randn(8, 64).to(between)
    among_giants = torch.cat([x, 1000 * x])
    with torch.inference_mode():
        assert torch.equal(linear(x), linear(among_giants)[:8])


@needs_int8
def test_an_int8_product_of_zeros_is_the_bias(layer):
    linear, between = made(layer, "int8")
    with torch.inference_mode():
        assert torch.equal(linear(torch.zeros(3, 64, dtype=between))[1], layer[1].to(between))


@needs_int8
def test_int8_weights_of_zero_are_no_division_by_zero():
    weight = torch.zeros(4, 8)
    linear = QuantizedLinear.of(weight, torch.ones(4))
    with torch.inference_mode():
        assert torch.equal(linear(torch.randn(2, 8)), torch.ones(2, 4))


def test_there_is_no_layer_for_other_types():
    assert type_between_layers("float16") is None
