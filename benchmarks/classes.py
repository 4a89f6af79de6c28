"""What `make bench-engine` and the like have found out on each class of processor, for docs/benchmarks.md.

Owns the choice of the runs that the page shows, and their tables. A run on one class of processor never replaces what
another class has shown. Measures nothing. Called by `benchmarks.engine` and `benchmarks.compare`.

A run is one call of `make bench-engine`, `make bench-cores` or `make bench-rerank`, or one part of `make bench-models`.
Of the runs of one class, model, section and number format the page shows the latest one that is quiet; where none is,
the quietest. How fast vecd was plays no part in the choice.
"""

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import orjson

from benchmarks.findings import ratio_cell, readable
from benchmarks.notebook import DISTURBING_CORES
from benchmarks.tables import paragraph, table

TITLE = "vecd's engine beside other runtimes"
_SECTIONS = {
    "equal": "Equal lengths, one core",
    "mixed": "Mixed lengths, one core",
    "clients": "64 clients, equal lengths",
    "starts": "Starts",
    "memory": "Memory",
    "deaths": "Death of the only worker",
    "single": "One client, with cores that are idle",
    "busy": "One client, while another program takes a core",
    "after-load": "One client, after minutes of load from several sides",
    "load": "64 clients, with cores that may be lent",
    "cache": "64 clients, with a cache of vectors",
    "gateway": "Processor time of the gateway",
    "rerank": "Rerank: 16 clients, 32 documents in a request",
    "fairness": "Rerank: requests with one document beside 1,000 documents",
    "models-one": "One model, beside an earlier commit",
    "models-memory": "Several models: memory",
    "models-fair": "Several models: interactive requests beside bulk of another model",
    "models-peers": "Several models: an embedder and a reranker at once",
    "models-trial": "Several models: the others while one is killed, reloaded and unloaded",
    "models-budget": "Several models: more of them than memory",
}
_ENGINE_SECTIONS = ("equal", "mixed")
_LINEAR_UNIT = "GFLOP/s"
"""Of what is compared with a product of torch's, not with a peer."""
_QUIET_WIDTH = 0.1
"""Of the 90 % interval of a ratio, relative to it; the median of a run's."""

Record: TypeAlias = dict[str, Any]
"""A line of `benchmarks/results/*-engine.jsonl`."""


def read_records(folder: Path) -> list[Record]:
    """All findings that name their class of processor, in the order of their files. Raises OSError, ValueError."""
    lines = [line for file in sorted(folder.glob("*-engine.jsonl")) for line in file.read_bytes().splitlines()]
    return [record for record in map(orjson.loads, lines) if "class" in record]


