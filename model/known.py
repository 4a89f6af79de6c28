"""The models that people name by one word, and what is published about models by name, where their files do not say it.

Owns both tables. Knows no revision: a name means what its repository on the Hugging Face hub has now. Reads nothing.

Sources: the model cards on the hub, jina.ai/models, and Ollama's library, whose names of one word mean the same models
here; but qwen3-embedding is the smallest one, not its 8B.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from vecd.base.flags import closest

_UP_TO_1024 = (32, 64, 128, 256, 512, 768, 1024)
_DIMS: tuple[tuple[str, tuple[int, ...]], ...] = (
    (r"qwen3-embedding-[\d.]+b", ()),
    (r"embeddinggemma-300m", (128, 256, 512, 768)),
    (r"nomic-embed-text-v1\.5", (64, 128, 256, 512, 768)),
    (r"nomic-embed-text-v2-moe", (256, 768)),
    (r"modernbert-embed-base", (256, 768)),
    (r"mxbai-embed-large-v1", ()),
    (r"snowflake-arctic-embed-(m-v1\.5|[ml]-v2\.0)", (256,)),
    (r"jina-embeddings-v3(-hf)?|jina-embeddings-v5-text-(small|nano)(-\w.*)?", _UP_TO_1024),
    (r"kalm-embedding-multilingual-mini-instruct-v2\.5", (64, 128, 256, 512, 896)),
    (r"voyage-4-nano", (256, 512, 1024, 2048)),
    (r"static-(retrieval-mrl-en|similarity-mrl-multilingual)-v1", (32, 64, 128, 256, 512, 1024)),
    (r"potion-[\w-]+", ()),
)
"""The lengths that vectors may be cut to, some longer than the vectors of smaller variants; empty: any length."""


def published_dims(names: str) -> tuple[int, ...] | None:
    """Of a model whose folder, id or settings have these names, whole and without the owner; None: nothing is
    published."""
    parts = re.split(r"/|--|\s", names.lower())
    found = (dims for pattern, dims in _DIMS if any(re.fullmatch(pattern, part) for part in parts))
    return next(found, None)


# --- names of one word ------------------------------------------------------------------------------------------

_KNOWN: dict[str, dict[str, str]] = {
    "dense": {
        "sentence-transformers/all-MiniLM-L6-v2": "all-minilm",
        "sentence-transformers/all-MiniLM-L12-v2": "",
        "sentence-transformers/all-mpnet-base-v2": "all-mpnet",
        "sentence-transformers/all-distilroberta-v1": "",
        "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2": "",
        "sentence-transformers/paraphrase-multilingual-mpnet-base-v2": "paraphrase-multilingual",
        "sentence-transformers/multi-qa-mpnet-base-dot-v1": "",
        "sentence-transformers/msmarco-distilbert-base-tas-b": "",
        "sentence-transformers/distiluse-base-multilingual-cased-v2": "distiluse",
        "sentence-transformers/LaBSE": "",
        "setu4993/LEALLA-small": "lealla",
        "sentence-transformers/sentence-t5-base": "sentence-t5",
        "sentence-transformers/gtr-t5-base": "gtr-t5",
        "hkunlp/instructor-large": "instructor",
        "sentence-transformers/static-retrieval-mrl-en-v1": "static-retrieval",
        "minishlab/potion-base-8M": "potion",
        "BAAI/bge-small-en-v1.5": "bge-small",
        "BAAI/bge-base-en-v1.5": "bge-base",
        "BAAI/bge-large-en-v1.5": "bge-large",
        "BAAI/bge-m3": "",
        "BAAI/bge-multilingual-gemma2": "",
        "intfloat/e5-base-v2": "e5-base",
        "intfloat/multilingual-e5-small": "",
        "intfloat/multilingual-e5-base": "",
        "intfloat/multilingual-e5-large-instruct": "multilingual-e5",
        "intfloat/e5-mistral-7b-instruct": "e5-mistral",
        "thenlper/gte-base": "",
        "Alibaba-NLP/gte-base-en-v1.5": "",
        "Alibaba-NLP/gte-multilingual-base": "gte-multilingual",
        "Alibaba-NLP/gte-modernbert-base": "gte-modernbert",
        "Alibaba-NLP/gte-Qwen2-1.5B-instruct": "gte-qwen2",
        "mixedbread-ai/mxbai-embed-large-v1": "mxbai-embed-large",
        "Snowflake/snowflake-arctic-embed-m": "",
        "Snowflake/snowflake-arctic-embed-l": "snowflake-arctic-embed",
        "Snowflake/snowflake-arctic-embed-m-v2.0": "",
        "Snowflake/snowflake-arctic-embed-l-v2.0": "snowflake-arctic-embed2",
        "ibm-granite/granite-embedding-30m-english": "granite-embedding",
        "ibm-granite/granite-embedding-107m-multilingual": "",
        "ibm-granite/granite-embedding-english-r2": "",
        "ibm-granite/granite-embedding-97m-multilingual-r2": "",
        "nomic-ai/nomic-embed-text-v1": "",
        "nomic-ai/nomic-embed-text-v1.5": "nomic-embed-text",
        "nomic-ai/nomic-embed-text-v2-moe": "",
        "nomic-ai/CodeRankEmbed": "",
        "nomic-ai/modernbert-embed-base": "modernbert-embed",
        "NovaSearch/stella_en_400M_v5": "stella",
        "NovaSearch/stella_en_1.5B_v5": "",
        "Qwen/Qwen3-Embedding-0.6B": "qwen3-embedding",
        "Qwen/Qwen3-Embedding-4B": "",
        "Qwen/Qwen3-Embedding-8B": "",
        "HIT-TMG/KaLM-embedding-multilingual-mini-instruct-v1.5": "",
        "HIT-TMG/KaLM-embedding-multilingual-mini-instruct-v2": "kalm-embedding",
        "infly/inf-retriever-v1-1.5b": "inf-retriever",
        "Salesforce/SFR-Embedding-Mistral": "",
        "google/embeddinggemma-300m": "embeddinggemma",
        "google/embeddinggemma-2": "embeddinggemma2",
        "microsoft/harrier-oss-v1-270m": "",
        "microsoft/harrier-oss-v1-0.6b": "harrier",
        "EuroBERT/EuroBERT-210m": "eurobert",
        "jinaai/jina-embeddings-v2-base-en": "jina-embeddings-v2",
        "jinaai/jina-embeddings-v2-small-en": "",
        "jinaai/jina-embeddings-v2-base-code": "",
        "jinaai/jina-embeddings-v2-base-de": "",
        "jinaai/jina-embeddings-v2-base-es": "",
        "jinaai/jina-embeddings-v2-base-zh": "",
        "jinaai/jina-embeddings-v3": "",
        "jinaai/jina-embeddings-v3-hf": "",
        "jinaai/jina-embeddings-v5-text-small": "jina-embeddings-v5",
        "jinaai/jina-embeddings-v5-text-small-retrieval": "",
        "jinaai/jina-embeddings-v5-text-nano": "",
        "jinaai/jina-code-embeddings-0.5b": "jina-code-embeddings",
        "MongoDB/mdbr-leaf-ir-asym": "mdbr-leaf-ir",
        "nvidia/llama-embed-nemotron-8b": "llama-embed-nemotron",
        "nvidia/llama-nemotron-embed-1b-v2": "llama-nemotron-embed",
        "voyageai/voyage-4-nano": "",
        "perplexity-ai/pplx-embed-v1-0.6b": "pplx-embed",
    },
    "rerank": {
        "cross-encoder/ms-marco-MiniLM-L6-v2": "ms-marco-minilm",
        "cross-encoder/ms-marco-TinyBERT-L2-v2": "",
        "BAAI/bge-reranker-base": "",
        "BAAI/bge-reranker-v2-m3": "bge-reranker",
        "BAAI/bge-reranker-v2-gemma": "",
        "mixedbread-ai/mxbai-rerank-base-v1": "",
        "mixedbread-ai/mxbai-rerank-base-v2": "mxbai-rerank",
        "Alibaba-NLP/gte-reranker-modernbert-base": "gte-reranker",
        "Alibaba-NLP/gte-multilingual-reranker-base": "",
        "ibm-granite/granite-embedding-reranker-english-r2": "granite-reranker",
        "jinaai/jina-reranker-v2-base-multilingual": "jina-reranker",
        "Qwen/Qwen3-Reranker-0.6B": "qwen3-reranker",
        "tomaarsen/Qwen3-Reranker-0.6B-seq-cls": "",
        "zeroentropy/zerank-1-small": "",
        "zeroentropy/zerank-2-reranker": "zerank",
        "ContextualAI/ctxl-rerank-v2-instruct-multilingual-1b": "ctxl-rerank",
        "nvidia/llama-nemotron-rerank-1b-v2": "llama-nemotron-rerank",
    },
    "classify": {
        "SamLowe/roberta-base-go_emotions": "go-emotions",
        "unitary/toxic-bert": "",
        "cardiffnlp/twitter-roberta-base-sentiment-latest": "twitter-sentiment",
        "protectai/deberta-v3-base-prompt-injection-v2": "prompt-injection",
        "distilbert/distilbert-base-uncased-finetuned-sst-2-english": "",
        "cross-encoder/nli-deberta-v3-base": "nli-deberta-v3",
        "FacebookAI/roberta-large-mnli": "roberta-mnli",
        "facebook/bart-large-mnli": "bart-mnli",
        "MoritzLaurer/ModernBERT-base-zeroshot-v2.0": "modernbert-zeroshot",
    },
    "token-classify": {"dslim/bert-base-NER": ""},
    "sparse": {
        "naver/splade-v3": "",
        "naver/splade-cocondenser-ensembledistil": "splade-cocondenser",
        "naver/splade-code-06B": "splade-code",
        "ibm-granite/granite-embedding-30m-sparse": "",
        "opensearch-project/opensearch-neural-sparse-encoding-doc-v3-distill": "opensearch-sparse",
        "opensearch-project/opensearch-neural-sparse-encoding-doc-v3-gte": "",
    },
    "multi-vector": {
        "colbert-ir/colbertv2.0": "colbert",
        "answerdotai/answerai-colbert-small-v1": "answerai-colbert",
        "lightonai/GTE-ModernColBERT-v1": "",
        "mixedbread-ai/mxbai-edge-colbert-v0-17m": "mxbai-edge-colbert",
        "LiquidAI/LFM2-ColBERT-350M": "",
        "jinaai/jina-colbert-v2": "",
    },
}
"""By capability: the id on the hub, and a name beside the last part of that, which is one, too, in lower case."""

_NOTES = {
    "BAAI/bge-m3": "sparse and multi-vector, too",
    "EuroBERT/EuroBERT-210m": "a base model: with --kind dense",
    "google/embeddinggemma-2": "text alone",
    "sentence-transformers/all-MiniLM-L6-v2": "the bundled model is the same",
}


_TASKS = {
    "jinaai/jina-embeddings-v3": "retrieval.query",
    "jinaai/jina-embeddings-v5-text-small": "retrieval",
    "jinaai/jina-embeddings-v5-text-nano": "retrieval",
    "MongoDB/mdbr-leaf-ir-asym": "query",
}
"""A task or a role of those that have any, which stands behind a name. Behind another name it would be the second part
of an id, whose owner may be called as a model is, as EuroBERT is."""


class KnownModel(NamedTuple):
    names: tuple[str, ...]
    """Of one word; the shorter one first."""
    hub_id: str
    kind: str
    notes: str

    @property
    def matryoshka_dims(self) -> tuple[int, ...] | None:
        """As `published_dims` has them."""
        return published_dims(self.hub_id)


def known_models() -> Iterator[KnownModel]:
    for kind, models in _KNOWN.items():
        for hub_id, short in models.items():
            last = hub_id.partition("/")[2].lower()
            names = (short, last) if short else (last,)
            task = f"a task behind it: {names[0]}/{_TASKS[hub_id]}" if hub_id in _TASKS else ""
            yield KnownModel(names, hub_id, kind, _NOTES.get(hub_id, task))


_BY_NAME = {name: model.hub_id for model in known_models() for name in model.names}


def known_id(word: str) -> str:
    """The id on the hub that is known by a word, in any case; empty for none."""
    return _BY_NAME.get(word.lower(), "")


def takes_task(word: str) -> bool:
    """Whether the model that is known by a word has tasks."""
    return known_id(word) in _TASKS


def unknown_word(source: str) -> str:
    """What to say of a word that is not known, with the name that is most like it, where the hub has no such model
    either: the oldest ids have no owner. Empty for other words, and for an id with an owner."""
    if "/" in source or known_id(source):
        return ""
    meant = closest(source.lower(), _BY_NAME)
    return f"no model is known by this name; {f'did you mean {meant}?' if meant else 'vecd check --known lists them'}"
