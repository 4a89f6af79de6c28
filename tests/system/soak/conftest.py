"""What trials share: tenants whose vectors are known."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.soak.form import LONG
from tests.support.soak.questions import Tenant
from tests.support.soak.tenants import make_dummy_tenants, make_tenant


@pytest.fixture(scope="session")
def tenants(reference: Callable[[list[str]], NDArray[np.float32]]) -> list[Tenant]:
    """Two callers with nothing in common but the server, and the bundled model's vectors for their texts."""
    return [make_tenant(name, 40, reference, seed=seed) for seed, name in enumerate(("alpha", "beta"))]


@pytest.fixture(scope="session")
def dummy_tenants(minilm_folder: Path) -> list[Tenant]:
    """A caller with texts and one with ids, of all shapes, and what the engine without a model makes of them."""
    return make_dummy_tenants(minilm_folder, 400)


@pytest.fixture(scope="session")
def callers(request: pytest.FixtureRequest) -> list[Tenant]:
    """Those whose vectors the engine of `form.ENGINE` makes."""
    found: list[Tenant] = request.getfixturevalue("tenants" if LONG else "dummy_tenants")
    return found
