"""huggingface_hub's client of text-embeddings-inference: it posts to exactly the URL that it is given."""

from typing import Any

from huggingface_hub import AsyncInferenceClient, InferenceClient
from serve import rows, serve


def feature_extraction(url: str, text: Any, options: dict[str, Any], key: str | None = None) -> list[list[float]]:
    return rows(InferenceClient(url, token=key).feature_extraction(text, **options))


async def feature_extraction_later(url: str, text: Any, options: dict[str, Any]) -> list[list[float]]:
    return rows(await AsyncInferenceClient(url).feature_extraction(text, **options))


def sentence_similarity(url: str, sentence: str, others: list[str]) -> list[float]:
    return list(InferenceClient(url).sentence_similarity(sentence, others))


def text_classification(url: str, text: str, options: dict[str, Any]) -> list[tuple[str, float]]:
    return [(item.label, item.score) for item in InferenceClient(url).text_classification(text, **options)]


def token_classification(url: str, text: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(item) for item in InferenceClient(url).token_classification(text, **options)]


def zero_shot_classification(
    url: str, text: str, labels: list[str], options: dict[str, Any]
) -> list[tuple[str, float]]:
    found = InferenceClient(url).zero_shot_classification(text, labels, **options)
    return [(item.label, item.score) for item in found]


serve(
    feature_extraction,
    feature_extraction_later,
    sentence_similarity,
    text_classification,
    token_classification,
    zero_shot_classification,
)
