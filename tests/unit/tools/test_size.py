"""What counts as code and as a token, and what the pages of rooms and features are told of."""

from pathlib import Path

import pytest

from tools.size import Features, Rooms, Size, by_room, measure, room_of

_ROOMS = """A page.

| room | owns | budget: code | budget: tokens | lines | code | tokens | files |
| --- | --- | --- | --- | --- | --- | --- | --- |
| `shm` | what two processes share | 10 | 1,000 | 1 | 1 | 1 | 1 |
| `gone` | nothing | 1 | 1 | 1 | 1 | 1 | 1 |

The end.
"""
_FEATURES = """| feature | for whom | files | lines |
| --- | --- | --- | --- |
| the rest | everyone | `shm/*` | |
| cards | everyone | `shm/*_card.py`, `shm/card.py` | |
"""


@pytest.mark.parametrize(
    ("source", "code", "tokens"),
    [
        ("", 0, 0),
        ("# a comment\n\nx = 1  # another\n", 1, 3),
        ('"""A docstring\n\nof three lines."""\n', 0, 0),
        ('class A:\n    """One."""\n\n    x: int\n    """Another."""  # and a comment\n', 2, 6),
        ('x = """a text\nof two lines"""\n', 2, 3),
        ('"a".join(y)\n', 1, 6),
        ("f(\n    1,\n    # why\n    2,\n)\n", 4, 7),
        ('x = f"{x} of {y!r}"\nx = f"""\n{y:{z}}"""\n', 3, 6),
    ],
)
def test_what_is_code_and_a_token(source: str, code: int, tokens: int):
    size = measure(source.encode())
    assert (size.code, size.tokens) == (code, tokens)
    assert size.lines == source.count("\n")


def test_the_room_of_a_file_is_a_folder_of_the_upper_two_levels():
    paths = ["tests/unit/a/b.py", "gateway/http/tls.py", "gateway/main.py", "supervisor.py", "gateway/control.py"]
    assert [room_of(path) for path in paths] == ["tests/unit", "gateway/http", "gateway", "supervisor.py", "gateway"]
    sizes = by_room({path: Size(10, 5, 50, 1) for path in paths})
    assert [*sizes] == ["gateway", "gateway/http", "supervisor.py", "tests/unit"]
    assert sizes["gateway"] == Size(20, 10, 100, 2)


def test_each_room_has_a_row_and_keeps_within_its_budget(tmp_path: Path):
    page = tmp_path / "rooms.md"
    page.write_text(_ROOMS)
    assert [*Rooms(page).complaints({"shm": Size(9, 11, 1001, 1), "new": Size(1, 1, 1, 1)})] == [
        "new: has no row in docs/rooms.md",
        "shm: 11 lines with code are more than its budget of 10",
        "shm: 1,001 tokens are more than its budget of 1,000",
        "gone: has a row in docs/rooms.md, and no file",
    ]


def test_writing_rooms_keeps_budgets_and_fills_empty_ones(tmp_path: Path):
    page = tmp_path / "rooms.md"
    page.write_text(_ROOMS)
    rooms = {"shm": Size(3000, 11, 999, 4), "new": Size(1, 2, 3, 4)}
    Rooms(page).write(rooms)
    assert page.read_text().split("\n")[4:] == [
        "| `shm` | what two processes share | 10 | 1,000 | 3,000 | 11 | 999 | 4 |",
        "| `new` |  | 2 | 3 | 1 | 2 | 3 | 4 |",
        "",
        "The end.",
        "",
    ]
    assert [*Rooms(page).complaints(rooms)] == [
        "shm: 11 lines with code are more than its budget of 10",
        "new: docs/rooms.md does not say what it owns",
    ]


def test_the_longest_pattern_has_a_file(tmp_path: Path):
    page = tmp_path / "features.md"
    page.write_text(_FEATURES)
    sizes = {path: Size(1, 1, 1, 1) for path in ["shm/card.py", "shm/a_card.py", "shm/deep/er.py", "tests/a.py"]}
    assert Features(page).complaints(sizes) == []
    Features(page).write(sizes)
    assert page.read_text().split("\n")[2:4] == [
        "| cards | everyone | `shm/*_card.py`, `shm/card.py` | 2 |",
        "| the rest | everyone | `shm/*` | 1 |",
    ]


def test_a_file_without_a_feature_or_with_two_is_named(tmp_path: Path):
    page = tmp_path / "features.md"
    page.write_text(_FEATURES + "| more | everyone | `shm/a*`, `shm/c*`, `shm/card.py` | |\n")
    assert Features(page).complaints(["shm/a.py", "shm/card.py", "vecd/missing.py"]) == [
        "docs/features.md: shm/card.py: stands twice",
        "docs/features.md: shm/card.py: is of two features, by patterns of the same length",
        "docs/features.md: vecd/missing.py: is of no feature",
        "docs/features.md: shm/*: has no file of its own",
        "docs/features.md: shm/*_card.py: has no file of its own",
        "docs/features.md: shm/c*: has no file of its own",
    ]
