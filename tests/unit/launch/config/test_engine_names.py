"""The dummy engine's name, and the one it had before."""

import pytest

from vecd.launch.base.exit_codes import ConfigurationError
from vecd.launch.config.settings import flag_table, load_settings


@pytest.mark.parametrize("name", ["dummy", "weightless"])
def test_both_names_are_accepted_and_one_is_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(["--engine", name]).engine == "dummy"
    monkeypatch.setenv("VECD_ENGINE", name)
    assert load_settings([]).engine == "dummy"


def test_one_name_is_documented() -> None:
    assert "weightless" not in flag_table()
    with pytest.raises(ConfigurationError, match="'padded' or 'dummy'"):
        load_settings(["--engine", "nonsense"])
