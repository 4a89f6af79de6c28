"""Tiny models."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import Checkpoints, worker_config
from tests.support.workers import _one_thread, checkpoint, minilm
from vecd.workers.config import WorkerConfig
from vecd.workers.load import load_engine

__all__ = ["_one_thread", "checkpoint", "minilm"]


@pytest.fixture
def compared(checkpoint: Checkpoints, tmp_path: Path) -> WorkerConfig:
    """Of a model that has been loaded once, and whose selection has been forgotten: its reference vectors are not."""
    config = worker_config(shutil.copytree(checkpoint("bert"), tmp_path / "model"), cache_dir=tmp_path / "cache")
    load_engine(config, lambda stage: None)
    shutil.rmtree(tmp_path / "cache/engines")
    return config


@pytest.fixture(params=["for processors", "for CUDA"])
def torch_without_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What both builds of torch answer where no driver is, whichever is installed: the error's first words."""
    is_for_cuda = request.param == "for CUDA"
    # As torch 2.13.0+cpu and 2.13.0+cu130 do on a machine without a GPU.
    error: Exception = (
        RuntimeError("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU")
        if is_for_cuda
        else AssertionError("Torch not compiled with CUDA enabled")
    )

    def refuse() -> None:
        raise error

    monkeypatch.setattr(torch.version, "cuda", "13.0" if is_for_cuda else None)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_for_cuda)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: is_for_cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)  # what each call about a device begins with
    return str(error)
