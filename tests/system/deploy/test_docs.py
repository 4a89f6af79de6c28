"""The README and the pages in docs/: what they link to is there, and so is what they say is a command."""

import re
from pathlib import Path

import pytest

from vecd.launch.cli import _USAGE

ROOT = Path(__file__).parents[3]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")])
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
