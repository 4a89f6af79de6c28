"""Settings and flags: declared as the fields of a frozen dataclass, and read by their annotations.

Owns how one is declared (`flag`), what a value must be (`read_value`), how argv is read, and the help. A value is a
text of argv or of a variable, or what a TOML file has. Knows no command: each declares its own fields, and says where
their values are from.
"""

# ruff: noqa: RUF009 (a flag is a dataclasses.field)

import dataclasses
import math
import os
import re
import shutil
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin

from vecd.base.target import Target, parse_target

_T = TypeVar("_T")
_CUTOFF = 0.65
_SHOWN_CHARACTERS = 60


def shown(value: object) -> str:
    """A value in a message; its beginning, if it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message. Empty if none is like `name`."""
    meant = closest(name, known)
    return f"; did you mean {meant}?" if meant else ""


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like `name`; None if none is like it."""
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=_CUTOFF)), None)


def flag_hints(words: Sequence[str], known: Sequence[str]) -> str:
    """The end of a message: what may have been meant by each flag in `words` that is not known. Empty if none is like a
    known one."""
    names = [flag.removeprefix("--") for flag in known if flag.startswith("--")]
    hints = ""
    for word in words:
        flag = word.partition("=")[0]
        name = flag.removeprefix("--").replace("_", "-")
        if flag.startswith("--") and flag not in known and (meant := closest(name, names)):
            hints += f"; {flag}: did you mean --{meant}?"
    return hints


# --- declarations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Secret:
    """A text that is never shown."""

    value: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What is declared of a field, beside its annotation and its default."""

    help: str
    at_least: float = -math.inf
    above: float = -math.inf
    at_most: float = math.inf
    read: Callable[[Any], Any] | None = None
    """Makes the field's value of one that has the annotated type, or of the text where that is a type of its own.
    Raises ValueError, with a reason that goes on from the field's name."""
    pattern: re.Pattern[str] | None = None
    """Of the whole of a text."""
    must: str = ""
    """What a message says in place of what the annotation and the other rules do: "must …"."""
    unit: str = ""
    """Of a number, and its word in the help. A text that has one may be given as a number."""
    word: str = ""
    """For the value in the help; "": the unit's, or the type's."""
    group: str = ""
    """Its heading in the help."""
    names: Sequence[str] = ()
    """In place of the field's name; one without a dash is no flag, but takes the words that are none."""
    variable: str = ""
    """An environment variable that stands in for the flag."""
    is_basic: bool = False
    """What a newcomer needs: where a command has such, its --help shows these alone."""
    is_per_model: bool = False
    """Each of several models may have its own."""


def flag(default: Any, help: str, **rules: Any) -> Any:
    """A field that is read from `--field-name`, and whose value the annotation and the other `Rules` describe. An
    annotation is int, float, bool, str, Path, Secret, Literal, a union of these, or a tuple or Sequence, whose parts
    have commas between them. One of bool has `--no-field-name`, too."""
    return field(default=default, metadata={"rules": Rules(help=help, **rules)})


@cache
def flags_in(kind: Any) -> Mapping[str, tuple[Any, Rules]]:
    """Annotation and rules of each flag, by the field's name."""
    kinds = typing.get_type_hints(kind)
    declared = [each for each in dataclasses.fields(kind) if "rules" in each.metadata]
    return {each.name: (kinds[each.name], each.metadata["rules"]) for each in declared}


def flag_name(field_name: str, rules: Rules | None = None) -> str:
    """As a user writes it; of one without a dash, its word."""
    name = rules.names[-1] if rules and rules.names else "--" + field_name.replace("_", "-")
    return rules.word if rules and not name.startswith("-") else name


# --- values --------------------------------------------------------------------------------------------------------

_TRUTHS = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(("false", "0", "no", "off"), False)
_LISTS = (tuple, Sequence)


def read_value(kind: Any, rules: Rules, value: Any) -> Any:
    """Raises ValueError, with a reason that goes on from the field's name."""
    for each in kinds_in(kind):
        try:
            found = _read_as(each, rules, value)
        except (ValueError, TypeError, OverflowError):
            continue
        return found if rules.read is None else rules.read(found)
    raise ValueError(rules.must or f"must be {', or '.join(_requirement(each, rules) for each in kinds_in(kind))}")


def kinds_in(kind: Any) -> list[Any]:
    """Of a union; names such as `auto` first."""
    kinds: tuple[Any, ...] = get_args(kind) if get_origin(kind) in (UnionType, typing.Union) else (kind,)
    return sorted((each for each in kinds if each is not NoneType), key=lambda each: not _is_literal(each))


def _is_literal(kind: Any) -> bool:
    origin: Any = get_origin(kind)
    return origin is Literal


