"""Command-line flags, declared as the fields of a dataclass, and what may have been meant by one that there is not.

Owns how a flag is declared (`flag`), read from argv (`parse`) and checked (`whole`, `number`, `listed`). Knows no
command: each declares its own flags.
"""

# ruff: noqa: RUF009 (a flag is a dataclasses.field)

import argparse
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from vecd.base.target import Target, parse_target

# What may have been meant by a flag, a setting or a command that there is not.

_CUTOFF = 0.65


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


def flags_of(parser: argparse.ArgumentParser) -> list[str]:
    return list(parser._option_string_actions)


# These commands do not use pydantic-settings, which `vecd serve` uses. Importing it takes 0.17 s of processor time (two
# cores, medians of three), while `vecd top --help` takes 0.10 s in all. It would also read every flag from the
# environment: a VECD_MODEL or VECD_PRIORITY that is meant for the server would change what a client sends.

_T = TypeVar("_T")


def flag(
    help: str,
    *,
    default: Any = None,
    read: Callable[[str], Any] = str,
    group: str = "",
    names: Sequence[str] = (),
    variable: str = "",
    **argparse_options: Any,
) -> Any:
    """A field that is read from `--field-name`. `default` False makes it a switch, `dataclasses.MISSING` a required
    flag. `read` raises ValueError with what is wrong with the value. `group` is a heading of --help, `names` replaces
    the flag's name, and `variable` is an environment variable that stands in for the flag."""
    kind = {"action": "store_true"} if default is False else {"type": _checked(read)}
    options = {"help": help, **kind, **argparse_options}
    metadata = {"group": group, "names": names, "variable": variable, "argparse": options}
    return dataclasses.field(default=default, metadata=metadata)


class _Parser(argparse.ArgumentParser):
    given: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        is_missing = message.startswith("the following arguments are required")
        unknown = message.partition("unrecognized arguments: ")[2].split()
        super().error(message + flag_hints(self.given if is_missing else unknown, flags_of(self)))


def parse(
    kind: type[_T], argv: Sequence[str] | None, *, prog: str, description: str, usage: str | None = None, **extra: Any
) -> _T:
    """A `kind` of the flags in `argv`, and of the fields `extra`, which are no flags. Side effects: prints what is
    wrong in one line and exits with 2, also when `kind` raises ValueError; prints the help and exits with 0 for
    --help."""
    # A command that passes flags on must not take an abbreviation of one of those for its own.
    parser = _Parser(
        prog=prog, description=description, usage=usage, allow_abbrev=not extra, argument_default=argparse.SUPPRESS
    )
    groups: dict[str, Any] = {"": parser}
    fields = [field for field in dataclasses.fields(kind) if field.metadata]  # type: ignore[arg-type]
    for field in fields:
        metadata = field.metadata
        if (group := metadata["group"]) not in groups:
            groups[group] = parser.add_argument_group(group)
        names, options = metadata["names"] or [flag_name(field.name)], metadata["argparse"]
        if names[0].startswith("-"):
            options = {**options, "dest": field.name, "required": field.default is dataclasses.MISSING}
        groups[group].add_argument(*names, **options)
    parser.given = sys.argv[1:] if argv is None else argv
    values = vars(parser.parse_args(parser.given))
    for field in fields:
        if variable := field.metadata["variable"]:
            values[field.name] = values.get(field.name) or os.environ.get(variable) or None
    try:
        return kind(**values, **extra)
    except ValueError as error:
        parser.error(str(error))


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def _checked(read: Callable[[str], Any]) -> Callable[[str], Any]:
    def read_or_tell(value: str) -> Any:
        try:
            return read(value)
        except ValueError as error:  # argparse shows the message of its own exception only
            raise argparse.ArgumentTypeError(str(error)) from error

    return read_or_tell


# --- values -------------------------------------------------------------------------------------------------


def whole(largest: int = 10**9) -> Callable[[str], int]:

    def read(value: str) -> int:
        if not value.isascii() or not value.isdecimal() or not 1 <= int(value[:20]) <= largest:
            raise ValueError(f"{value!r} is not a whole number from 1 to {largest:,}")
        return int(value)

    return read


def integer(value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a whole number") from None


def number(unit: str, largest: float, *, least: float | None = None) -> Callable[[str], float]:
    """Reads a number of `unit` from `least` to `largest`; without `least`, one above 0."""
    span = f"above 0 and up to {largest:,.0f}" if least is None else f"from {least:g} to {largest:,.0f}"

    def read(value: str) -> float:
        try:
            found = float(value)
        except ValueError:
            found = math.nan  # no range has it
        if not (found > 0 if least is None else found >= least) or found > largest:
            raise ValueError(f"{value!r} is not a number of {unit} {span}")
        return found

    return read


def listed(read_one: Callable[[str], _T]) -> Callable[[str], tuple[_T, ...]]:
    """Reads values with commas between them."""
    return lambda value: tuple(read_one(part.strip()) for part in value.split(","))


# --- flags that several commands have ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    ca: Path | None = flag(
        "with https://, trust the certificates in this PEM file instead of the system's", read=Path, metavar="FILE"
    )
    insecure: bool = flag("with https://, trust any certificate", default=False)

    def read_target(self, url: str) -> Target:
        return parse_target(url, self.ca, insecure=self.insecure)

    def check_server(
        self, url: str | None, model: str | None, serve_flags: Sequence[str], served_here: Sequence[str]
    ) -> None:
        """Of a command that asks the server at `url`, or starts one of `model` with `serve_flags` and the flags
        `served_here` of its own. Raises ValueError for flags that do not go together."""
        if url is not None:
            self.read_target(url)
            if model is not None or serve_flags:
                raise ValueError("--url names a running server: --model, and flags behind --, are for one started here")
        elif self.ca is not None or self.insecure:
            raise ValueError("--ca and --insecure are for a running server: give --url https://host:port")
        for name in serve_flags:
            if name.partition("=")[0] in served_here:
                raise ValueError(
                    f"{name}: where the server listens is chosen here; for one that listens elsewhere, --url"
                )
