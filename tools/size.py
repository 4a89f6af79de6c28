"""Counts the Python of this repository by room: lines, lines with code, tokens and files.

    python3 tools/size.py                   the table
    python3 tools/size.py --since REVISION  the difference by room
    python3 tools/size.py --check           exits 1 where a room of docs/rooms.md is above its budget
    python3 tools/size.py --write           rewrites what docs/rooms.md and docs/features.md say of today

Tokens are counted so that denser lines do not look smaller. Comments and docstrings count as lines alone, so that
explaining costs nothing. The product is what lies below PRODUCT, without the links in `vecd/`.
"""

import argparse
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatchcase
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("gateway", "workers", "shm", "launch", "client", "model", "vecd", "supervisor.py")
BESIDE = ("tests", "tools", "benchmarks", "deploy")
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_BEGINS_STATEMENT = {tokenize.ENCODING, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
# From Python 3.12 on an f-string comes in parts; it counts as the one token that it was before.
_F_STRING = {getattr(tokenize, "FSTRING_START", None): 1, getattr(tokenize, "FSTRING_END", None): -1}


class Size(NamedTuple):
    lines: int = 0
    code: int = 0
    tokens: int = 0
    files: int = 0


NOTHING = Size()


def add(sizes: Iterable[Size]) -> Size:
    return Size(*map(sum, zip(NOTHING, *sizes, strict=True)))


def measure(source: bytes) -> Size:
    code: set[int] = set()
    tokens = open_f_strings = 0
    before = tokenize.ENCODING
    docstring: tokenize.TokenInfo | None = None
    """A string that begins a statement: a docstring, if the statement ends with it."""
    for token in tokenize.tokenize(BytesIO(source).readline):
        if docstring is not None and token.type != tokenize.COMMENT:
            if token.type != tokenize.NEWLINE:
                tokens += 1
                code.update(range(docstring.start[0], docstring.end[0] + 1))
            docstring = None
        inside = open_f_strings > 0
        open_f_strings += _F_STRING.get(token.type, 0)
        if inside:
            code.update(range(token.start[0], token.end[0] + 1))
        elif token.type == tokenize.STRING and before in _BEGINS_STATEMENT:
            docstring = token
        elif token.type not in _LAYOUT:
            tokens += 1
            code.update(range(token.start[0], token.end[0] + 1))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type
    return Size(source.count(b"\n"), len(code), tokens, 1)


def room_of(path: str) -> str:
    """The folder, at most two levels deep, and the name of a file that lies in none."""
    folders = path.split("/")[:-1]
    return "/".join(folders[:2]) or path


def is_product(path: str) -> bool:
    return path.split("/")[0] in PRODUCT


def _git(*arguments: str, root: Path = ROOT, given: bytes | None = None) -> bytes:
    return subprocess.run(["git", *arguments], cwd=root, check=True, input=given, stdout=subprocess.PIPE).stdout


def _python(listing: bytes) -> Iterator[tuple[str, str]]:
    """Path and third word of each file of Python that `git` lists; links have another mode."""
    for entry in listing.decode().split("\0"):
        about, _, path = entry.partition("\t")
        if about.startswith("100") and path.endswith(".py") and path.split("/")[0] in PRODUCT + BESIDE:
            yield path, about.split()[2]


def sources_now(root: Path = ROOT) -> dict[str, bytes]:
    paths = (path for path, _ in _python(_git("ls-files", "-z", "--stage", root=root)))
    return {path: (root / path).read_bytes() for path in paths if (root / path).is_file()}


def sources_at(revision: str) -> dict[str, bytes]:
    blobs = dict(_python(_git("ls-tree", "-r", "-z", revision)))
    answer = BytesIO(_git("cat-file", "--batch", given="\n".join(blobs.values()).encode()))
    sources = {}
    for path in blobs:
        sources[path] = answer.read(int(answer.readline().split()[2]))
        answer.readline()
    return sources


def measure_all(sources: dict[str, bytes]) -> dict[str, Size]:
    with ProcessPoolExecutor() as pool:
        return dict(zip(sources, pool.map(measure, sources.values(), chunksize=32), strict=True))


def by_room(sizes: dict[str, Size]) -> dict[str, Size]:
    """Rooms of the product first."""
    rooms: dict[str, list[Size]] = {}
    for path in sorted(sizes, key=lambda path: (not is_product(path), room_of(path))):
        rooms.setdefault(room_of(path), []).append(sizes[path])
    return {room: add(parts) for room, parts in rooms.items()}


def print_rooms(rooms: dict[str, Size], sign: str = "") -> None:
    sums = {"product": add(size for room, size in rooms.items() if is_product(room))}
    sums |= {place: add(size for room, size in rooms.items() if room.split("/")[0] == place) for place in BESIDE}
    print(f"{'room':24}" + "".join(f"{name:>10}" for name in Size._fields))
    for name, size in [*rooms.items(), *((f"= {name}", size) for name, size in sums.items())]:
        if any(size):
            print(f"{name:24}" + "".join(f"{value:>{sign}10,}" for value in size))


class Table:
    """The rows of the first table of a page of Markdown."""

    def __init__(self, page: Path) -> None:
        self._page = page
        self._lines = page.read_text(encoding="utf-8").split("\n")
        self._first = next(number for number, line in enumerate(self._lines) if line.startswith("| --")) + 1
        self._last = self._first
        while self._lines[self._last].startswith("|"):
            self._last += 1
        self.rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in self._lines[self._first : self._last]]

    def write(self) -> None:
        self._lines[self._first : self._last] = [f"| {' | '.join(row)} |" for row in self.rows]
        self._page.write_text("\n".join(self._lines), encoding="utf-8")


