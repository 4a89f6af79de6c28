"""Flags that are declared as fields of a dataclass."""

# ruff: noqa: RUF009 (a flag is a dataclasses.field)

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import pytest

from vecd.base.flags import Command, Rules, Secret, flag, parse, read_value


@dataclass(frozen=True, kw_only=True)
class Flags:
    names: Sequence[str] = flag((), "what is read", names=("names",), word="NAME")
    out: Path | None = flag(None, "where 100% goes", names=("-o", "--output"), word="OUT")
    num_rows: int = flag(3, "of the result", at_least=1, at_most=10, group="rows")
    rates: tuple[float, ...] = flag((), "tried one by one", above=0, at_most=50, unit="hertz", group="rows")
    key: str | None = flag(None, "of the server", variable="SOME_KEY", is_basic=True)
    is_quiet: bool = flag(False, "no progress")
    has_color: bool | None = flag(None, "or --no-has-color")
    rest: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.is_quiet and self.num_rows == 10:
            raise ValueError("--is-quiet and --num-rows 10 exclude each other")


def parsed(*argv: str, **extra: Any) -> Flags:
    return parse(Flags, argv, Command("vecd x", "Tries flags."), **extra)


def test_fields_are_flags_with_their_defaults() -> None:
    flags = parsed("a", "--output", "c", "--num-rows=7", "b", "--rates", "1, 2.5", "--is-quiet", "--no-has-color", "-")
    assert flags == Flags(
        names=("a", "b", "-"), out=Path("c"), num_rows=7, rates=(1.0, 2.5), is_quiet=True, has_color=False
    )


def test_a_variable_stands_in_for_a_flag_that_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "from outside")
    assert parsed().key == "from outside"
    assert parsed("--key", "given").key == "given"
    monkeypatch.setenv("SOME_KEY", "")
    assert parsed().key is None


@pytest.mark.parametrize(
    ("argv", "problems"),
    [
        (["--is-quite", "--zz"], ["unrecognized arguments: --is-quite --zz; --is-quite: did you mean --is-quiet?"]),
        (
            ["--key", "--num-rows", "11", "--rates", "1,nan", "--is-quiet=1", "--output"],
            [
                "--key: expected one argument",
                "--is-quiet: takes no value (given: '1')",
                "--output: expected one argument",
                "--num-rows: must be a whole number from 1 to 10 (given: '11')",
                "--rates: must be a number of hertz above 0 and at most 50, or several with commas between them "
                "(given: '1,nan')",
            ],
        ),
        (["--num-rows", "x", "--ouput", "y"], [
            "unrecognized arguments: --ouput; --ouput: did you mean --output?",
            "--num-rows: must be a whole number from 1 to 10 (given: 'x')",
        ]),
        (["--is-quiet", "--num-rows", "10"], ["--is-quiet and --num-rows 10 exclude each other"]),
    ],
)  # fmt: skip
def test_each_problem_is_a_line_and_the_exit_code_2(
    argv: list[str], problems: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(*argv)
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == [f"vecd x: error: {problem}" for problem in problems]


def test_help_begins_with_what_a_newcomer_needs(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for flag_of_help in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as ended:
            parsed(flag_of_help)
        assert not ended.value.code
        shown.append(capsys.readouterr().out)
    assert "--key TEXT" in shown[0]
    assert "--num-rows" not in shown[0]
    assert "--help-all shows all 7 flags, of: rows." in shown[0]
    for words in ("NAME", "-o OUT, --output OUT", "where 100% goes", "--num-rows NUMBER", "--rates HERTZ,…", "rows:"):
        assert words in shown[1]


@pytest.mark.parametrize("flag_of_help", ["--help", "--help-all"])
@pytest.mark.parametrize(
    "module",
    ["client.embed.command", "client.bench.command", "client.top.command", "launch.check.command",
     "launch.systemd.install_service", "supervisor"],
)  # fmt: skip
def test_each_command_has_a_help(module: str, flag_of_help: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = import_module(f"vecd.{module}")
    with pytest.raises(SystemExit) as ended:
        (command.serve if module == "supervisor" else command.main)([flag_of_help])
    assert not ended.value.code
    assert "vecd" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "rules", "good", "bad", "must_be"),
    [
        (int, {"at_least": 1, "at_most": 1000}, [(" 7 ", 7), (7, 7), (7.0, 7)],
         ["0", "-1", "1.0", "²", "9" * 30, "1" * 5000, 7.5, True, None, "", float("inf")],
         "a whole number from 1 to 1000"),
        (int, {"at_least": 3}, [("3", 3)], ["2"], "a whole number of at least 3"),
        (int, {}, [("-5", -5)], ["x"], "a whole number"),
        (float, {"at_least": 0, "at_most": 10, "unit": "seconds"}, [("0", 0.0), (2, 2.0)],
         ["-0.1", "nan", "inf", "x", True, []], "a number of seconds from 0 to 10"),
        (float, {"above": 0}, [("1e-3", 0.001)], ["0"], "a number above 0"),
        (bool, {}, [("yes", True), ("False", False), (True, True)], ["2", 1, "y es"], "true or false"),
        (str, {}, [("x", "x")], [5, True, [], None], "a text"),
        (str, {"unit": "bytes"}, [("1 GB", "1 GB"), (5, "5")], [True], "a text"),
        (Secret, {}, [("x", Secret("x"))], [1], "a text"),
        (Literal["auto", "cpu", "gpu"], {}, [("cpu", "cpu")], ["CPU", ""], "'auto', 'cpu' or 'gpu'"),
        (int | Literal["auto"], {"at_least": 1, "at_most": 9}, [("auto", "auto"), ("2", 2)], ["0", "all"],
         "'auto', or a whole number from 1 to 9"),
        (tuple[int, ...] | None, {"at_least": 1}, [("1, 2", (1, 2)), ([3], (3,))], ["1,", 5],
         "a whole number of at least 1, or several with commas between them"),
    ],
)  # fmt: skip
def test_a_value_is_what_its_annotation_says(
    kind: Any, rules: dict[str, Any], good: list[tuple[Any, Any]], bad: list[Any], must_be: str
) -> None:
    for value, expected in good:
        found = read_value(kind, Rules(help="", **rules), value)
        assert (found, type(found)) == (expected, type(expected))
    for value in bad:
        with pytest.raises(ValueError, match="must be") as caught:
            read_value(kind, Rules(help="", **rules), value)
        assert str(caught.value) == f"must be {must_be}"
