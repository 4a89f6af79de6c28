import pytest
import torch
from torch import nn

from vecd.workers.engines.torch.prepack import prepack_linears, restore_linears


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 8, bias=False), nn.LayerNorm(8)).eval()


@pytest.mark.parametrize("shape", [(1, 24), (7, 24), (1, 300, 24), (2, 3, 24)])
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
