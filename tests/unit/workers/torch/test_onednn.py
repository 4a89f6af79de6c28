"""A private name of torch, or of transformers, that is gone or changed costs a path or a dtype and never the start."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import Checkpoints, worker_config
from vecd.model.card import ModelError
from vecd.workers.batch import Engine
from vecd.workers.load import load_engine
from vecd.workers.torch.linear import BFLOAT16_NAME, FLOAT_NAMES, float_kernels, prepack_linears, type_between_layers

if not torch.backends.mkldnn.is_available():
    pytest.skip("this torch has no oneDNN", allow_module_level=True)


class Without:
    """A namespace of `torch.ops` in which one operation does not exist."""

    def __init__(self, namespace: Any, name: str) -> None:
        self._namespace, self._name = namespace, name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise AttributeError(f"'_OpNamespace' object has no attribute '{name}'")
        return getattr(self._namespace, name)


@pytest.fixture(autouse=True)
def _no_memory() -> Iterator[None]:
    float_kernels.cache_clear()
    yield
    float_kernels.cache_clear()


@pytest.fixture
def rename(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`rename(name)`: torch no longer has the operation of this name, one of `onednn`'s."""

    def rename(name: str) -> None:
        _, namespace, operation, _ = name.split(".")
        monkeypatch.setattr(torch.ops, namespace, Without(getattr(torch.ops, namespace), operation))

    return rename


@pytest.fixture
def bert(checkpoint: Checkpoints) -> Path:
    return checkpoint("bert")


def load(folder: Path, **changes: Any) -> Engine:
    return load_engine(worker_config(folder, **changes), lambda stage: None)


def test_all_kernels_of_this_torch_work() -> None:
    assert float_kernels(torch.float32) is not None
    assert float_kernels(torch.float16) is None


@pytest.mark.parametrize("name", [FLOAT_NAMES["linear"], BFLOAT16_NAME])
def test_without_a_float_kernel_the_model_is_lean_in_float32(
    name: str, bert: Path, rename: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    rename(name)
    engine = load(bert, dtype="auto")
    assert (engine.facts["path"], engine.facts["dtype"]) == ("lean", "float32")
    if name == BFLOAT16_NAME:
        assert float_kernels(torch.bfloat16) is None
        assert caplog.text.count("_is_mkldnn_bf16_supported") == 1
    else:
        assert prepack_linears(torch.nn.Linear(4, 4)) == 0
        assert f"torch.{name.rpartition('.')[0]}" in caplog.text
        assert type_between_layers("float32") is None


def test_a_kernel_with_other_arguments_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(FLOAT_NAMES, "linear", FLOAT_NAMES["linear_with"])
    assert float_kernels(torch.float32) is None
    assert caplog.text.count("are not used: ") == 1


def test_a_kernel_that_computes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(FLOAT_NAMES, "linear_with", "zeros_like")
    monkeypatch.setattr(torch, "zeros_like", lambda x, *_: x)
    assert float_kernels(torch.float32) is None
    assert "a wrong result" in caplog.text


def test_without_a_name_inside_transformers_the_model_is_padded(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("packed", "padded"):
        monkeypatch.delitem(sys.modules, f"vecd.workers.torch.{name}", raising=False)
    # The import of the module that needs such names fails.
    monkeypatch.setitem(sys.modules, "vecd.workers.torch.packed", None)
    engine = load(checkpoint("albert"))  # has no path of vecd's own
    assert engine.facts["path"] == "padded"
    assert engine.warnings[0].startswith("packed float32 is not used: ModuleNotFoundError: ")


def test_a_remembered_engine_whose_kernel_is_gone_is_selected_anew(
    bert: Path, tmp_path: Path, rename: Callable[[str], None]
) -> None:
    cache = {"cache_dir": tmp_path, "dtype": "float32", "engine": "fused"}
    assert load(bert, **cache).facts["path"] == "fused"
    float_kernels.cache_clear()
    rename(FLOAT_NAMES["linear"])
    with pytest.raises(ModelError, match="there are no linear kernels for float32 here"):
        load(bert, **cache)
