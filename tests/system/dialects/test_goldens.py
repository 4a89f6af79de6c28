"""Every recorded exchange of every dialect, to the byte, and by the schemas that the server's document has."""

import pytest

from tests.support import goldens
from vecd.gateway.dialects import cohere, ollama, rerank


@pytest.mark.parametrize(
    ("dialect", "server", "volatile"),
    [
        ("openai", "dummy", {"id", "created"}),
        ("openai_strict", "strict", {"id", "created"}),
        ("openai_models", "strict", {"created"}),  # whose `id` is their name
        ("cohere", "dummy", {"id"}),
        ("ollama", "dummy", {"total_duration", "modified_at", "version", "digest"}),
        ("tei", "dummy", set()),
        ("vllm", "dummy", {"id", "created", "version"}),
        ("rerank", "dummy", set()),
        ("reranker", "reranker", {"id", "created", "x-vecd-identity"}),
        ("classify", "moods", {"id", "created"}),
        ("token_classify", "names", {"id", "created"}),
        ("outputs", "m3", {"id", "created"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_exchanges_are_as_recorded(served, dialect, server, volatile):
    goldens.check(dialect, served(server).url, volatile)


@pytest.mark.parametrize("dialect", [cohere.DIALECT, ollama.DIALECT, rerank.DIALECT], ids=lambda each: each.name)
def test_exchanges_are_as_documented(dummy, dialect):
    goldens.check_document(dummy.url, dialect)
