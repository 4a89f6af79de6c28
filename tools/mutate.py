"""Mutation by sample: the same changes of one line in two trees, and which of them the tests of each tree find.

    python -m tools.mutate choose FOLDER --before TREE --after TREE
    python -m tools.mutate cover FOLDER before --budget-minutes 60 tests/unit/shm/test_card.py …
    python -m tools.mutate run FOLDER before --budget-minutes 60
    python -m tools.mutate report FOLDER

`cover` and `run` are repeated for `after`. A tree is a clone of its own, with a `.venv`: `run` changes its files, one
at a time, and puts them back. All results lie in FOLDER, and `cover` and `run` go on after an interruption. Lines are
matched by their text and that of the lines beside them, because files move between the trees. Only lines in functions
are changed, because every test that imports a module touches the others. The lines that tests touch are noted by
`tools/tracing` and not by coverage, which loses what a killed process has run, and so every worker of a server.
"""

import argparse
import ast
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tools.size import is_product, sources_now

SIDES = ("before", "after")
_COMPARISONS: dict[type[ast.cmpop], tuple[bytes, bytes]] = {
    ast.Lt: (b"<", b">="),
    ast.LtE: (b"<=", b">"),
    ast.Gt: (b">", b"<="),
    ast.GtE: (b">=", b"<"),
    ast.Eq: (b"==", b"!="),
    ast.NotEq: (b"!=", b"=="),
    ast.Is: (b"is", b"is not"),
    ast.IsNot: (b"is not", b"is"),
    ast.In: (b"in", b"not in"),
    ast.NotIn: (b"not in", b"in"),
}
_SIGNS: dict[type[ast.operator], tuple[bytes, bytes]] = {ast.Add: (b"+", b"-"), ast.Sub: (b"-", b"+")}
_JUNCTIONS: dict[type[ast.boolop], tuple[bytes, bytes]] = {ast.And: (b"and", b"or"), ast.Or: (b"or", b"and")}
_RC_NO_TESTS = 5
_TRACING = Path(__file__).with_name("tracing").resolve()


class Change(NamedTuple):
    """Of one line of a file. The statement around it begins in line `first` and ends, or has its body, after `last`."""

    line: int
    operator: str
    old: str
    new: str
    first: int
    last: int


def changes_of(source: bytes) -> Iterator[Change]:
    """Some of them leave a file that does not compile."""
    lines = source.split(b"\n")
    tree = ast.parse(source)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in function.body:
                for line, operator, new, first, last in _in_statement(statement, lines):
                    if new != lines[line - 1]:
                        yield Change(line, operator, lines[line - 1].decode(), new.decode(), first, last)


def _compiles(source: bytes) -> bool:
    try:
        compile(source, "changed", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def _in_statement(statement: ast.stmt, lines: list[bytes]) -> Iterator[tuple[int, str, bytes, int, int]]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return  # functions in it are walked by themselves
    inner: list[Any] = [
        each for each in ast.iter_child_nodes(statement) if isinstance(each, ast.stmt | ast.excepthandler)
    ]
    inner += getattr(statement, "cases", [])
    first, last = statement.lineno, statement.end_lineno or statement.lineno
    if inner:
        # A case of `match` has no line of its own.
        last = max(first, min(getattr(each, "lineno", first + 1) for each in inner) - 1)
    for each in inner:
        for part in [each] if isinstance(each, ast.stmt) else each.body:
            yield from _in_statement(part, lines)
    for node in [statement, *_expressions(statement)]:
        if node.lineno == node.end_lineno or isinstance(node, ast.If | ast.While):
            for operator, start, end, new in _edits(node, lines[node.lineno - 1]):
                line = lines[node.lineno - 1]
                yield node.lineno, operator, line[:start] + new + line[end:], first, last


def _expressions(statement: ast.stmt) -> Iterator[Any]:
    """Without those of inner statements and of f-strings, whose places Python 3.11 does not know."""
    waiting: list[ast.AST] = [node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.expr)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.JoinedStr | ast.Lambda):
            continue
        if isinstance(node, ast.expr):
            yield node
        waiting += ast.iter_child_nodes(node)


