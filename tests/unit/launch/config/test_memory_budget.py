"""What --memory-budget may be."""

from pathlib import Path

import pytest

from vecd.launch.base.exit_codes import ConfigurationError
from vecd.launch.config.memory_budget import read_memory_budget
from vecd.launch.config.settings import load_settings


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("1B", 1),
        ("500MB", 500_000_000),
        ("500 mb", 500_000_000),
        ("2GiB", 2 << 30),
        ("2Gi", 2 << 30),
        ("1.5kib", 1536),
        ("1TB", 10**12),
        ("80%", 800),
        ("100%", 1000),
        ("0.01 %", 1),
    ],
)
def test_it_is_bytes_or_a_share_of_the_memory(text: str, nbytes: int) -> None:
    assert read_memory_budget(text, 1000) == nbytes


BAD = ["0", "0%", "0.1", "-1", "-5%", "101%", "x", "%", "GiB", "2G", "1e9", "nan", "²", "1,5GiB", "1" * 19, "1 %%"]


@pytest.mark.parametrize("text", BAD)
def test_all_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be above 0: bytes, as 2GiB or 500MB, or a share"):
        read_memory_budget(text, 1000)


@pytest.mark.parametrize("text", ["0", "-1", "101%", "x"])
def test_the_setting_is_named(text: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load_settings([f"--memory-budget={text}"])
    [problem] = refused.value.problems
    assert problem.startswith("--memory-budget: must be above 0: bytes, as 2GiB")
    assert problem.endswith(f"(given: {text!r})")


@pytest.mark.parametrize(("line", "budget"), [("2000000000", "2000000000"), ('"80%"', "80%")])
def test_a_file_may_have_a_number(line: str, budget: str, tmp_path: Path) -> None:
    path = tmp_path / "vecd.toml"
    path.write_text(f"memory-budget = {line}\n")
    assert load_settings(["--config", str(path)]).memory_budget == budget


def test_a_file_may_not_have_a_truth_value(tmp_path: Path) -> None:
    path = tmp_path / "vecd.toml"
    path.write_text("memory-budget = true\n")
    with pytest.raises(ConfigurationError, match="memory_budget: must be a valid string"):
        load_settings(["--config", str(path)])