def shown(records: Iterable[Record]) -> list[Record]:
    """Those of the runs that the page shows."""
    runs: dict[tuple[str, ...], dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        key = tuple(record[name] for name in ("model", "section", "class", "dtype"))
        runs[key][record["session"]].append(record)
    return [record for of_key in runs.values() for record in _choose(list(of_key.values()))]


def _choose(runs: Sequence[list[Record]]) -> list[Record]:
    """`runs`: from the first to the latest."""
    quiet = [run for run in runs if _width(run) <= _QUIET_WIDTH]
    return quiet[-1] if quiet else min(reversed(runs), key=_width)


def _width(run: Iterable[Record]) -> float:
    """0 for a run that has no ratios, so that the latest is shown; infinite for too few rounds."""
    widths = []
    for record in run:
        if record["ratio"]:
            low, high = record["interval"] or (0.0, math.inf)
            widths.append((high - low) / record["ratio"])
    return statistics.median(widths) if widths else 0.0


def render(records: Sequence[Record]) -> str:
    """Markdown below the title."""
    parts = [paragraph(text) for text in _INTRODUCTION]
    found = shown(records)
    if not found:
        return "\n\n".join([*parts, "Not measured."])
    for section, title in _SECTIONS.items():
        of_section = [record for record in found if record["section"] == section]
        of_section.sort(key=lambda record: (record["model"], record["class"], record["dtype"]))
        if of_section:
            parts += [f"### {title}", (_engines if section in _ENGINE_SECTIONS else _servers)(of_section)]
    return "\n\n".join([*parts, "### The runs", _runs(found)])


_INTRODUCTION = (
    "`make bench-engine` writes this section, and only the rows of the machine's class of processor change: AMX, "
    "AVX512-BF16, AVX-512 or AVX2. `MODEL=` takes a model's folder or a shape, of which a random checkpoint is made "
    "(`minilm`, which is the bundled model, `bert-base`, `bert-large`, `modernbert-base`, `qwen3-0.6b`). `SECTIONS=` "
    "takes some of `equal,mixed,clients,starts,memory,deaths`. Models and exports are kept in `.bench`.",
    "The engines take turns in one process on one core with one thread. vecd computes batches in the order of arrival. "
    "Each peer has its texts sorted by length and padded, in its fastest batch size (1 to 32) and export. The ratio is "
    "vecd's speed ÷ the peer's within a round: the median of the rounds, with its 90 % interval. With 64 clients, vecd "
    "serves HTTP, and ONNX Runtime runs in process as text-embeddings-inference uses it: padded batches of 8 texts, a "
    "thread for each core. Memory is the sum of all processes, with shared pages counted once (PSS).",
    "`make bench-cores` adds sections on elastic cores, on the cache of vectors and on the gateway. Its `SECTIONS=` "
    "takes some of `single,busy,after-load,load,cache,gateway`, and `gateway` needs `BASE=`, a checkout of the commit "
    "to compare with. Two servers run side by side and take turns, 15 by default; what has no turn sleeps. `single` "
    "sends one request at a time to an idle machine. It compares vecd with itself at one thread per worker, and with "
    "each peer in process, with a thread for each core and its fastest export; a peer's time has 1.5 ms added, for "
    "HTTP. How many of vecd's batches really had more than one thread stands beside each figure. A calibration comes "
    "first: a busy loop on each core must be as fast as one alone, or the cores were not free. `busy` does the same "
    "while a busy loop of another program takes a core. `after-load` sends one text of 12 tokens at a time, after a "
    "start and after 10 minutes (`ARGS='--minutes N'`) of short texts at random moments beside clients with mixed "
    "lengths. It compares the p50 with the engine in process, with a thread for each core: 1.25 times its time and "
    "0.8 ms are allowed. `load` has 64 clients with short and with mixed texts, then short requests beside bulk. "
    "`cache` compares `--vector-cache` with a server without it, where 90 % of the texts come again and where none "
    "does. `gateway` measures processor time per request with the dummy engine. The targets of these sections are met "
    "when the 90 % interval reaches them.",
    "`make bench-rerank` adds rerank. The model is a cross-encoder in float32: the layers of the bundled model, with a "
    "random head of one label. Queries have 12 tokens. Documents are runs of English words, either of exactly 100 "
    "tokens or log-normal (median 76, sigma 0.8, drawn again outside 20–400; 100 on average), and no two are the same. "
    "Each of 16 clients sends its next request with 32 documents once it has the response. The servers run side by "
    "side and take turns, 5 by default; a peer that has no turn is stopped (SIGSTOP) in the middle of its work, and "
    "goes on with it in its next turn. vecd is never stopped; its clients leave, and begin again with requests of 2 "
    "to 32 documents, which are not counted. A turn lasts from one response to the first one after 5 s. FastAPI with "
    "sentence-transformers' CrossEncoder has the better of two processes with one thread each and one process with "
    "two, which is tried out first. Before that, each peer's logits are compared with vecd's: they must not differ by "
    "more than 0.0001. `SECTIONS=fairness` sends 20 requests/s with one document each, alone, beside a client with "
    "1,000 documents in each request, and beside 32 clients that send the same documents one by one. Then it counts "
    "the pairs that are still computed once a client with 1,000 documents has left.",
    "`make bench-models` adds several models in one server. `PART=` takes some of "
    "`one,memory,fair,peers,trial,budget`, "
    "and `one` needs `AGAINST=`, a checkout of the commit to compare with. The models are copies of the bundled one "
    "under paths of their own, the same with other signs in its vectors, and the cross-encoder of `make bench-rerank`; "
    "`ARGS='--sparse FOLDER'` puts a sparse model in its place. `one` starts a server for each turn, 15 pairs by "
    "default. `memory` is the sum of all processes (PSS) at rest. `fair` sends 20 embeddings/s, alone, beside a client "
    "with 1,000 pairs in each request to the reranker, and beside one with 1,000 texts of the same tokens in each "
    "request to their own model. `peers` sends requests to an embedder and to a reranker at once, in turns to vecd and "
    "to infinity, and compares every response with that of a server of the model alone. So do the trials: `trial` has "
    "60 s each in which the workers of one model are killed each second, in which it is reloaded, and in which it is "
    "unloaded and loaded again, in 6 slices that alternate with quiet ones. `budget` has a budget of memory for two of "
    "three models, and 1,000 requests at once for a model that is not loaded. Loads are counted by the processes that "
    "they start.",
    f"Of several runs on one class, the page shows the latest one whose intervals have a median width of at most "
    f"{_QUIET_WIDTH * 100:g} %, or, where there is none, the one with the narrowest. An asterisk marks figures during "
    f"which other programs used more than {DISTURBING_CORES:g} cores. Every figure is in "
    "[`benchmarks/results`](../benchmarks/results).",
)


def _engines(records: Iterable[Record]) -> str:
    """A line for each work, and a column for each peer."""
    lines: dict[tuple[str, ...], dict[str, Record]] = defaultdict(dict)
    for record in records:
        if record["unit"] != _LINEAR_UNIT:
            lines[*_key(record), "" if record["unit"] == "×" else _figure(record)][record["peer"]] = record
    peers = list(dict.fromkeys(peer for line in lines.values() for peer in line))
    rows = [[*key, *(_ratio(line.get(peer)) for peer in peers)] for key, line in lines.items()]
    return table(["class", "model", "format", "work", "vecd", *(f"÷ {peer}" for peer in peers)], rows)


def _ratio(record: Record | None) -> str:
    """With what is asked of it."""
    if record is None:
        return "–"
    return ratio_cell(record["ratio"], record["interval"]) + (f", {_target(record)}" if record["target"] else "")


def _servers(records: Iterable[Record]) -> str:
    """A line for each figure."""
    columns = ["class", "model", "format", "work", "vecd", "peer", "vecd's speed ÷ peer's", "target"]
    return table(columns, [_server(record) for record in records])


def _server(record: Record) -> list[str]:
    theirs = record["peer_figure"]
    peer = "–" if theirs is None else f"{record['peer']} {readable(theirs)} {record['unit']}"
    return [*_key(record), _figure(record), peer, ratio_cell(record["ratio"], record["interval"]), _target(record)]


def _key(record: Record) -> list[str]:
    star = " *" if record["others_cores"] > DISTURBING_CORES else ""
    return [record["class"], record["model"], record["dtype"], record["work"] + star]


def _figure(record: Record) -> str:
    return f"{readable(record['vecd'])} {record['unit']}"


def _target(record: Record) -> str:
    return f"{record['target']}: {'met' if record['is_met'] else '**missed**'}" if record["target"] else "–"


def _runs(records: Iterable[Record]) -> str:
    """A line for each run of which something is shown."""
    lines: dict[tuple[str, str, str], Record] = {}
    for record in records:
        lines[record["class"], record["session"], record["model"]] = record
    columns = ["class", "measured", "model", "processor", "cores", "vecd", "onnxruntime, openvino, torch", "rounds"]
    return table(columns, [_run(*key, record) for key, record in sorted(lines.items())])


def _run(processor: str, session: str, model: str, record: Record) -> list[str]:
    machine, versions = record["machine"], record["machine"]["packages"]
    packages = ", ".join(str(versions.get(name)) for name in ("onnxruntime", "openvino", "torch"))
    rounds = f"{record['experiment']['rounds']} of {record['experiment']['turn_s']:g} s"
    return [processor, session, model, machine["cpu"], str(machine["cores"]), str(machine["commit"]), packages, rounds]


def update_page(page: Path, records: Sequence[Record]) -> None:
    """Write this section of the page anew, and nothing else of it. Raises OSError."""
    page.write_text(replace_section(page.read_text(), render(records)))


def replace_section(text: str, body: str) -> str:
    """`text` with `body` under the section's title; the section comes before the last one where there is none yet."""
    section = f"## {TITLE}\n\n{body}\n\n"
    found = re.search(rf"^## {re.escape(TITLE)}\n.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found:
        return text[: found.start()] + section + text[found.end() :]
    start = text.rfind("\n## ") + 1
    return text[:start] + section + text[start:] if start else f"{text}\n{section}"
