"""Open WebUI's embedding function against the real server and the real model."""

from collections.abc import Iterator

import pytest

from tests.support.clients.corpus import TEXTS, numbers
from tests.support.clients.driving import Client, ClientError, running_client

ENGINES = {"openai": "/v1", "ollama": ""}
"""Engine → the path of its address."""


@pytest.fixture(scope="module")
def open_webui() -> Iterator[Client]:
    with running_client("open-webui", "open_webui_client") as client:
        yield client


@pytest.mark.parametrize(
    ("engine", "texts", "batch_size"),
    [
        ("openai", TEXTS, 32),
        ("openai", numbers(200), 1),  # by default, as many requests as texts, all at once
        ("ollama", [text for text in TEXTS if text], 32),
        ("ollama", numbers(200), 1),
    ],
    ids=["openai", "openai, unlimited", "ollama", "ollama, unlimited"],
)
def test_embed(open_webui, float32_server, is_right, engine, texts, batch_size):
    url = float32_server.url + ENGINES[engine]
    answer = open_webui.call("embed", engine=engine, url=url, key="", texts=texts, batch_size=batch_size)
    assert is_right(answer, texts)


@pytest.mark.parametrize(("engine", "words"), [("openai", "401"), ("ollama", "401.*API key")])
def test_a_wrong_key_is_told(open_webui, strict_server, engine, words):
    url = strict_server.url + ENGINES[engine]
    with pytest.raises(ClientError, match=words):
        open_webui.call("embed", engine=engine, url=url, key="wrong", texts=["hello"])
