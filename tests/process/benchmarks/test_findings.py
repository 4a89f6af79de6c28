import re
from pathlib import Path

import orjson

from benchmarks.findings import Finding, Journal
from benchmarks.machine import processor_class
from benchmarks.targets import at_least, at_most

RATE = Finding(
    section="mixed",
    work="mixed",
    dtype="float32",
    unit="tokens/s",
    ours=12345.678,
    peer="onnxruntime float32",
    theirs=11111.111,
    ratio=1.1111111,
    target=at_least(1.05),
    others_cores=0.01,
)


MEMORY = Finding(
    section="memory", work="memory", dtype="bfloat16", unit="MB", ours=91.0, target=at_most(90), others_cores=0.5
)


def test_every_finding_is_a_line_of_the_days_file_at_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "results", "minilm", {"rounds": 5})
    journal.add(RATE)
    journal.add(MEMORY)
    [file] = (tmp_path / "results").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-engine\.jsonl", file.name)
    first, second = map(orjson.loads, file.read_bytes().splitlines())
    assert (first["vecd"], first["peer_figure"], first["ratio"], first["is_met"]) == (12346.0, 11111.0, 1.1111, True)
    assert (first["section"], first["model"], first["class"]) == ("mixed", "minilm", processor_class())
    assert first["session"] == second["session"]
    assert (second["peer"], second["ratio"], second["experiment"]) == (None, None, {"rounds": 5})
