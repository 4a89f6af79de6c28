"""How a plan is reported: lines for people, with what they assume, or one JSON object.

Owns words, units and field names. Called by `vecd.client.plan.command`.
"""

from dataclasses import asdict
from typing import Any

from vecd.client.plan.cost import ITEM_BYTES, SHARD_S, Cost, Work
from vecd.client.plan.measure import Measurement

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
_WIDTH = 14


def fields(work: Work, measured: Measurement, cost: Cost) -> dict[str, Any]:
    """For programs. Bytes are bytes, and rates are of all nodes together."""
    return {
        **asdict(work),
        "model": measured.model,
        "measured": {name: value for name, value in asdict(measured).items() if name not in ("model", "dimensions")},
        **asdict(cost),
        "assumptions": assumptions(work, measured),
    }


def text(work: Work, measured: Measurement, cost: Cost) -> str:
    nodes = f"{cost.num_nodes:,} node{'s' if cost.num_nodes != 1 else ''}"
    rows = {
        "this machine": f"{_short(measured.documents_per_s)} documents/s, {_short(measured.tokens_per_s)} tokens/s",
        "node-hours": _short(cost.node_hours),
        "time": f"{_duration(cost.hours)} with {nodes}",
        "read": _rates(cost.read_bytes_per_s, cost.num_nodes),
        "write": _rates(cost.write_bytes_per_s, cost.num_nodes),
        "texts": f"{_bytes(cost.text_bytes)}",
        "output": f"{_bytes(cost.output_bytes)}, {work.dtype}",
        "shards": f"{cost.num_shards:,} of {cost.shard_documents:,} documents, {_bytes(cost.shard_output_bytes)} each",
    }
    documents = f"{work.num_documents:,} documents of {work.num_tokens:,} tokens"
    head = f"{documents}, {measured.model}, {work.dimensions} dimensions"
    lines = [f"{name:<{_WIDTH}}{value}" for name, value in rows.items()]
    return "\n".join([head, "", *lines, "", "assumed:", *(f"- {line}" for line in assumptions(work, measured))])


def assumptions(work: Work, measured: Measurement) -> list[str]:
    """What the figures stand on, one sentence each."""
    cut = f"The model reads {measured.document_tokens:.0f} of the {work.num_tokens:,} tokens; the rest costs nothing."
    return [
        f"Every node is as fast as this machine was for {measured.seconds:.0f} s, with {measured.in_flight:,} "
        "documents under way, and does nothing else.",
        *([cut] if measured.is_cut else []),
        f"A document has {work.document_bytes:,.0f} bytes of UTF-8, {measured.bytes_per_token:.2g} a token, as the "
        "English texts of the measurement.",
        f"A vector has {work.dimensions} × {ITEM_BYTES[work.dtype]} bytes. What a file format adds is not counted, "
        "nor is compression.",
        f"A shard is {SHARD_S / 60:.0f} minutes of one node. The start of a server (seconds), and work that is lost "
        "and done again, are not counted.",
    ]


def _rates(bytes_per_s: float, num_nodes: int) -> str:
    return f"{_bytes(bytes_per_s)}/s, {_bytes(bytes_per_s / num_nodes)}/s a node"


def _short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _bytes(value: float) -> str:
    """In powers of 1000, as networks and disks are sold."""
    power = 0
    while value >= 999.5 and power < len(_PREFIXES) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {_PREFIXES[power]}B"


def _duration(hours: float) -> str:
    if hours >= 100:
        return f"{hours / 24:,.1f} days"
    return f"{hours:.3g} h" if hours >= 1 else f"{hours * 60:.3g} min"
