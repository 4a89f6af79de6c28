"""Cohere's SDK: the clients of its first and second API."""

from typing import Any

import cohere
from serve import serve


def embed(url: str, body: dict[str, Any], key: str = "unused") -> dict[str, Any]:
    """By `/v2/embed`."""
    answer = cohere.ClientV2(api_key=key, base_url=url).embed(**body, request_options={"max_retries": 0})
    return {"embeddings": _by_type(answer.embeddings), "texts": answer.texts, "meta": answer.meta is not None}


def embed_first_api(url: str, body: dict[str, Any], key: str = "unused") -> dict[str, Any]:
    """By `/v1/embed`, at most 96 texts in a request: the client cuts the list and puts the answers together."""
    answer = cohere.Client(api_key=key, base_url=url).embed(**body)
    embeddings = answer.embeddings
    if isinstance(embeddings, list):
        return {"kind": answer.response_type, "vectors": embeddings, "texts": answer.texts}
    return {"kind": answer.response_type, "embeddings": _by_type(embeddings), "texts": answer.texts}


def rerank(url: str, body: dict[str, Any], key: str = "unused", **extra: Any) -> dict[str, Any]:
    """By `/v2/rerank`. `extra`: fields of the body that the client does not know."""
    options: Any = {"max_retries": 0, "additional_body_parameters": extra}
    answer = cohere.ClientV2(api_key=key, base_url=url).rerank(model="m", **body, request_options=options)
    return _ranked(answer)


def rerank_first_api(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """By `/v1/rerank`."""
    return _ranked(cohere.Client(api_key="unused", base_url=url).rerank(**body))


def _ranked(answer: Any) -> dict[str, Any]:
    documents = [getattr(result, "document", None) for result in answer.results]
    return {
        "ranked": [(result.index, result.relevance_score) for result in answer.results],
        "texts": [document and document.text for document in documents],
        "search_units": answer.meta.billed_units.search_units,
        "id": answer.id,
    }


def _by_type(embeddings: Any) -> dict[str, Any]:
    given = embeddings.model_dump() if hasattr(embeddings, "model_dump") else embeddings.dict()
    return {name.rstrip("_"): vectors for name, vectors in given.items() if vectors is not None}


serve(embed, embed_first_api, rerank, rerank_first_api)
