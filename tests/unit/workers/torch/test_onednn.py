"""A private name of torch, or of transformers, that is gone or changed costs a path or a dtype and never the start."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch

from tests.support.checkpoints import Checkpoints, worker_config
from vecd.model.card import ModelError
from vecd.workers.batch import Engine
from vecd.workers.load import load_engine
from vecd.workers.torch.linear import float_kernels, prepack_linears, type_between_layers

if not torch.backends.mkldnn.is_available():
    pytest.skip("this torch has no oneDNN", allow_module_level=True)


class Changed:
    """oneDNN's operations in `torch.ops`, with another one of one name; None: it does not exist."""

    def __init__(self, name: str, operation: Any) -> None:
        self._others, self._name, self._operation = torch.ops.mkldnn, name, operation

    def __getattr__(self, name: str) -> Any:
        if name == self._name and self._operation is None:
            raise AttributeError(f"'_OpNamespace' object has no attribute '{name}'")
        return self._operation if name == self._name else getattr(self._others, name)


@pytest.fixture(autouse=True)
def _no_memory() -> Iterator[None]:
    float_kernels.cache_clear()
    yield
    float_kernels.cache_clear()


LINEAR, SUPPORTED = "_linear_pointwise", "_is_mkldnn_bf16_supported"

Change: TypeAlias = Callable[[str, Any], None]


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch) -> Change:
    return lambda name, operation: monkeypatch.setattr(torch.ops, "mkldnn", Changed(name, operation))


@pytest.fixture
def bert(checkpoint: Checkpoints) -> Path:
    return checkpoint("bert")


def load(folder: Path, **changes: Any) -> Engine:
    return load_engine(worker_config(folder, **changes), lambda stage: None)


def test_all_kernels_of_this_torch_work() -> None:
    assert float_kernels(torch.float32) is not None
    assert float_kernels(torch.float16) is None


@pytest.mark.parametrize("name", [LINEAR, SUPPORTED])
def test_without_a_float_kernel_the_model_is_lean_in_float32(
    name: str, bert: Path, change: Change, caplog: pytest.LogCaptureFixture
) -> None:
    change(name, None)
    engine = load(bert, dtype="auto")
    assert (engine.facts["path"], engine.facts["dtype"]) == ("lean", "float32")
    if name == SUPPORTED:
        assert float_kernels(torch.bfloat16) is None
        assert caplog.text.count(name) == 1
    else:
        assert prepack_linears(torch.nn.Linear(4, 4)) == 0
        assert name in caplog.text
        assert type_between_layers("float32") is None


@pytest.mark.parametrize(
    ("default", "binary", "why"),
    [
        (torch.ops.mkldnn._linear_pointwise.binary, torch.ops.mkldnn._linear_pointwise.binary, "are not used: "),
        (torch.ops.mkldnn._linear_pointwise.default, lambda x, *_: x, "a wrong result"),
    ],
    ids=["other arguments", "something else"],
)
def test_a_changed_kernel_is_not_used(
    default: Any, binary: Any, why: str, change: Change, caplog: pytest.LogCaptureFixture
) -> None:
    change(LINEAR, SimpleNamespace(default=default, binary=binary))
    assert float_kernels(torch.float32) is None
    assert caplog.text.count(why) == 1


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


def test_a_remembered_engine_whose_kernel_is_gone_is_selected_anew(bert: Path, tmp_path: Path, change: Change) -> None:
    cache = {"cache_dir": tmp_path, "dtype": "float32", "engine": "fused"}
    assert load(bert, **cache).facts["path"] == "fused"
    float_kernels.cache_clear()
    change(LINEAR, None)
    with pytest.raises(ModelError, match="there are no linear kernels for float32 here"):
        load(bert, **cache)
