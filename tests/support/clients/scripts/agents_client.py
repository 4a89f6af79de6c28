"""agno, pydantic-ai, DSPy and txtai: a function for each, which embeds texts."""

from typing import Any

from serve import rows, serve

MODEL = "all-MiniLM-L6-v2"


def agno_openai(url: str, texts: list[str], dimensions: int | None = 384) -> list[list[float]]:
    from agno.knowledge.embedder.openai import OpenAIEmbedder

    embedder = OpenAIEmbedder(id=MODEL, base_url=f"{url}/v1", api_key="unused", dimensions=dimensions)
    return rows(embedder.get_embedding(text) for text in texts)


async def agno_openai_batch(url: str, texts: list[str]) -> list[list[float]]:
    from agno.knowledge.embedder.openai import OpenAIEmbedder

    embedder = OpenAIEmbedder(id=MODEL, base_url=f"{url}/v1", api_key="unused", dimensions=384)
    vectors, _ = await embedder.async_get_embeddings_batch_and_usage(texts)
    return rows(vectors)


def agno_ollama(url: str, texts: list[str]) -> list[list[float]]:
    from agno.knowledge.embedder.ollama import OllamaEmbedder

    embedder = OllamaEmbedder(id=MODEL, host=url, dimensions=384)
    return rows(embedder.get_embedding(text) for text in texts)


def pydantic_ai(url: str, texts: list[str], model: str = MODEL) -> list[list[float]]:
    from pydantic_ai import Embedder
    from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="unused")
    return rows(Embedder(OpenAIEmbeddingModel(model, provider=provider)).embed_documents_sync(texts).embeddings)


def dspy(url: str, texts: list[str]) -> list[list[float]]:
    import dspy

    embedder = dspy.Embedder(f"openai/{MODEL}", api_base=f"{url}/v1", api_key="unused", caching=False)
    return rows(embedder(texts))


def txtai(url: str, texts: list[str]) -> list[list[float]]:
    return rows(_txtai(url).batchtransform(texts))


def txtai_search(url: str, texts: list[str], query: str) -> list[int]:
    """Index texts and return the places of the two nearest to the query."""
    embeddings = _txtai(url)
    embeddings.index(texts)
    return [place for place, _ in embeddings.search(query, 2)]


def _txtai(url: str) -> Any:
    from txtai import Embeddings

    options = {"api_base": f"{url}/v1", "api_key": "unused"}
    return Embeddings(path=f"openai/{MODEL}", method="litellm", vectors=options)


serve(agno_openai, agno_openai_batch, agno_ollama, pydantic_ai, dspy, txtai, txtai_search)
