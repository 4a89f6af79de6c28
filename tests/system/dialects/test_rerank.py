"""Rerank routes on a server whose model makes embeddings: what is refused, to the byte, and in whose shape."""

from tests.support import goldens
from vecd.gateway.api.dialects.rerank import DIALECT


def test_golden(weightless):
    goldens.check("rerank", weightless.url, set())


def test_the_document_says_what_is_answered(weightless):
    goldens.check_document(weightless.url, DIALECT)
