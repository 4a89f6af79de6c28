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


def _by_type(embeddings: Any) -> dict[str, Any]:
    given = embeddings.model_dump() if hasattr(embeddings, "model_dump") else embeddings.dict()
    return {name.rstrip("_"): vectors for name, vectors in given.items() if vectors is not None}


serve(embed, embed_first_api)
