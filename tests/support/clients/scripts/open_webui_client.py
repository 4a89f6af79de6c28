"""Open WebUI's embedding function, as its own code makes it for the engines `openai` and `ollama`."""

import os
from typing import Any

from serve import rows, serve

MODEL = "all-MiniLM-L6-v2"
os.environ |= {"DATA_DIR": os.getcwd(), "STATIC_DIR": os.path.abspath("static"), "WEBUI_SECRET_KEY": "unused"}
"""Folders of its own: it removes the files in STATIC_DIR when it is imported."""
os.environ |= {"FROM_INIT_PY": "true", "USE_SLIM_DOCKER": "true"}
"""As `open-webui serve` sets it, to find the frontend; and as the slim image, without a vector store."""


async def run(code: str) -> list[list[float]]:
    """The settings of docs/clients.md, read by Open WebUI as environment variables."""
    os.environ |= dict(line.split("=", 1) for line in code.split())
    from open_webui import config

    engine = config.RAG_EMBEDDING_ENGINE
    url = config.RAG_OPENAI_API_BASE_URL if engine == "openai" else config.RAG_OLLAMA_BASE_URL
    options = {"batch_size": config.RAG_EMBEDDING_BATCH_SIZE, "model": config.RAG_EMBEDDING_MODEL}
    return await embed(engine, url, ["Hello, world", "second text"], config.RAG_OPENAI_API_KEY, **options)


async def embed(
    engine: str, url: str, texts: list[str], key: str = "", batch_size: int = 1, model: str = MODEL
) -> list[list[float]]:
    """As `main.py` of Open WebUI calls it. The default size of a batch is Open WebUI's."""
    from open_webui.retrieval.utils import get_embedding_function

    function: Any = get_embedding_function(engine, model, None, url, key, batch_size)
    return rows(await function(texts))


serve(run, embed)