def _edits(node: Any, line: bytes) -> Iterator[tuple[str, int, int, bytes]]:
    """Operator, the columns of what is replaced, and what replaces it."""
    start: int = node.col_offset
    end: int = node.end_col_offset
    match node:
        case ast.Compare(ops=[op], comparators=[right]) if right.lineno == node.lineno:
            yield from _between(line, node.left, right, *_COMPARISONS[type(op)], "comparison")
        case ast.BinOp(op=ast.Add() | ast.Sub() as op):
            yield from _between(line, node.left, node.right, *_SIGNS[type(op)], "sign")
        case ast.BoolOp(op=op, values=[left, right, *_]):
            yield from _between(line, left, right, *_JUNCTIONS[type(op)], "and, or")
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not", start, operand.col_offset, b""
        case ast.Constant(value=bool() as value):
            yield "true, false", start, end, str(not value).encode()
        case ast.Constant(value=int() as value):
            yield "constant", start, end, str(value + 1).encode()
            yield "constant", start, end, str(value - 1).encode()
        case ast.If(test=test) | ast.While(test=test) if test.lineno == test.end_lineno == node.lineno:
            inside = line[test.col_offset : test.end_col_offset]
            yield "not", test.col_offset, (test.end_col_offset or 0), b"not (" + inside + b")"
        case ast.Return(value=ast.expr()):
            yield "return None", start, end, b"return None"
        case ast.AugAssign(target=target, op=ast.Add() | ast.Sub() as op, value=value):
            yield from _between(line, target, value, *_SIGNS[type(op)], "sign")
            yield "pass", start, end, b"pass"
        case ast.Assign() | ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise() | ast.Delete():
            yield "pass", start, end, b"pass"


def _between(
    line: bytes, left: ast.expr, right: ast.expr, old: bytes, new: bytes, operator: str
) -> Iterator[tuple[str, int, int, bytes]]:
    start, end = left.end_col_offset or 0, right.col_offset
    gap = line[start:end]
    if gap.count(old) == 1:
        yield operator, start, end, gap.replace(old, new)


def choose(before: dict[str, bytes], after: dict[str, bytes], number: int, seed: int) -> list[dict[str, Any]]:
    """Each operator in turn; of each line that stands exactly once in both trees, between the same lines."""
    then, now = _unique_lines(before), _unique_lines(after)
    twin = {now[key]: then[key] for key in now.keys() & then.keys()}
    by_operator: dict[str, list[tuple[str, Change]]] = {}
    for path in sorted(after):
        for change in changes_of(after[path]):
            if (path, change.line) in twin:
                by_operator.setdefault(change.operator, []).append((path, change))
    rng = random.Random(seed)
    waiting = [changes for _, changes in sorted(by_operator.items())]
    for changes in waiting:
        rng.shuffle(changes)
    chosen: list[dict[str, Any]] = []
    taken = set()
    while len(chosen) < number and (waiting := [changes for changes in waiting if changes]):
        for changes in waiting:
            path, change = changes.pop()
            path_before, line_before = twin[path, change.line]
            there = [
                each for each in changes_of(before[path_before]) if (each.line, each.new) == (line_before, change.new)
            ]
            changed = apply(after[path], change.line, change.old, change.new)
            if (path, change.line) not in taken and there and _compiles(changed) and len(chosen) < number:
                taken.add((path, change.line))
                chosen.append(
                    {"number": len(chosen), "operator": change.operator, "old": change.old, "new": change.new}
                    | {"before": _place(path_before, there[0]), "after": _place(path, change)}
                )
    return chosen


def _place(path: str, change: Change) -> dict[str, Any]:
    return {"path": path, "line": change.line, "first": change.first, "last": change.last}


def _unique_lines(sources: dict[str, bytes]) -> dict[tuple[bytes, ...], tuple[str, int]]:
    """Three lines → path and number of the middle one."""
    places = {}
    times: Counter[tuple[bytes, ...]] = Counter()
    for path, source in sources.items():
        lines = [b"", *source.split(b"\n"), b""]
        for number in range(1, len(lines) - 1):
            key = tuple(lines[number - 1 : number + 2])
            times[key] += 1
            places[key] = path, number
    return {key: place for key, place in places.items() if times[key] == 1}


def apply(source: bytes, line: int, old: str, new: str) -> bytes:
    lines = source.split(b"\n")
    if lines[line - 1] != old.encode():
        raise ValueError(f"line {line} is not what was chosen: choose again")
    lines[line - 1] = new.encode()
    return b"\n".join(lines)


