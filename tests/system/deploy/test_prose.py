"""The README and the pages in docs/ keep to the project's rules of prose: short lines, and no retired words."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))
MAX_LINE_CHARS = 100
RETIRED = re.compile(
    r"\b(doors?|guests?|crews?|verdicts?|condemn\w*|accus\w*|innocents?|guilty|suspects?|in vain|let in|plain models?"
    r"|so many|as many as|whoever|nobody|somebody|anybody|to be looked at|weightless(?!:))\b",
    re.IGNORECASE,
)
"""Words that were replaced by the field's own, and figures of speech. `--engine weightless` stays, as code and in the
generated table of flags, where a colon follows it."""
_CODE_BLOCK = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_UNBREAKABLE = re.compile(r"`[^`\n]*`|!?\[[^]\n]*\]\([^)\n]*\)")
_LIST_MARK = re.compile(r"^ *([-*]|\d+\.) ")


def long_lines(text: str) -> list[str]:
    """Lines that are too long and could be wrapped: outside tables and code blocks, of more than one code span, link
    or word."""
    return [
        line
        for line in _CODE_BLOCK.sub("", text).splitlines()
        if len(line) > MAX_LINE_CHARS
        and not line.startswith("|")
        and len(_UNBREAKABLE.sub("x", _LIST_MARK.sub("", line)).split()) > 1
    ]


def retired_words(text: str) -> list[str]:
    """Occurrences outside code and outside the targets of links; across the ends of lines, too."""
    prose = re.sub(r"`[^`]*`", "", _CODE_BLOCK.sub("", text))
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    return [match.group() for match in RETIRED.finditer(" ".join(prose.split()))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose(page: Path):
    text = page.read_text(encoding="utf-8")
    assert long_lines(text) == []
    assert retired_words(text) == []


def test_a_long_line_is_found_only_where_it_could_be_wrapped():
    words, word = "word " * 21, "x" * 101
    text = (
        f"{words}\n\n| {words} |\n\n```\n{words}\n```\n\n- `{words}`\n\n[{words}]({word})\n\n{word}\n\n- a `{word}`\n"
    )
    assert long_lines(text) == [words, f"- a `{word}`"]


def test_a_retired_word_is_found_only_in_prose():
    assert retired_words("Whoever waits at the door is\nlet\nin.\n") == ["Whoever", "door", "let in"]
    assert retired_words("| a | served in vain |\n") == ["in vain"]
    assert (
        retired_words("```\nthe door\n```\n\nThe user `nobody` has [a page](door.md), outdoors. weightless: none\n")
        == []
    )
