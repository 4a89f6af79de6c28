"""Tiny models, and sentence-transformers' vectors of them."""

import pytest
import torch
import transformers

from tests.support.checkpoints import Checkpoints, Reference


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp)


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()
