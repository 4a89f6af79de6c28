"""`vecd check --fleet URL…`: whether the nodes of a fleet may be mixed behind one name.

Owns the command's arguments, its table and its exit codes. It reads no settings of a server, and loads nothing. What is
asked and compared is in `vecd.launch.check.fleet`. Called by `vecd.launch.check.command`.
"""

# ruff: noqa: RUF009 (a flag is a dataclasses.field)

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from vecd.client.connection import parse_target
from vecd.client.options import TlsOptions, flag, number, parse
from vecd.launch.base.exit_codes import EXIT_BAD_CONFIGURATION, EXIT_OK
from vecd.launch.check.fleet import TEXTS, Difference, Node, ask_all, compare

EXIT_DIFFERENT, EXIT_UNREACHABLE = 1, EXIT_BAD_CONFIGURATION
_HEADINGS = ("node", "version", "identity", "dtype", "max tokens", "result")


@dataclass(frozen=True, kw_only=True)
class FleetOptions(TlsOptions):
    fleet: list[str] = flag("the nodes: http://host:port, https://host:port or unix:/path", metavar="URL", nargs="+")
    json: bool = flag("print the comparison as one JSON object", default=False)
    api_key: str | None = flag(
        "of all nodes; prefer the variable VECD_API_KEY. Without the scope metrics less is compared",
        variable="VECD_API_KEY",
        metavar="KEY",
    )
    timeout: float = flag("seconds for each answer (60)", default=60.0, read=number("seconds", 3600), metavar="S")

    def __post_init__(self) -> None:
        if len(set(self.fleet)) < max(2, len(self.fleet)):
            raise ValueError(f"--fleet: takes two nodes or more, each once (given: {' '.join(self.fleet)})")
        self.nodes()

    def nodes(self) -> list[Node]:
        """The nodes, of which nothing is known yet. Raises ValueError for an address."""
        return [
            Node(self.read_target(url) if url.startswith("https:") else parse_target(url), url) for url in self.fleet
        ]


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 the nodes may be mixed, 1 they differ, 2 bad arguments, or a node that cannot be asked."""
    options = parse(
        FleetOptions,
        argv,
        prog="vecd check",
        usage="vecd check --fleet URL URL… [--json] [--api-key KEY] [--ca FILE | --insecure] [--timeout S]",
        description="Compare the nodes of a fleet: identity, number format, version, settings, and what they make of "
        f"the same {len(TEXTS)} texts.",
    )
    nodes = options.nodes()
    asyncio.run(ask_all(nodes, options.api_key, options.timeout))
    differences = compare(nodes)
    if options.json:
        print(json.dumps(_as_json(nodes, differences), ensure_ascii=False))
    else:
        print("\n".join(_render(nodes, differences)))
    if any(node.error for node in nodes):
        return EXIT_UNREACHABLE
    return EXIT_DIFFERENT if differences else EXIT_OK


def _as_json(nodes: Sequence[Node], differences: Sequence[Difference]) -> dict[str, Any]:
    return {
        "is_uniform": not differences and not any(node.error for node in nodes),
        "differing": list(dict.fromkeys(each.url for each in differences)),
        "differences": [asdict(each) for each in differences],
        "nodes": [
            {
                "url": node.url,
                "error": node.error or None,
                "version": node.version or None,
                "models": {name: model.facts for name, model in node.models.items()},
            }
            for node in nodes
        ],
    }


def _render(nodes: Sequence[Node], differences: Sequence[Difference]) -> list[str]:
    lines = []
    for model in dict.fromkeys(chain.from_iterable(node.models for node in nodes)):
        rows = [_HEADINGS, *(_row(node, model, differences) for node in nodes)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += [model, *("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows), ""]
    lines += [f"{node.url}: {node.error}" for node in nodes if node.error]
    lines += map(str, differences)
    if not differences and not any(node.error for node in nodes):
        lines.append(f"All {len(nodes)} nodes may be mixed: they have one identity and the same settings.")
    return lines


def _row(node: Node, model: str, differences: Sequence[Difference]) -> tuple[str, ...]:
    if model not in node.models:
        return (node.url, node.version, "", "", "", "cannot be asked" if node.error else "not served")
    facts = node.models[model].facts
    found = [each.what for each in differences if each.url == node.url and each.model in ("", model)]
    result = "cannot be asked" if node.error else f"differs: {', '.join(found)}" if found else "same"
    digest = facts["identity"].partition(";")[0]
    return (node.url, node.version, digest, str(facts["dtype"]), str(facts["max_tokens"]), result)
