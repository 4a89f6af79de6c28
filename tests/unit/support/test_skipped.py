"""What a run says of its skipped tests."""

import re
from pathlib import Path

import tests
from tests.support.skipped import what_skipped_tests_need

_REASONS = [
    "takes minutes: with VECD_SOAK=1",
    "takes long, and is in make soak only",
    "takes six minutes: set VECD_SOAK",
    "make test-clients, or VECD_CLIENTS=all, installs the environment 'stores'",
    "make test-clients, or VECD_CLIENTS=small, installs the environment 'openai-1'",
    "needs the openssl command, to make certificates",
    "'ollama' was not installed: " + "no such host " * 20,
]


def test_there_is_a_line_for_each_target_and_each_other_reason() -> None:
    lines = list(what_skipped_tests_need(_REASONS))
    assert lines[:3] == [
        "    3 skipped: make soak",
        "    2 skipped: make test-clients",
        "    1 skipped: needs the openssl command, to make certificates",
    ]
    assert lines[3].startswith("    1 skipped: 'ollama' was not installed: no such host")
    assert len(lines) == 4
    assert max(map(len, lines)) == 100


def test_each_named_target_is_in_the_makefile() -> None:
    root = Path(tests.__file__).parents[1]
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    reasons = re.compile(r'(?:reason=|skip\(|Unavailable\()f?"([^"]*)"')
    texts = [text for path in root.glob("tests/**/*.py") for text in reasons.findall(path.read_text())]
    lines = " ".join(what_skipped_tests_need(texts))
    named = set(re.findall(r"skipped: make ([a-z-]+)", lines))
    assert {"soak", "test-binary", "test-browser", "test-clients", "test-systemd"} <= named <= targets
