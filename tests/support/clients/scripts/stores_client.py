"""Chroma."""

import os
from typing import Any

import chromadb
from chromadb.utils.embedding_functions import OpenAIEmbeddingFunction
from serve import rows, serve

MODEL = "all-MiniLM-L6-v2"


def chroma_collection(url: str, texts: list[str], query: str) -> dict[str, Any]:
    """What a collection keeps of texts, and what it finds."""
    os.environ["OPENAI_API_KEY"] = "unused"
    function = OpenAIEmbeddingFunction(api_key_env_var="OPENAI_API_KEY", api_base=f"{url}/v1", model_name=MODEL)
    collection = chromadb.EphemeralClient().get_or_create_collection("texts", embedding_function=function)
    collection.add(ids=[str(i) for i in range(len(texts))], documents=texts)
    kept = collection.get(include=["embeddings"])
    vectors = dict(zip(kept["ids"], kept["embeddings"], strict=True))
    found = collection.query(query_texts=[query], n_results=1)
    return {"vectors": rows(vectors[str(i)] for i in range(len(texts))), "found": found["documents"][0][0]}


serve(chroma_collection)
