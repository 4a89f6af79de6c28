"""Tables of models, one line each: those that are known by a word, and in Markdown what checks have found. Pure.

Owns the columns, and the file of names that `vecd check --table` reads.
"""

import re
from collections.abc import Iterable, Sequence

from vecd.base.files import JsonMapping, JsonObject
from vecd.launch.check.report import Report
from vecd.launch.memory import as_table
from vecd.model.known import KnownModel

_COLUMNS = ("model", "kind", "engines", "tokens/s", "memory", "revision", "loaded")
_SNAPSHOT = re.compile(r"/models--[^/]+/snapshots/([0-9a-f]+)")
"""Of the hub's cache. Source: huggingface_hub's page on its cache."""
_REVISION_DIGITS = 12


def read_names(text: str) -> dict[str, str]:
    """The models of a file, one a line as [NAME=]MODEL, each with the comment behind it."""
    lines = (re.split(r"(?:^|\s)#", f"{line} #", maxsplit=1) for line in text.splitlines())
    return {model.strip(): comment.rstrip(" #").strip() for model, comment in lines if model.strip()}


def known_as_json(models: Iterable[KnownModel]) -> list[JsonObject]:
    return [{**model._asdict(), "matryoshka_dims": model.matryoshka_dims} for model in models]


def known_as_text(models: Iterable[KnownModel]) -> str:
    """The second name of some is the last part of their id."""
    rows = [("name", "id on the hub", "kind", "shorter vectors", "notes")]
    for model in models:
        dims = model.matryoshka_dims
        shorter = "" if dims is None else ", ".join(map(str, dims)) or "any length"
        rows.append((model.names[0], model.hub_id, model.kind, shorter, model.notes))
    return "\n".join(as_table(rows))


def markdown_head() -> str:
    """The figure behind an engine is its smallest cosine with the reference, or ± its largest difference, of scores."""
    return f"{_row(_COLUMNS)}\n{_row(['---'] * len(_COLUMNS))}"


def markdown_row(name: str, report: Report, comment: str) -> str:
    """`comment`: what was loaded, where it is not from the hub. The engine that serves is the first one, in bold."""
    model, path, problems = report["model"] or {}, report["path"], report["problems"]
    kind, snapshot = ", ".join(model.get("capabilities", ())), _SNAPSHOT.search(model.get("folder", ""))
    revision = snapshot[1][:_REVISION_DIGITS] if snapshot else ""
    loaded = "published weights" if snapshot else comment or ("a folder" if model else "")
    if path is None or problems:
        why = problems[0].what if problems else "nothing was found"
        return _row((name, kind, f"not served: {why}", "", "", revision, loaded))
    measured = report["measurements"] or {"speeds": (), "agreements": {}}
    speeds = [speed for speed in measured["speeds"] if speed["dtype"] == path["dtype"]]
    engines = {path["dtype"]: f"**{path['path']} {path['dtype']}** {_worst([*path['agreements'], path['probes']])}"}
    for speed in measured["speeds"]:
        figure = _worst([measured["agreements"].get(speed["dtype"]) or {}])
        engines.setdefault(speed["dtype"], f"{speed['path']} {speed['dtype']} {figure}")
    tokens_per_s = f"{max(speed['tokens_per_s'] for speed in speeds):,.0f}" if speeds else ""
    memory_mb = path["shared_mb"] + max((speed["private_mb"] for speed in speeds), default=0)
    cells = (", ".join(map(str.strip, engines.values())), tokens_per_s, f"{memory_mb:,} MB")
    return _row((name, kind, *cells, revision, loaded))


def _worst(agreements: Sequence[JsonMapping]) -> str:
    """Empty if nothing was compared."""
    cosines = [found["min_cosine"] for found in agreements if found.get("min_cosine") is not None]
    if cosines:
        return f"{min(cosines):.6f}"
    differences = [found["max_abs_diff"] for found in agreements if found]
    return f"±{max(differences):.0e}" if differences else ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