def _names_in(kind: Any) -> list[str]:
    """Of a Literal. "" stands for a value that is not given, and is none of them."""
    return [name for name in get_args(kind) if name]


def _read_as(kind: Any, rules: Rules, value: Any) -> Any:
    """Raises ValueError, TypeError or OverflowError."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if get_origin(kind) in _LISTS:
        if not isinstance(value, str) and not (value and isinstance(value, list | tuple)):
            raise TypeError
        parts = value.split(",") if isinstance(value, str) else value
        return tuple(_read_as(get_args(kind)[0], rules, part) for part in parts)
    if _is_literal(kind):
        is_right = value in _names_in(kind)
    elif kind is bool:
        value = _TRUTHS.get(value.lower()) if isinstance(value, str) else value
        is_right = isinstance(value, bool)
    elif kind in (int, float):
        number = kind(value)
        is_right = number == value if is_number else isinstance(value, str)
        # No range has NaN.
        is_right = is_right and rules.at_least <= number <= rules.at_most and number > rules.above
        value = number
    else:
        is_right = isinstance(value, str) or (kind is str and is_number and bool(rules.unit))
        is_right = is_right and (rules.pattern is None or bool(rules.pattern.fullmatch(str(value))))
        value = kind(value) if kind in (str, Path, Secret) else value
    if not is_right:
        raise ValueError
    return value


def _requirement(kind: Any, rules: Rules) -> str:
    if get_origin(kind) in _LISTS:
        return f"{_requirement(get_args(kind)[0], rules)}, or several with commas between them"
    if _is_literal(kind):
        *others, last = map(repr, _names_in(kind))
        return f"{', '.join(others)} or {last}" if others else last
    if kind not in (int, float):
        return "true or false" if kind is bool else "a text"
    what = "a whole number" if kind is int else f"a number of {rules.unit}" if rules.unit else "a number"
    has_most = rules.at_most < math.inf
    least, above, most = (f"{each:.15g}" for each in (rules.at_least, rules.above, rules.at_most))
    if rules.above > -math.inf:
        return f"{what} above {above}" + (f" and at most {most}" if has_most else "")
    if rules.at_least > -math.inf:
        return f"{what} from {least} to {most}" if has_most else f"{what} of at least {least}"
    return what


# --- sources -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Command:
    """What the help says beside the flags."""

    prog: str
    description: str
    usage: str | None = None
    hint: str = ""
    """The end of the message about flags that there are not."""


class FieldValues:
    """What the sources say of fields: of two that name the same field, the first counts."""

    def __init__(self, flags: Mapping[str, tuple[Any, Rules]], *, shows_values: bool = True) -> None:
        """`flags`: as `flags_in` has them."""
        self.problems: list[str] = []
        self.given: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        """By field, where its value is given, as the user wrote it."""
        self.flags = flags
        self._shows_values = shows_values

    def add(self, values: Mapping[str, Any], origin: Callable[[str], str]) -> None:
        """`origin` writes a field's name as the source does."""
        self.given = {**values, **self.given}
        self.origins = {name: origin(name) for name in values} | self.origins

    def add_table(self, table: Mapping[str, Any], place: str, why_not: Callable[[str], str]) -> None:
        """Those of a TOML table, in whose names "-" stands for "_". `why_not`: the reason why a key is of no field.
        Side effect: a problem for each such key."""
        known = {}
        for key, value in table.items():
            if (name := key.replace("-", "_")) in self.flags:
                known[name] = value
            else:
                self.problems.append(f"{place}: {why_not(key)}")
        self.add(known, lambda name: f"{place}: {name}")

    def add_argv(self, argv: Sequence[str], command: Command) -> list[str]:
        """Returns the words that are of no field. Side effect: for --help, prints it and exits with 0."""
        takers: dict[str, tuple[str, bool | None]] = {}
        """By flag, its field, and the value of one that takes none."""
        for name, (kind, rules) in self.flags.items():
            is_switch = bool in kinds_in(kind)
            takers |= dict.fromkeys(rules.names or [flag_name(name)], (name, is_switch or None))
            if is_switch:
                takers[f"--no-{flag_name(name)[2:]}"] = name, False
        values: dict[str, Any] = {}
        rest, words = list[str](), list(reversed(argv))
        while words:
            word = words.pop()
            written, equals, value = word.partition("=")
            if word in ("-h", "--help", "--help-all"):
                print(_help_of(self.flags, command, shows_all=word == "--help-all"), end="")
                sys.exit(0)
            if not _is_flag(word) or written not in takers:
                rest.append(word)
                continue
            name, constant = takers[written]
            if constant is not None:
                values[name] = constant
                self.problems += [f"{written}: takes no value (given: {value!r})"] if equals else []
            elif equals or (words and not _is_flag(words[-1])):
                values[name] = value if equals else words.pop()
            else:
                self.problems.append(f"{written}: expected one argument")
        for name, (_, rules) in self.flags.items():
            if rules.names and not _is_flag(rules.names[0]) and (given := [one for one in rest if not _is_flag(one)]):
                values[name], rest = given, [one for one in rest if _is_flag(one)]
        self.add(values, lambda name: flag_name(name, self.flags[name][1]))
        return rest

    def read(self, endings: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The values as the fields have them. `endings`: of messages, by the flag and its value. Side effect: adds
        the problems."""
        found = {}
        for name, value in self.given.items():
            kind, rules = self.flags[name]
            try:
                found[name] = read_value(kind, rules, value)
            except ValueError as error:
                is_shown = self._shows_values and Secret not in kinds_in(kind) and "@" not in str(value)
                ending = (endings or {}).get(f"{flag_name(name)} {value}")
                self.problems.append(
                    f"{self.origins[name]}: {error}{f' (given: {shown(value)})' if is_shown else ''}"
                    + (f"; {ending}" if ending else "")
                )
        return found


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit() and word != "-"


def parse(kind: type[_T], argv: Sequence[str], command: Command, **extra: Any) -> _T:
    """A `kind` of the flags in `argv`, and of the fields `extra`, which are no flags. Side effects: prints what is
    wrong, a line for each problem, and exits with 2, also when `kind` raises ValueError; exits with 0 for --help."""
    values = FieldValues(flags_in(typing.cast("Any", kind)))
    if unknown := values.add_argv(argv, command):
        known = [flag_name(name, rules) for name, (_, rules) in values.flags.items()]
        hints = f"{flag_hints(unknown, known)}{command.hint}"
        values.problems.append(f"unrecognized arguments: {' '.join(unknown)}{hints}")
    values.add(
        {name: value for name, (_, rules) in values.flags.items() if (value := os.environ.get(rules.variable))},
        lambda name: values.flags[name][1].variable,
    )
    found = values.read()
    if not values.problems:
        try:
            return kind(**found, **extra)
        except ValueError as error:
            values.problems.append(str(error))
    for problem in values.problems:
        print(f"{command.prog}: error: {problem}", file=sys.stderr)
    sys.exit(2)


# --- the help ------------------------------------------------------------------------------------------------------

_WORDS = {Path: "PATH", str: "TEXT", int: "NUMBER", float: "NUMBER"}


def _help_of(flags: Mapping[str, tuple[Any, Rules]], command: Command, *, shows_all: bool) -> str:
    import argparse

    basic = {name: each for name, each in flags.items() if each[1].is_basic}
    groups = dict.fromkeys(rules.group for _, rules in flags.values() if rules.group)
    is_short = bool(basic) and not shows_all
    parser = argparse.ArgumentParser(
        prog=command.prog,
        usage=command.usage,
        description=command.description,
        epilog=f"--help-all shows all {len(flags)} flags, of: {', '.join(groups)}." if is_short else None,
        add_help=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, width=min(shutil.get_terminal_size().columns, 110)),
    )
    parsers: dict[str, Any] = {"": parser}
    for name, (annotated, rules) in (basic if is_short else flags).items():
        group = "" if is_short else rules.group
        if group not in parsers:
            parsers[group] = parser.add_argument_group(group)
        takes_words = bool(rules.names) and not rules.names[0].startswith("-")
        parsers[group].add_argument(
            *([name] if takes_words else rules.names or [flag_name(name)]),
            help=rules.help.replace("%", "%%"),
            **({"action": "store_true"} if bool in kinds_in(annotated) else {"metavar": _word(annotated, rules)}),
            **({"nargs": "*"} if takes_words else {}),
        )
    return parser.format_help()


def _word(kind: Any, rules: Rules) -> str:
    first, *others = kinds_in(kind)
    if rules.word or get_origin(first) in _LISTS:
        return rules.word or f"{_word(get_args(first)[0], rules)},…"
    if _is_literal(first):
        words = (_names_in(each) if _is_literal(each) else [_WORDS[each]] for each in (first, *others))
        return "{" + ",".join(chain.from_iterable(words)) + "}"
    return rules.unit.upper() or _WORDS.get(first, "TEXT")


# --- flags that several commands have ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    ca: Path | None = flag(
        None, "with https://, trust the certificates in this PEM file instead of the system's", word="FILE"
    )
    insecure: bool = flag(False, "with https://, trust any certificate")

    def read_target(self, url: str) -> Target:
        return parse_target(url, self.ca, insecure=self.insecure)
