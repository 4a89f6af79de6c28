"""mteb's model of an OpenAI-compatible server against the real server and the real model."""

import numpy as np
import pytest

from tests.support.clients.driving import ClientError, running_client


@pytest.fixture(scope="module")
def mteb():
    with running_client("mteb", "mteb_client") as client:
        yield client


def test_a_task(mteb, float32_server, is_right, expected):
    answer = mteb.call("evaluate", url=float32_server.url)
    assert is_right(answer["vectors"], answer["texts"])
    assert answer["max_length"] == 256  # read from /v1/models, and sent as truncate_prompt_tokens
    first, second = np.split(expected(answer["texts"]), 2)
    similarity = np.corrcoef((first * second).sum(axis=1), answer["human_scores"])[0, 1]
    assert answer["scores"]["cosine_pearson"] == pytest.approx(similarity, abs=1e-5)


def test_a_server_with_keys_is_given_up(mteb, strict_server):
    """mteb lists the models without its key."""
    with pytest.raises(ClientError, match="401") as caught:
        mteb.call("evaluate", url=strict_server.url)
    assert "ConnectionError" in caught.value.classes
