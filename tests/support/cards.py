"""Model cards of every kind, for tests that need a model's sizes and heads and no weights."""

from dataclasses import replace

from vecd.model.card import ModelCard
from vecd.model.steps import ScoreHead, SparseHead, TokenHead

DENSE = ModelCard("/m", "/m", "bert", 6, 6, 16, 2500, ("mean",), (), False, "")
RERANKER = replace(DENSE, dim=1, num_labels=1, capabilities=("rerank",), score=ScoreHead(("score",), "sigmoid", "cls"))
CLASSIFIER = replace(
    DENSE, dim=3, num_labels=3, capabilities=("classify",), score=ScoreHead(("a", "b", "c"), "softmax", "cls")
)
TOKEN_CLASSIFIER = replace(
    CLASSIFIER, capabilities=("token-classify",), score=ScoreHead(("a", "b", "c"), "softmax")
)  # without pooling
SPARSE = replace(DENSE, dim=2500, capabilities=("sparse",), sparse=SparseHead(()))
LEXICAL = replace(DENSE, dim=1, capabilities=("sparse",), sparse=SparseHead((), is_lexical=True, ignored_ids=(0, 2)))
MULTI_VECTOR = replace(
    DENSE, dim=4, token_dim=4, capabilities=("multi-vector",), tokens=TokenHead((), ignored_ids=(5, 9))
)
HYBRID = replace(
    DENSE,
    token_dim=6,
    capabilities=("dense", "sparse", "multi-vector"),
    sparse=LEXICAL.sparse,
    tokens=TokenHead((), drops_first=True),
)
