"""Which changes of a line are made, and that both trees get the same one."""

import pytest

from tools.mutate import apply, changes_of, choose

_FILE = '''"""A file."""

LIMIT = 3


def first(a: int, b: int) -> int:
    """Text."""
    if a < b and not b:
        return a + 1
    log(f"{a + b}")
    return b


def ä() -> bool:
    return "ä" == "b"
'''.encode()


@pytest.mark.parametrize(
    ("statement", "changed"),
    [
        ("return a <= b", ["return None", "return a > b"]),
        ("return a is not b", ["return None", "return a is b"]),
        ("return 'ä' not in b", ["return 'ä' in b", "return None"]),
        ("x = a + 1", ["pass", "x = a + 0", "x = a + 2", "x = a - 1"]),
        ("x += a", ["pass", "x -= a"]),
        ("f(a or b)", ["f(a and b)", "pass"]),
        ("f(not a, True)", ["f(a, True)", "f(not a, False)", "pass"]),
        ("if a: b", ["if not (a): b"]),
        ("return", []),
        ("f'{a + 1}'", []),
    ],
)
def test_changes_of_a_statement(statement: str, changed: list[str]):
    source = f"LIMIT = 3\ndef f(a, b):\n    {statement}\n".encode()
    assert sorted(change.new.strip() for change in changes_of(source)) == changed


def test_the_same_lines_are_changed_in_both_trees_wherever_they_are():
    before = {"shm/a.py": _FILE}
    after = {"vecd/base/b.py": b"# moved\n" + _FILE, "vecd/base/new.py": b"def new(a):\n    return a > 1\n"}
    chosen = choose(before, after, number=60, seed=1)
    assert chosen == choose(before, after, number=60, seed=1) != choose(before, after, number=60, seed=2)
    assert {change["after"]["path"] for change in chosen} == {"vecd/base/b.py"}
    assert len({change["after"]["line"] for change in chosen}) == len(chosen) == 5
    assert len(choose(before, after, number=2, seed=1)) == 2
    for change in chosen:
        changed = apply(_FILE, change["before"]["line"], change["old"], change["new"])
        assert changed != _FILE
        compile(changed, "changed", "exec")
        moved = apply(after["vecd/base/b.py"], change["after"]["line"], change["old"], change["new"])
        assert moved == b"# moved\n" + changed


def test_a_line_that_stands_twice_is_not_chosen():
    twice = b"\ndef f(a):\n    return a > 1\n\n"
    assert choose({"shm/a.py": twice * 2}, {"shm/a.py": twice}, number=60, seed=1) == []
