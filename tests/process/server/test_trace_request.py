"""How many files one embedding request enters, and that docs/architecture.md lists them."""

import re
from pathlib import Path

from tools.trace_request import trace

MAX_FILES, MAX_GATEWAY_FILES = 33, 25


def test_the_files_that_a_request_enters_are_few_and_listed():
    files = trace()
    page = (Path(__file__).parents[3] / "docs/architecture.md").read_text()
    section = page.partition("## Read these in this order\n")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(.+?)`", section, re.MULTILINE)) == sorted(files)
    assert len(files) <= MAX_FILES
    assert sum(path.startswith("gateway/") for path in files) <= MAX_GATEWAY_FILES
