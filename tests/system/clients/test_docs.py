"""The code in docs/clients.md does what it says: each block is run as it stands, but for the server's address."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.clients.corpus import DOCUMENTED
from tests.support.clients.environments import PINS, is_node

PAGE = Path(__file__).parents[3] / "docs" / "clients.md"
_ADDRESS = "http://127.0.0.1:8000"
_SCRIPTS = {"yaml": "proxy_client", "sh": "open_webui_client"}
"""What runs blocks that configure a program; all others are programs for `documented`."""


class Block(NamedTuple):
    heading: str
    language: str
    environment: str
    code: str


def _blocks() -> list[Block]:
    """A block for each environment that it runs in."""
    found: list[Block] = []
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE):
        heading = section.partition("\n")[0]
        for language, names, code in re.findall(r"^```(\w+)(?: runs-in=(\S+))?\n(.*?)^```$", section, re.M | re.S):
            assert names, f"'{heading}': a block that says not where it runs"
            found += [Block(heading, language, name, code) for name in names.split(",")]
    return found


BLOCKS = _blocks()


def _each(*, ranks: bool) -> pytest.MarkDecorator:
    blocks = [block for block in BLOCKS if ("\nranked = " in block.code) is ranks]
    return pytest.mark.parametrize("block", blocks, ids=[f"{b.heading} {b.language} {b.environment}" for b in blocks])


@_each(ranks=False)
def test_block(library, block, float32_server, is_right):
    assert _ADDRESS in block.code
    client = library(block.environment, _SCRIPTS.get(block.language, "documented"))
    assert is_right(client.call("run", code=block.code.replace(_ADDRESS, float32_server.url)), DOCUMENTED)


@_each(ranks=True)
def test_block_that_ranks(library, block, reranker):
    assert _ADDRESS in block.code
    code = block.code.replace(_ADDRESS, reranker.url)
    ranked = library(block.environment, "documented").call("rank", code=code)
    texts = ["Berlin", "Paris is the capital of France"]
    expected = reranker.post("/rerank", query="What is the capital of France?", texts=texts)
    assert ranked == [[item["index"], pytest.approx(item["score"], rel=1e-6)] for item in expected]


def test_every_environment_is_in_the_page():
    """What is pinned is documented, and no block runs where its language does not."""
    assert {path.stem for path in PINS.iterdir()} == {block.environment for block in BLOCKS}
    assert {block.environment for block in BLOCKS if block.language == "js"} == {"node", "node-24"}
    assert all(is_node(block.environment) == (block.language == "js") for block in BLOCKS)
