"""LangChain's embeddings of OpenAI's API. By default it sends token ids of OpenAI's vocabulary instead of texts."""

from typing import Any

from langchain_openai import OpenAIEmbeddings
from serve import rows, serve

MODEL = "all-MiniLM-L6-v2"


def embed_documents(url: str, texts: list[str], **options: Any) -> list[list[float]]:
    embeddings = OpenAIEmbeddings(model=MODEL, base_url=url, api_key="unused", max_retries=0, **options)
    return rows(embeddings.embed_documents(texts))


def embed_queries(url: str, texts: list[str], **options: Any) -> list[list[float]]:
    embeddings = OpenAIEmbeddings(model=MODEL, base_url=url, api_key="unused", max_retries=0, **options)
    return rows(embeddings.embed_query(text) for text in texts)


async def embed_documents_later(url: str, texts: list[str], **options: Any) -> list[list[float]]:
    embeddings = OpenAIEmbeddings(model=MODEL, base_url=url, api_key="unused", max_retries=0, **options)
    return rows(await embeddings.aembed_documents(texts))


serve(embed_documents, embed_queries, embed_documents_later)
