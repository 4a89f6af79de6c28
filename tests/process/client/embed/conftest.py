from collections.abc import Iterator

import pytest

from tests.support.bulk_server import BulkServer


@pytest.fixture
def server() -> Iterator[BulkServer]:
    with BulkServer() as server:
        yield server