class Folder:
    """What has been chosen and found, in files of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def trees(self) -> dict[str, Path]:
        return {side: Path(tree) for side, tree in json.loads((self._path / "trees.json").read_text()).items()}

    def chosen(self) -> list[dict[str, Any]]:
        return self._read("chosen")

    def start(self, trees: dict[str, Path], chosen: list[dict[str, Any]]) -> None:
        self._path.mkdir(parents=True)  # results of other changes must not be mixed with these
        (self._path / "trees.json").write_text(json.dumps({side: str(tree) for side, tree in trees.items()}))
        for change in chosen:
            self.add("chosen", change)

    def covered(self, side: str) -> list[dict[str, Any]]:
        return self._read(f"covered-{side}")

    def results(self, side: str) -> dict[int, dict[str, Any]]:
        return {result["number"]: result for result in self._read(f"results-{side}")}

    def add(self, name: str, entry: dict[str, Any]) -> None:
        with (self._path / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def scratch(self, side: str, test: str) -> Path:
        return self._path / "touched" / side / test.replace("/", "-")

    def undo_of(self, side: str) -> Path:
        return self._path / f"undo-{side}"

    def _read(self, name: str) -> list[dict[str, Any]]:
        path = self._path / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _pytest(
    tree: Path, test: str, limit_s: float, *, options: Iterable[str] = (), trace: Path | None = None
) -> tuple[int | None, str]:
    """Exit status, None after the limit, and output."""
    command = [str(tree / ".venv/bin/python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, test]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    if trace is not None:
        environment |= {"PYTHONPATH": str(_TRACING), "TRACE_FOLDER": str(trace)}
    with subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return None, ""
        return process.returncode, output


def cover(folder: Folder, side: str, tests: list[str], until: float, limit_s: float, jobs: int) -> None:
    """Note which of the chosen lines each test file touches, how long it takes, and whether it passes unchanged."""
    tree = folder.trees()[side]
    wanted: dict[str, list[int]] = {}
    for change in folder.chosen():
        place = change[side]
        for path in (tree / place["path"], tree / "vecd" / place["path"]):  # a link's name is the one that is imported
            wanted.setdefault(str(path), []).extend(range(place["first"], place["last"] + 1))
    done = {entry["test"] for entry in folder.covered(side)}

    def one(test: str) -> None:
        if time.monotonic() > until:
            return
        scratch = folder.scratch(side, test).resolve()
        scratch.mkdir(parents=True, exist_ok=True)
        (scratch / "wanted").write_text(json.dumps(wanted))
        (scratch / "touched").write_bytes(b"")
        _pytest(tree, test, limit_s * 3, trace=scratch)
        began = time.monotonic()
        status, _ = _pytest(tree, test, limit_s)
        lines = _touched(scratch, tree)
        entry = {"test": test, "seconds": time.monotonic() - began, "passes": status == 0, "lines": lines}
        folder.add(f"covered-{side}", entry)
        print(f"{entry['seconds']:6.1f} s  {sum(map(len, lines.values())):3} lines  {status}  {test}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, [test for test in tests if test not in done]))


def _touched(scratch: Path, tree: Path) -> dict[str, list[int]]:
    lines: dict[str, set[int]] = {}
    for entry in (scratch / "touched").read_text().splitlines():
        line, path = entry.split(" ", 1)
        lines.setdefault(os.path.relpath(os.path.realpath(path), tree), set()).add(int(line))
    return {path: sorted(found) for path, found in lines.items()}


def run(folder: Folder, side: str, until: float, limit_s: float) -> None:
    tree = folder.trees()[side]
    _put_back(folder, side)
    covered = [entry for entry in folder.covered(side) if entry["passes"]]
    done = folder.results(side)
    for change in folder.chosen():
        if change["number"] in done or time.monotonic() > until:
            continue
        place = change[side]
        span = range(place["first"], place["last"] + 1)
        touching = [entry for entry in covered if not set(span).isdisjoint(entry["lines"].get(place["path"], ()))]
        path = tree / place["path"]
        stat, source = path.stat(), path.read_bytes()
        changed = apply(source, place["line"], change["old"], change["new"])
        folder.undo_of(side).write_text(json.dumps([str(path), source.decode(), stat.st_mtime_ns]))
        try:
            path.write_bytes(changed)
            outcome = _hunt(tree, sorted(touching, key=lambda entry: entry["seconds"]), limit_s)
        finally:
            _put_back(folder, side)
        outcome = {"number": change["number"], "touching": len(touching), **outcome}
        folder.add(f"results-{side}", outcome)
        print(json.dumps(outcome), flush=True)


def _put_back(folder: Folder, side: str) -> None:
    """With its old time: compiled files are compared by it."""
    undo = folder.undo_of(side)
    if undo.exists():
        path, source, mtime_ns = json.loads(undo.read_text())
        Path(path).write_text(source, newline="")
        os.utime(path, ns=(mtime_ns, mtime_ns))
        undo.unlink()


def _hunt(tree: Path, touching: list[dict[str, Any]], limit_s: float) -> dict[str, Any]:
    began = time.monotonic()
    for entry in touching:
        left_s = began + limit_s - time.monotonic()
        if left_s <= 0:
            return {"outcome": "undecided"}
        allowed_s = 3 * entry["seconds"] + 20
        status, output = _pytest(tree, entry["test"], min(left_s, allowed_s), options=["-x"])
        if status is None and left_s < allowed_s:
            return {"outcome": "undecided"}
        if status not in (0, _RC_NO_TESTS):
            failed = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
            how = failed[0].split(" - ")[0] if failed else "hangs" if status is None else f"exit status {status}"
            return {"outcome": "found", "by": entry["test"], "how": how}
    return {"outcome": "survived"}


def report(folder: Folder) -> None:
    results = {side: folder.results(side) for side in SIDES}
    chosen = folder.chosen()
    for side, found in results.items():
        counts = Counter(result["outcome"] for result in found.values())
        untouched = sum(not result["touching"] for result in found.values())
        print(
            f"{side}: of {len(chosen)} changes {counts['found']} found, {counts['survived']} survived "
            f"({untouched} touched by no test), {counts['undecided']} undecided, {len(chosen) - len(found)} not tried"
        )
    for side, other in (SIDES, SIDES[::-1]):
        print(f"\nfound {side} alone:")
        for change in chosen:
            number = change["number"]
            mine, theirs = (results[each].get(number, {"outcome": "not tried"}) for each in (side, other))
            if mine["outcome"] == "found" != theirs["outcome"]:
                place = change[other]
                print(f"  {number}: {place['path']}:{place['line']}: {other} {theirs['outcome']}; by {mine['how']}")
                print(f"    - {change['old'].strip()}\n    + {change['new'].strip()}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutate", description="Mutation by sample, in two trees.")
    steps = parser.add_subparsers(dest="step", required=True)
    step = {name: steps.add_parser(name) for name in ("choose", "cover", "run", "report")}
    for each in step.values():
        each.add_argument("folder", type=lambda text: Folder(Path(text)))
    step["choose"].add_argument("--before", type=Path, required=True, metavar="TREE")
    step["choose"].add_argument("--after", type=Path, required=True, metavar="TREE")
    step["choose"].add_argument("--number", type=int, default=60)
    step["choose"].add_argument("--seed", type=int, default=1)
    for name in ("cover", "run"):
        step[name].add_argument("side", choices=SIDES)
        step[name].add_argument("--budget-minutes", type=float, required=True, help="begins nothing after that")
        step[name].add_argument(
            "--limit", type=float, default=240, metavar="SECONDS", help="for a test file or a change"
        )
    step["cover"].add_argument("tests", nargs="+", metavar="TEST_FILE")
    step["cover"].add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(arguments)
    folder: Folder = options.folder
    if options.step == "choose":
        trees = {side: getattr(options, side).resolve() for side in SIDES}
        before, after = (
            {path: source for path, source in sources_now(tree).items() if is_product(path)} for tree in trees.values()
        )
        folder.start(trees, choose(before, after, options.number, options.seed))
        print(f"{len(folder.chosen())} changes chosen")
    elif options.step == "report":
        report(folder)
    else:
        until = time.monotonic() + options.budget_minutes * 60
        if options.step == "cover":
            cover(folder, options.side, options.tests, until, options.limit, options.jobs)
        else:
            run(folder, options.side, until, options.limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
