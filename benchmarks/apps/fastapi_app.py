"""The server that vecd is measured against: what a good afternoon of FastAPI and sentence-transformers gives.

Owns nothing of vecd and imports nothing of it. It is written as its authors' documentation shows: a plain `def`
endpoint (FastAPI runs it in a thread), one model per process, one process per core, and one torch thread per
process so that the processes do not fight over the cores. Neither sabotaged nor tuned beyond that. Started by
`benchmarks.servers`, or by hand from the repository's root:

    pip install '.[bench]'
    export BENCH_MODEL=/path/to/all-MiniLM-L6-v2
    gunicorn --chdir benchmarks/apps fastapi_app:app --worker-class uvicorn.workers.UvicornWorker \
        --workers $(nproc) --bind 127.0.0.1:8000
"""

import base64
import os
from typing import Literal

import torch
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer

torch.set_num_threads(1)
model = SentenceTransformer(os.environ["BENCH_MODEL"], device="cpu")
app = FastAPI(title="reference")


class EmbeddingsRequest(BaseModel):
    """The part of OpenAI's request that such servers take."""

    input: str | list[str]
    model: str = "all-MiniLM-L6-v2"
    encoding_format: Literal["float", "base64"] = "float"


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage


@app.post("/v1/embeddings")
def create_embeddings(request: EmbeddingsRequest) -> EmbeddingsResponse:
    texts = [request.input] if isinstance(request.input, str) else request.input
    if not texts:
        raise HTTPException(status_code=400, detail="input is empty")
    vectors = model.encode(texts, normalize_embeddings=True)
    num_tokens = count_tokens(texts)
    return EmbeddingsResponse(
        data=[
            Embedding(
                index=index,
                embedding=base64.b64encode(vector.tobytes()).decode()
                if request.encoding_format == "base64"
                else vector.tolist(),
            )
            for index, vector in enumerate(vectors)
        ],
        model=request.model,
        usage=Usage(prompt_tokens=num_tokens, total_tokens=num_tokens),
    )


def count_tokens(texts: list[str]) -> int:
    encoded = model.tokenizer(texts, padding=True, truncation=True)
    return sum(sum(mask) for mask in encoded["attention_mask"])


@app.get("/health")
def health() -> dict[str, str]:
    return {"status": "ok"}