def figure(cell: str) -> int:
    return int(cell.replace(",", ""))


class Rooms:
    """docs/rooms.md: room, owns, budget of lines with code and of tokens; today's figures."""

    def __init__(self, page: Path) -> None:
        self._table = Table(page)

    def complaints(self, rooms: dict[str, Size]) -> Iterator[str]:
        rows = {row[0].strip("`"): row for row in self._table.rows}
        for room in rooms.keys() - rows.keys():
            yield f"{room}: has no row in docs/rooms.md"
        for room, row in rows.items():
            if room not in rooms:
                yield f"{room}: has a row in docs/rooms.md, and no file"
                continue
            if not row[1]:
                yield f"{room}: docs/rooms.md does not say what it owns"
            for what, budget, value in (
                ("lines with code", row[2], rooms[room].code),
                ("tokens", row[3], rooms[room].tokens),
            ):
                if value > figure(budget):
                    yield f"{room}: {value:,} {what} are more than its budget of {budget}"

    def write(self, rooms: dict[str, Size]) -> None:
        """A budget that is there stays; an empty one, as that of a new room, becomes today's figure."""
        rows = {row[0].strip("`"): row for row in self._table.rows}
        self._table.rows = []
        for room, size in rooms.items():
            _, owns, code, tokens, *_ = rows.get(room, [""] * 4)
            budget = [code or f"{size.code:,}", tokens or f"{size.tokens:,}"]
            self._table.rows.append([f"`{room}`", owns, *budget, *(f"{value:,}" for value in size)])
        self._table.write()


class Features:
    """docs/features.md: feature, for whom, patterns of files, lines. The longest pattern that fits a file has it."""

    def __init__(self, page: Path) -> None:
        self._table = Table(page)

    def _files(self, paths: Iterable[str]) -> tuple[list[list[str]], list[str]]:
        """The files of each row, and what is wrong."""
        patterns = [
            (pattern.strip().strip("`"), index)
            for index, row in enumerate(self._table.rows)
            for pattern in row[2].split(",")
        ]
        wrong = [f"{pattern}: stands twice" for pattern, times in Counter(p for p, _ in patterns).items() if times > 1]
        files: list[list[str]] = [[] for _ in self._table.rows]
        used = set()
        for path in filter(is_product, paths):
            fitting = [(len(pattern), pattern, index) for pattern, index in patterns if fnmatchcase(path, pattern)]
            if not fitting:
                wrong.append(f"{path}: is of no feature")
                continue
            _, pattern, index = max(fitting)
            if sum(length == len(pattern) and row != index for length, _, row in fitting):
                wrong.append(f"{path}: is of two features, by patterns of the same length")
            used.add(pattern)
            files[index].append(path)
        wrong += [f"{pattern}: has no file of its own" for pattern, _ in patterns if pattern not in used]
        return files, [f"docs/features.md: {line}" for line in wrong]

    def complaints(self, paths: Iterable[str]) -> list[str]:
        return self._files(paths)[1]

    def write(self, sizes: dict[str, Size]) -> None:
        """The largest feature first."""
        files, _ = self._files(sizes)
        lines = [sum(sizes[path].lines for path in paths) for paths in files]
        rows = sorted(zip(lines, self._table.rows, strict=True), key=lambda each: -each[0])
        self._table.rows = [[*row[:3], f"{total:,}"] for total, row in rows]
        self._table.write()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Counts the Python of this repository by room.")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--since", metavar="REVISION", help="prints the difference to this revision")
    one.add_argument("--check", action="store_true", help="compares with docs/rooms.md and docs/features.md")
    one.add_argument("--write", action="store_true", help="writes today's figures into both pages")
    options = parser.parse_args(arguments)
    sizes = measure_all(sources_now())
    rooms = by_room(sizes)
    if options.check:
        complaints = [*Rooms(ROOT / "docs/rooms.md").complaints(rooms)]
        complaints += Features(ROOT / "docs/features.md").complaints(sizes)
        print(*complaints, sep="\n", end="\n" if complaints else "")
        return bool(complaints)
    if options.write:
        Rooms(ROOT / "docs/rooms.md").write(rooms)
        Features(ROOT / "docs/features.md").write(sizes)
    elif options.since:
        before = by_room(measure_all(sources_at(options.since)))
        both = sorted(rooms.keys() | before.keys(), key=lambda room: (not is_product(room), room))
        pairs = {room: zip(rooms.get(room, NOTHING), before.get(room, NOTHING), strict=True) for room in both}
        print_rooms({room: Size(*(now - then for now, then in pair)) for room, pair in pairs.items()}, "+")
    else:
        print_rooms(rooms)
    return 0


if __name__ == "__main__":
    sys.exit(main())
