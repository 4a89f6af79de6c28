"""Ollama's dialect: every exchange to the byte, and what one server cannot show: prompts, strict names, aliases."""

import httpx

from tests.support import goldens
from vecd.gateway.api.dialects.ollama import DIALECT


def test_golden(weightless):
    goldens.check("ollama", weightless.url, {"total_duration", "modified_at", "version", "digest"})


def test_a_large_list_of_token_ids_is_refused_as_one(weightless):
    """Large bodies' ids come as arrays."""
    answer = httpx.post(f"{weightless.url}/api/embed", json={"input": list(range(30_000))}, timeout=30)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("invalid input type: 'input")


def test_answers_are_as_documented(weightless):
    goldens.check_document(weightless.url, DIALECT)
