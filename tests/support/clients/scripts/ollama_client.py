"""Ollama's SDK."""

from typing import Any

import ollama
from serve import rows, serve


def embed(url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = ollama.Client(host=url).embed(**body)
    return {"vectors": rows(answer.embeddings), "model": answer.model, "tokens": answer.prompt_eval_count}


def embeddings(url: str, body: dict[str, Any]) -> list[list[float]]:
    """The endpoint of before, for one text."""
    return rows([ollama.Client(host=url).embeddings(**body).embedding])


async def embed_later(url: str, body: dict[str, Any]) -> list[list[float]]:
    return rows((await ollama.AsyncClient(host=url).embed(**body)).embeddings)


def describe(url: str, model: str) -> dict[str, Any]:
    client = ollama.Client(host=url)
    pulled = client.pull(model)
    return {
        "listed": [found.model for found in client.list().models],
        "running": [found.model for found in client.ps().models],
        "capabilities": list(client.show(model).capabilities or []),
        "pulled": pulled.status,
    }


serve(embed, embeddings, embed_later, describe)
