from collections import Counter
from pathlib import Path

import pytest

from benchmarks import cores
from benchmarks.alone import Experiment, compare, leased_percent, percentile
from benchmarks.crowds import Texts
from benchmarks.findings import Finding, render_line
from benchmarks.requests import read_metrics, response_length
from benchmarks.servers import ServerFailure
from benchmarks.targets import ELASTIC, at_least, reaching
from vecd.client.bench.texts import Lengths

SLOW_AND_FAST = ([4.0, 2.0, 8.0, 4.0, 4.0], [6.0, 2.4, 12.0, 5.2, 4.0])


def test_a_ratio_is_above_1_where_vecd_takes_less_time_or_does_more() -> None:
    ours, theirs = SLOW_AND_FAST
    finding = compare("single", "work", ours, "peer", theirs, ELASTIC[64], {"others_cores": 0.5, "variant": "fused"})
    assert (finding.ours, finding.theirs) == (4.0, 5.2)
    assert finding.ratio == pytest.approx(1.3)
    assert finding.interval == pytest.approx((1.0, 1.5))
    assert finding.is_met  # by its interval
    assert finding.others_cores == 0.5
    assert finding.details == {"variant": "fused", "rounds": {"vecd": ours, "peer": theirs}}
    finding = compare("cache", "work", [10.0], "peer", [2.0], reaching(4.5), {"others_cores": 0.0}, unit="texts/s")
    assert finding.ratio == 5.0
    assert "ratio 5.00, target ≥ 4.5: yes" in render_line(finding), "one round has no interval, and a verdict"


@pytest.mark.parametrize(
    ("interval", "is_met"), [((1.0, 1.3), False), ((1.0, 1.4), True), ((1.5, 2.0), True), (None, False)]
)
def test_a_target_of_an_interval_is_met_where_that_reaches_it(
    interval: tuple[float, float] | None, is_met: bool
) -> None:
    assert reaching(1.4).is_met_by(1.2, interval) is is_met
    assert not at_least(1.4).is_met_by(1.2, interval)


@pytest.mark.parametrize(("percent", "expected"), [(50, 10.0), (95, 19.0), (100, 20.0), (0, 1.0)])
def test_a_percentile_is_at_the_nearest_rank(percent: float, expected: float) -> None:
    assert percentile([float(value) for value in range(20, 0, -1)], percent) == expected


def test_metrics_are_summed_over_their_labels() -> None:
    text = '# TYPE a_total counter\na_total{worker="0"} 2.0\na_total{worker="1"} 3.5\nb 1e3\n\n'
    assert read_metrics(text) == Counter({"a_total": 5.5, "b": 1000.0})


def test_the_share_of_leased_batches_is_of_those_between_two_looks() -> None:
    before = {"vecd_batches_total": 100, "vecd_batches_leased_total": 90}
    after = {"vecd_batches_total": 300, "vecd_batches_leased_total": 92}
    assert leased_percent(before, after) == 1.0
    assert leased_percent(before, before) is None
    assert leased_percent(Counter(vecd_batches_total=1), Counter(vecd_batches_total=3)) is None, "an earlier server"


def test_the_length_of_a_response_is_known_with_its_head() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\nx: y\r\n\r\n"
    assert response_length(head[:-1]) is None
    assert response_length(head + b"body") == len(head) + 12
    assert response_length(b"HTTP/1.1 204 No Content\r\n\r\n") == 27


def test_a_share_of_the_texts_comes_again() -> None:
    texts = Texts(1, Lengths(5), 0.9)
    drawn = texts.draw(5000)
    num_repeated = sum(text in set(texts.repeated) for text in drawn)
    assert num_repeated / len(drawn) == pytest.approx(0.9, abs=0.02)
    texts, others = Texts(1, Lengths(5), 0.0), Texts(2, Lengths(5), 0.0)
    drawn = [*texts.draw(3000), *texts.draw(3000), *others.draw(3000)]
    assert len(set(drawn)) == len(drawn)


def test_a_section_that_fails_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    experiment = Experiment(model=tmp_path, num_rounds=1, turn_s=0.1, flags=(), folder=tmp_path)
    finding = compare("load", "work", [1.0], "peer", [1.0], reaching(1.0), {"others_cores": 0.0})

    def fail(_: Experiment) -> list[Finding]:
        raise ServerFailure("unrecognized arguments: --vector-cache")

    failed: list[str] = []
    assert list(cores.measure(["gateway"], experiment, failed)) == [], "there is no base"
    monkeypatch.setattr(cores, "SECTIONS", {"cache": fail, "load": lambda _: [finding]})
    assert list(cores.measure(["cache", "load"], experiment, failed)) == [finding]
    assert failed == ["gateway", "cache"]
    assert "cache is left out: unrecognized arguments: --vector-cache" in capsys.readouterr().err
