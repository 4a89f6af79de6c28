"""LiteLLM."""

from typing import Any

import litellm
from serve import rows, serve

MODEL = "all-MiniLM-L6-v2"
_PATHS = {"cohere": "/v2/embed", "ollama": ""}
"""Of the provider's API below the server; "/v1" for all others."""


def embed(provider: str, url: str, texts: list[str], key: str = "unused", **options: Any) -> dict[str, Any]:
    model = options.pop("model", MODEL)
    base = url + _PATHS.get(provider, "/v1")
    options = {"num_retries": 0, "max_retries": 0, **options}
    answer = litellm.embedding(model=f"{provider}/{model}", input=texts, api_base=base, api_key=key, **options)
    return {"vectors": rows(item["embedding"] for item in answer.data), "tokens": answer.usage.prompt_tokens}


def rerank(
    provider: str, url: str, query: str, texts: list[Any], key: str = "unused", **options: Any
) -> dict[str, Any]:
    model = f"{provider}/{options.pop('model', 'm')}"
    options = {"num_retries": 0, "max_retries": 0, **options}
    answer = litellm.rerank(model=model, query=query, documents=texts, api_base=url, api_key=key, **options)
    results = answer.results or []
    documents = [result.get("document") for result in results]
    return {
        "ranked": [(result["index"], result["relevance_score"]) for result in results],
        "texts": [document and document["text"] for document in documents],
    }


serve(embed, rerank)
