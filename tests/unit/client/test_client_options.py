"""Flags that are declared as fields of a dataclass."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from vecd.base.flags import flag, integer, listed, number, parse, whole


@dataclass(frozen=True, kw_only=True)
class Flags:
    names: list[str] = flag(  # noqa: RUF009 (a flag is a dataclasses.field)
        "names", default=dataclasses.MISSING, names=("names",), nargs="+"
    )
    out: str = flag("output", default=dataclasses.MISSING, names=("-o", "--output"))
    num_rows: int = flag("rows", default=3, read=whole(10), group="rows")
    rates: tuple[float, ...] = flag("rates", default=(), read=listed(number("hertz", 50)), group="rows")
    key: str | None = flag("key", variable="SOME_KEY")
    is_quiet: bool = flag("quiet", default=False)
    rest: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.is_quiet and self.num_rows == 10:
            raise ValueError("--is-quiet and --num-rows 10 exclude each other")


def parsed(*argv: str, **extra: Any) -> Flags:
    return parse(Flags, argv, prog="vecd x", description="Tries flags.", **extra)


def test_fields_are_flags_with_their_defaults() -> None:
    assert parsed("a", "b", "-o", "c") == Flags(names=["a", "b"], out="c")
    flags = parsed("a", "--output", "c", "--num-rows", "7", "--rates", "1, 2.5", "--is-quiet")
    assert (flags.num_rows, flags.rates, flags.is_quiet) == (7, (1.0, 2.5), True)


def test_a_variable_stands_in_for_a_flag_that_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "from outside")
    assert parsed("a", "-o", "c").key == "from outside"
    assert parsed("a", "-o", "c", "--key", "given").key == "given"
    monkeypatch.setenv("SOME_KEY", "")
    assert parsed("a", "-o", "c").key is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["a", "--ouput=c"], "the following arguments are required: -o/--output; --ouput: did you mean --output?"),
        (
            ["a", "-o", "c", "--is-quite", "--zz"],
            "unrecognized arguments: --is-quite --zz; --is-quite: did you mean --is-quiet?",
        ),
        (["a", "-o", "c", "--num-rows", "11"], "argument --num-rows: '11' is not a whole number from 1 to 10"),
        (["a", "-o", "c", "--rates", "1,nan"], "argument --rates: 'nan' is not a number of hertz above 0 and up to 50"),
        (["a", "-o", "c", "--is-quiet", "--num-rows", "10"], "--is-quiet and --num-rows 10 exclude each other"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(*argv)
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"vecd x: error: {message}"


def test_a_command_that_passes_flags_on_takes_no_abbreviations(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed("a", "-o", "c", "--num", "4").num_rows == 4
    assert parsed("a", "-o", "c", rest=("--num",)).rest == ("--num",)
    with pytest.raises(SystemExit):
        parsed("a", "-o", "c", "--num", "4", rest=())
    assert "unrecognized arguments: --num" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("read", "good", "values", "said"),
    [
        (whole(1000), 7, ["0", "-1", "1.0", "²", "9" * 30], "is not a whole number from 1 to 1,000"),
        (number("seconds", 10, least=0), 0, ["-0.1", "nan", "inf", "x"], "is not a number of seconds from 0 to 10"),
        (integer, -5, ["x"], "'x' is not a whole number"),
    ],
)
def test_numbers_have_a_range(read: Callable[[str], float], good: int, values: list[str], said: str) -> None:
    assert read(str(good)) == good
    for value in values:
        with pytest.raises(ValueError, match=said):
            read(value)
