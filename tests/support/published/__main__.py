"""Writes the models of all layouts into a folder, and beside them the files for `vecd check --table`:

python -m tests.support.published OUT
vecd check --table OUT/names.txt --config OUT/vecd.toml --accept-unordered
"""

import sys
from pathlib import Path

from tests.support.published import layouts, table_of

_LOADED = "a tiny random checkpoint in the published layout"


def main(out: Path) -> None:
    names, tables = [], []
    for layout in layouts():
        folder = out.resolve() / layout.name.replace("/", "--")
        if not folder.exists():
            folder.mkdir(parents=True)
            layout.save(folder)
        names.append(f"{layout.name}  # {_LOADED}")
        tables.append(table_of(layout, folder))
    (out / "names.txt").write_text("\n".join([*names, ""]))
    (out / "vecd.toml").write_text("\n".join(tables))


main(Path(sys.argv[1]))
