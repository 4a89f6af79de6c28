from typing import Any

from benchmarks import cores, engine, models, rerank
from benchmarks.classes import TITLE, Record, render, replace_section, shown


def make_record(session: str, **others: Any) -> Record:
    machine = {"cpu": "a processor", "cores": 2, "commit": "abc1234", "packages": {"onnxruntime": "1.31.1"}}
    record = {
        "session": session,
        "model": "minilm",
        "class": "AVX2",
        "section": "equal",
        "work": "1 text of 12 tokens",
        "dtype": "float32",
        "unit": "ms",
        "vecd": 5.0,
        "peer": "onnxruntime float32",
        "peer_figure": 5.5,
        "ratio": 1.1,
        "interval": [1.08, 1.12],
        "target": "≥ 0.97",
        "is_met": True,
        "others_cores": 0.0,
        "experiment": {"rounds": 9, "turn_s": 0.5},
        "machine": machine,
    }
    return record | others


def sessions(records: list[Record]) -> set[str]:
    return {record["session"] for record in shown(records)}


def test_a_run_on_one_class_of_processor_does_not_replace_another_ones() -> None:
    records = [make_record("1"), make_record("2", **{"class": "AVX-512"}), make_record("3", **{"class": "AVX-512"})]
    assert sessions(records) == {"1", "3"}


def test_a_run_of_one_section_model_or_format_does_not_replace_another_ones() -> None:
    others = [{"section": "mixed"}, {"model": "bert-base"}, {"dtype": "bfloat16"}]
    records = [make_record("0"), *(make_record(str(number + 1), **other) for number, other in enumerate(others))]
    assert sessions(records) == {"0", "1", "2", "3"}


def test_the_latest_quiet_run_is_shown_however_fast_vecd_was() -> None:
    records = [make_record("1", ratio=2.0, interval=[1.99, 2.01]), make_record("2", ratio=1.0, interval=[0.96, 1.05])]
    assert sessions(records) == {"2"}
    assert sessions([*records, make_record("3", ratio=9.0, interval=[5.0, 12.0])]) == {"2"}


def test_without_a_quiet_run_the_quietest_is_shown() -> None:
    noisy = [make_record(str(number), interval=[1.0, 1.0 + width]) for number, width in ((1, 0.5), (2, 0.3), (3, 0.9))]
    assert sessions(noisy) == {"2"}


def test_a_run_of_too_few_rounds_for_an_interval_is_not_quiet() -> None:
    assert sessions([make_record("1", interval=[1.0, 1.9]), make_record("2", interval=None)]) == {"1"}


def test_of_runs_without_ratios_the_latest_is_shown() -> None:
    records = [make_record(str(number), section="deaths", ratio=None, interval=None) for number in (1, 2)]
    assert sessions(records) == {"2"}


def test_every_figure_has_its_class_beside_it() -> None:
    openvino = make_record("1", peer="openvino float32", ratio=1.3, interval=[1.2, 1.4], target=None, is_met=None)
    missed = make_record("2", **{"class": "AMX"}, is_met=False, others_cores=0.5)
    text = render([make_record("1"), openvino, missed])
    assert "### Equal lengths, one core" in text
    assert "### Mixed lengths" not in text
    assert "| vecd | ÷ onnxruntime float32 | ÷ openvino float32 |" in text
    both = "1.10 (1.08–1.12), ≥ 0.97: met | 1.30 (1.20–1.40)"
    assert f"| AVX2 | minilm | float32 | 1 text of 12 tokens | 5 ms | {both} |" in text
    one = "1.10 (1.08–1.12), ≥ 0.97: **missed** | –"
    assert f"| AMX | minilm | float32 | 1 text of 12 tokens * | 5 ms | {one} |" in text
    assert "| AMX | 2 | minilm | a processor | 2 | abc1234 | 1.31.1, None, None | 9 of 0.5 s |" in text


def test_a_server_has_a_line_for_each_figure() -> None:
    figures = {"section": "memory", "unit": "MB", "vecd": 200.0, "ratio": None, "interval": None}
    text = render([make_record("1", **figures), make_record("1", **figures, peer=None, peer_figure=None, target=None)])
    line = "| AVX2 | minilm | float32 | 1 text of 12 tokens | 200 MB |"
    assert f"{line} onnxruntime float32 5.5 MB | – | ≥ 0.97: met |" in text
    assert f"{line} – | – | – |" in text


def test_a_page_without_a_run_explains_the_command() -> None:
    assert "MODEL=" in render([])
    assert render([]).endswith("Not measured.")


def test_the_section_is_replaced_and_nothing_else() -> None:
    page = "# Page\n\n## First\n\na\n\n## Last\n\nb\n"
    once = replace_section(page, "new | 1")
    assert once == f"# Page\n\n## First\n\na\n\n## {TITLE}\n\nnew | 1\n\n## Last\n\nb\n"
    assert replace_section(once, "new | 1") == once
    assert replace_section(once, "\\2").replace("\\2", "new | 1") == once


def test_every_section_of_each_command_has_a_title() -> None:
    for section in (*engine.SECTIONS, *cores.SECTIONS, *rerank.SECTIONS, *(f"models-{part}" for part in models.PARTS)):
        assert len(render([make_record("1", section=section)])) > len(render([]))
