"""Rerankers of LangChain, LlamaIndex and Haystack, and the clients of Voyage and infinity.

Each function of `_RERANKERS` returns pairs of a text's place and its score, in the order of the library.
"""

import os
from collections.abc import Callable
from typing import Any

from serve import serve

MODEL = "m"
_PLACE = "place"
Ranked = list[tuple[int, float]]


# --- clients ----------------------------------------------------------------------------------------------------


def voyage(url: str, query: str, texts: list[str], num: int | None, **options: Any) -> Ranked:
    import voyageai

    client = voyageai.Client(api_key="unused", base_url=f"{url}/v1")
    answer = client.rerank(query, texts, model=MODEL, top_k=num, **options)
    assert answer.total_tokens > 0
    assert [result.document for result in answer.results] == [texts[result.index] for result in answer.results]
    return [(result.index, result.relevance_score) for result in answer.results]


def infinity(url: str, query: str, texts: list[str], num: int | None) -> Ranked:
    from infinity_client import Client
    from infinity_client.api.default import rerank
    from infinity_client.models import RerankInput

    body = RerankInput(query=query, documents=texts, model=MODEL, top_n=num)
    answer: Any = rerank.sync(client=Client(base_url=url), body=body)
    return [(result.index, result.relevance_score) for result in answer.results]


def infinity_embed(url: str, texts: list[str]) -> list[list[float]]:
    from infinity_client import Client
    from infinity_client.api.default import embeddings
    from infinity_client.models import OpenAIEmbeddingInputText

    body = OpenAIEmbeddingInputText(input_=texts, model=MODEL)
    answer: Any = embeddings.sync(client=Client(base_url=url), body=body)
    return [item.embedding for item in answer.data]


def infinity_classify(url: str, texts: list[str]) -> list[list[tuple[str, float]]]:
    from infinity_client import Client
    from infinity_client.api.default import classify
    from infinity_client.models import ClassifyInput

    answer: Any = classify.sync(client=Client(base_url=url), body=ClassifyInput(input_=texts, model=MODEL))
    return [[(label.label, label.score) for label in labels] for labels in answer.data]


# --- LangChain --------------------------------------------------------------------------------------------------


def _langchain(compressor: Any, query: str, texts: list[str]) -> Ranked:
    from langchain_core.documents import Document

    documents = [Document(text, metadata={_PLACE: place}) for place, text in enumerate(texts)]
    found = compressor.compress_documents(documents, query)
    return [(document.metadata[_PLACE], document.metadata["relevance_score"]) for document in found]


def langchain_cohere(url: str, query: str, texts: list[str], num: int | None) -> Ranked:
    from langchain_cohere import CohereRerank

    reranker = CohereRerank(model=MODEL, base_url=url, cohere_api_key="unused", top_n=num)
    return _langchain(reranker, query, texts)


def langchain_jina(url: str, query: str, texts: list[str], num: int | None) -> Ranked:
    """Its URL is a constant of its module."""
    from langchain_community.document_compressors import jina_rerank

    jina_rerank.JINA_API_URL = f"{url}/v1/rerank"
    return _langchain(jina_rerank.JinaRerank(jina_api_key="unused", top_n=num), query, texts)


def langchain_infinity(url: str, query: str, texts: list[str], num: int | None) -> Ranked:
    from infinity_client import Client
    from langchain_community.document_compressors import InfinityRerank

    return _langchain(InfinityRerank(client=Client(base_url=url), model=MODEL, top_n=num), query, texts)


# --- LlamaIndex -------------------------------------------------------------------------------------------------


def _llama_index(postprocessor: Any, query: str, texts: list[str]) -> Ranked:
    from llama_index.core.schema import NodeWithScore, TextNode

    nodes = [NodeWithScore(node=TextNode(text=text, id_=str(place))) for place, text in enumerate(texts)]
    found = postprocessor.postprocess_nodes(nodes, query_str=query)
    return [(int(node.node.node_id), node.score) for node in found]


def llama_index_tei(url: str, query: str, texts: list[str], num: int | None) -> Ranked:
    from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

    return _llama_index(TextEmbeddingInference(base_url=url, top_n=num or len(texts)), query, texts)


def llama_index_xinference(url: str, query: str, texts: list[str], num: int | None) -> Ranked:
    from llama_index.postprocessor.xinference_rerank import XinferenceRerank

    return _llama_index(XinferenceRerank(model=MODEL, base_url=url, top_n=num or len(texts)), query, texts)


# --- Haystack ---------------------------------------------------------------------------------------------------


def _haystack(ranker: Any, query: str, texts: list[str]) -> Ranked:
    from haystack import Document

    documents = [Document(id=str(place), content=text) for place, text in enumerate(texts)]
    found = ranker.run(query=query, documents=documents)["documents"]
    return [(int(document.id), document.score) for document in found]


def haystack_tei(url: str, query: str, texts: list[str], num: int | None) -> Ranked:
    from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker

    return _haystack(HuggingFaceTEIRanker(url=url, top_k=num or len(texts), max_retries=0), query, texts)


def haystack_jina(url: str, query: str, texts: list[str], num: int | None) -> Ranked:
    from haystack.utils import Secret
    from haystack_integrations.components.rankers.jina import JinaRanker

    ranker = JinaRanker(MODEL, Secret.from_token("unused"), top_k=num, base_url=f"{url}/v1/rerank")
    return _haystack(ranker, query, texts)


def haystack_vllm(url: str, query: str, texts: list[str], num: int | None, **options: Any) -> Ranked:
    from haystack_integrations.components.rankers.vllm import VLLMRanker

    ranker = VLLMRanker(model=MODEL, api_base_url=f"{url}/v1", top_k=num, extra_parameters=options)
    return _haystack(ranker, query, texts)


_RERANKERS: list[Callable[..., Ranked]] = [
    voyage,
    infinity,
    langchain_cohere,
    langchain_jina,
    langchain_infinity,
    llama_index_tei,
    llama_index_xinference,
    haystack_tei,
    haystack_jina,
    haystack_vllm,
]
os.environ["VOYAGE_API_KEY"] = "unused"
serve(*_RERANKERS, infinity_embed, infinity_classify)
