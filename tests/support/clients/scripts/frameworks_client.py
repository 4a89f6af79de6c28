"""LlamaIndex, Haystack and Voyage's client."""

import os
from typing import Any

from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder
from haystack.utils import Secret
from llama_index.core.embeddings import BaseEmbedding
from llama_index.embeddings.ollama import OllamaEmbedding
from llama_index.embeddings.openai import OpenAIEmbedding
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from serve import rows, serve

MODEL = "all-MiniLM-L6-v2"


def llama_index(kind: str, url: str, texts: list[str]) -> list[list[float]]:
    """The last one is a query."""
    embedding = _llama_index(kind, url)
    *texts, query = texts
    return rows([*embedding.get_text_embedding_batch(texts), embedding.get_query_embedding(query)])


async def llama_index_later(kind: str, url: str, texts: list[str]) -> list[list[float]]:
    return rows(await _llama_index(kind, url).aget_text_embedding_batch(texts))


def _llama_index(kind: str, url: str) -> BaseEmbedding:
    match kind:
        case "openai_like":
            return OpenAILikeEmbedding(model_name=MODEL, api_base=f"{url}/v1", api_key="unused", max_retries=0)
        case "openai":
            return OpenAIEmbedding(model_name=MODEL, api_base=f"{url}/v1", api_key="unused", max_retries=0)
        case "text_embeddings_inference":
            return TextEmbeddingsInference(model_name=MODEL, base_url=url)
    return OllamaEmbedding(model_name=MODEL, base_url=url)


def haystack_documents(url: str, texts: list[str | None], key: str = "unused") -> dict[str, Any]:
    embedder = OpenAIDocumentEmbedder(
        api_key=Secret.from_token(key),
        model=MODEL,
        api_base_url=f"{url}/v1",
        progress_bar=False,
        max_retries=0,
        raise_on_failure=True,
    )
    answer = embedder.run([Document(id=str(i), content=text) for i, text in enumerate(texts)])
    num_tokens = answer["meta"]["usage"]["total_tokens"]
    return {"vectors": [document.embedding for document in answer["documents"]], "tokens": num_tokens}


def voyage(url: str, texts: list[str], key: str = "unused", **options: Any) -> dict[str, Any]:
    import voyageai  # it takes seconds

    os.environ["VOYAGE_API_KEY"] = key
    answer = voyageai.Client(api_key=key, base_url=f"{url}/v1").embed(texts, **{"model": MODEL, **options})
    return {"vectors": rows(answer.embeddings), "tokens": answer.total_tokens}


serve(llama_index, llama_index_later, haystack_documents, voyage)
