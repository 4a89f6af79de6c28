"""The README and the pages in docs/: what they link to is there, and so is what they say is a command. They and the
comments of the product keep to the project's rules of prose: short lines in pages, and no retired words."""

import ast
import io
import re
import tokenize
from itertools import pairwise
from pathlib import Path

import pytest

from vecd.cli import _USAGE

ROOT = Path(__file__).parents[3]
PAGES = sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))
MAX_LINE_CHARS = 100
RETIRED = re.compile(
    r"\b(doors?|guests?|crews?|verdicts?|condemn\w*|accus\w*|innocents?|guilty|suspects?|in vain|let in|plain models?"
    r"|so many|as many as|whoever|nobody|somebody|anybody|to be looked at|weightless)\b",
    re.IGNORECASE,
)
"""Words that were replaced by the field's own, and figures of speech."""
FOLDERS = ("gateway", "workers", "shm", "launch", "client", "model", "vecd/base")
SOURCES = [ROOT / "supervisor.py", *sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]
"""Of the product."""
CALLERS = re.compile(r"\bcalled by (`vecd|dialects)", re.IGNORECASE)
"""Who calls a module changes without it; `grep` tells."""
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


def said_in(source: str) -> list[str]:
    """The docstrings, of attributes too, and the comments of a Python file."""
    expressions = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    comments = [
        each.string for each in tokenize.generate_tokens(io.StringIO(source).readline) if each.type == tokenize.COMMENT
    ]
    return [str(each.value) for each in expressions if isinstance(each, ast.Constant)] + comments


def repeated_names(source: str) -> list[str]:
    """Attributes whose docstring has no word that their name has not."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", [])
        for attribute, said in pairwise(body) if isinstance(body, list) else ():
            if (
                isinstance(attribute, ast.AnnAssign)
                and isinstance(said, ast.Expr)
                and isinstance(said.value, ast.Constant)
            ):
                name = ast.unparse(attribute.target).removeprefix("self.")
                words = set(re.findall(r"\w+", str(said.value.value).lower())) - {"a", "an", "the", "of"}
                found += [name] * (words <= set(name.split("_")))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_of_the_product(path: Path):
    source = path.read_text(encoding="utf-8")
    said = "\n\n".join(said_in(source))
    assert retired_words(said) == []
    assert CALLERS.findall(" ".join(said.split())) == []
    assert repeated_names(source) == []


def test_what_is_said_in_a_source_is_found():
    source = (
        '"""Whoever calls."""\n\n\nclass A:\n    num_rows: int\n    """The num rows."""\n    x = "door"  # a guest\n'
    )
    assert retired_words("\n".join(said_in(source))) == ["Whoever", "guest"]
    assert repeated_names(source) == ["num_rows"]


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
    assert retired_words("```\nthe door\n```\n\nThe user `nobody` has [a page](door.md), outdoors.\n") == []


# --- links and commands -----------------------------------------------------------------------------------------

LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors_of(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_links_to_is_there(page: Path):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in LINK.findall(text):
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors_of(target), link


def test_the_readme_names_every_command():
    commands = set(re.findall(r"^(?:usage:)? +vecd ([a-z][a-z-]*)", _USAGE, re.MULTILINE)) - {"reload"}
    named = set(re.findall(r"^\| `vecd ([a-z-]+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert named == commands
