"""The reranker that vecd is measured against: FastAPI and sentence-transformers' CrossEncoder, as their pages show it.

Owns nothing of vecd and imports nothing of it. Like `fastapi_app`: a plain `def` endpoint, one model per process, and
as many torch threads as BENCH_THREADS says. `CrossEncoder.predict` batches 32 pairs, its default. Started by
`benchmarks.recipes`, or by hand from the repository's root:

    export BENCH_MODEL=/path/to/cross-encoder BENCH_THREADS=1
    gunicorn --chdir benchmarks/apps rerank_app:app --worker-class uvicorn.workers.UvicornWorker \
        --workers $(nproc) --bind 127.0.0.1:8000
"""

import os

import torch
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel
from sentence_transformers import CrossEncoder

torch.set_num_threads(int(os.environ["BENCH_THREADS"]))
model = CrossEncoder(os.environ["BENCH_MODEL"], device="cpu")
app = FastAPI(title="reference")


class RerankRequest(BaseModel):
    """The part of the usual request that such servers take."""

    query: str
    documents: list[str]
    raw_scores: bool = False


class Result(BaseModel):
    index: int
    relevance_score: float


class RerankResponse(BaseModel):
    results: list[Result]


@app.post("/v1/rerank")
def create_rerank(request: RerankRequest) -> RerankResponse:
    if not request.documents:
        raise HTTPException(status_code=400, detail="documents is empty")
    pairs = [(request.query, document) for document in request.documents]
    activation = torch.nn.Identity() if request.raw_scores else None
    scores = model.predict(pairs, activation_fn=activation).tolist()
    ranked = sorted(enumerate(scores), key=lambda item: item[1], reverse=True)
    return RerankResponse(results=[Result(index=index, relevance_score=score) for index, score in ranked])


@app.get("/health")
def health() -> dict[str, str]:
    return {"status": "ok"}
