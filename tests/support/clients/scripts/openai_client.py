"""openai-python, from 1.x on."""

import asyncio
from typing import Any

import openai
from serve import serve


def create(
    url: str, body: dict[str, Any], key: str = "unused", max_retries: int = 0, headers: dict[str, str] | None = None
) -> dict[str, Any]:
    with openai.OpenAI(base_url=url, api_key=key, max_retries=max_retries, default_headers=headers) as client:
        answer = client.embeddings.create(**body)
    return {
        "vectors": [item.embedding for item in answer.data],
        "indices": [item.index for item in answer.data],
        "kinds": [answer.object, *{item.object for item in answer.data}],
        "model": answer.model,
        "usage": answer.usage.model_dump(),
        "request_id": getattr(answer, "_request_id", None),
    }


def create_other(url: str, texts: list[str], key: str, fields: dict[str, Any], **options: Any) -> list[Any]:
    """The `key` of each item of a response, which the library knows nothing of. `fields`: of the body, the same."""
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        answer = client.embeddings.create(model="m", input=texts, extra_body=fields, **options)
    return [getattr(item, key) for item in answer.data]


async def create_concurrently(url: str, texts: list[str], idle_s: float) -> list[list[list[float]]]:
    """Each text in a request of its own, all at once, twice, with the connections idle in between."""
    async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0, timeout=100) as client:
        first = await _create_each(client, texts)
        await asyncio.sleep(idle_s)
        return [first, await _create_each(client, texts)]


async def _create_each(client: openai.AsyncOpenAI, texts: list[str]) -> list[list[float]]:
    answers = await asyncio.gather(*(client.embeddings.create(model="m", input=text) for text in texts))
    return [answer.data[0].embedding for answer in answers]


def models(url: str, name: str, key: str = "unused") -> dict[str, Any]:
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        return {"ids": [model.id for model in client.models.list()], "retrieved": client.models.retrieve(name).id}


def version() -> str:
    return openai.__version__


serve(create, create_other, create_concurrently, models, version)
