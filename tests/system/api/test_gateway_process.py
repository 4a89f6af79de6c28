"""The gateway stays small: no torch, no transformers, little memory."""

from tests.support.texts import make_texts

MAX_RESIDENT_MB = 150


def test_the_gateway_has_neither_torch_nor_much_memory(float32_server):
    float32_server.embed(make_texts(64, seed=5))
    gateway = float32_server.gateway()
    mapped = {mapping.path for mapping in gateway.memory_maps()}
    assert not [path for path in mapped if "/torch/" in path or "transformers" in path]
    assert gateway.memory_info().rss < MAX_RESIDENT_MB * 2**20


def test_the_supervisor_has_neither_torch_nor_numpy(float32_server):
    mapped = {mapping.path for mapping in float32_server.processes()[0].memory_maps()}
    assert not [path for path in mapped if "/torch/" in path or "/numpy/" in path]
