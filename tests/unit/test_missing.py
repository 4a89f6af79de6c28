import sys

import pytest

from vecd.base.programs import not_installed


def test_an_installation_is_told_what_to_install() -> None:
    assert not_installed("vecd[plot]") == "not installed: pip install 'vecd[plot]'"
    assert not_installed("torch", "transformers") == "not installed: pip install torch transformers"


def test_the_binary_is_not_told_to_use_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert not_installed("torch") == "not in this binary: use an installed vecd"
