"""`deploy/grafana.json`, `deploy/alerts.yaml` and `docs/metrics.md` speak of the metrics that a running server has.

Every expression is parsed by Prometheus' own grammar. Where `promtool` is on the path (Debian: the package
`prometheus`), it checks the rules, runs their own tests, and lints what the server says.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.shared_servers import DUMMY, shared_server
from tests.system.deploy.test_pages import anchors_of
from vecd.gateway.app.table import ENDPOINTS
from vecd.gateway.request import Endpoint
from vecd.gateway.telemetry.measures import SharedMetrics
from vecd.gateway.telemetry.prometheus import ServedModel, Usage, render_metrics
from vecd.shm.control import ModelIs
from vecd.shm.shared_metrics import STATUSES, SharedMetricsSpec
from vecd.shm.wire import Incarnation

ROOT = Path(__file__).parents[3]
DASHBOARD = json.loads((ROOT / "deploy/grafana.json").read_text())
ALERTS = yaml.safe_load((ROOT / "deploy/alerts.yaml").read_text())
TEI_RULES = yaml.safe_load((ROOT / "deploy/tei-recording-rules.yaml").read_text())["groups"][0]["rules"]
RULES: list[dict[str, Any]] = [rule for group in ALERTS["groups"] for rule in group["rules"]]
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]

OF_PROMETHEUS: dict[str, dict[str, set[str]]] = {"up": {}}
"""What Prometheus itself says of a target."""
OF_A_SCRAPE = {"job", "instance"}
VALUES = {
    "status": set(map(str, STATUSES)),
    "dialect": {endpoint.dialect for endpoint in ENDPOINTS},
    "route": {endpoint.route for endpoint in ENDPOINTS},
}
"""Of labels whose values come one by one, as requests do."""
NOT_ON_THE_DASHBOARD = {
    "vecd_gateway_pid": "says nothing over time; gateways' age is there",
    "vecd_model_files_changed": "is for an alert, and 0 but for minutes",
    "vecd_model_identity_info": "is compared over nodes, and not seen over time",
}
VARIABLES = {"$__rate_interval": "5m", "$job": ".*", "$instance": ".*", "$model": ".*"}


class Selector(NamedTuple):
    name: str
    matchers: tuple[tuple[str, bool, str], ...]
    """Label, whether its value is a regular expression, value."""


Metrics = dict[str, dict[str, set[str]]]
"""Name of the sample → label → values."""


@pytest.fixture(scope="module")
def text() -> str:
    """What a server says, after requests of several kinds."""
    with httpx.Client(base_url=shared_server(*DUMMY).url) as client:
        client.post("/v1/embeddings", json={"input": ["one", "two"]}).raise_for_status()
        client.post("/embed", json={"inputs": "one"}).raise_for_status()
        assert client.post("/v1/embeddings", content=b"{").status_code == 400
        assert client.get("/nowhere").status_code == 404
        client.get("/info").raise_for_status()
        return client.get("/metrics").raise_for_status().text


@pytest.fixture(scope="module")
def text_of_several() -> str:
    """What a gateway says of two models, after a request for one of them."""
    spec = SharedMetricsSpec(num_gateways=1, num_workers=2, num_models=2)
    shared_metrics = SharedMetrics(memoryview(bytearray(spec.nbytes)).cast("q"), spec, 0)
    shared_metrics.note_life(Incarnation(0, 1))
    counting = shared_metrics.of_model("a")
    counting.add_answer(ENDPOINTS.index(Endpoint("/v1/embeddings", "openai")), 200)
    models = [
        ServedModel(name, ModelIs(1, "ready"), {index: "ready"}, {name: f"{name}{'0' * 31};dtype=float32"})
        for index, name in enumerate("ab")
    ]
    usages = {"supervisor": Usage(1, 1.0, 1, 1)}
    return render_metrics(
        shared_metrics, version="1", endpoints=ENDPOINTS, models=models, have_states=True, usages=usages
    ).decode()


@pytest.fixture(scope="module")
def metrics(text: str, text_of_several: str) -> Metrics:
    """Of a server of one model, and of one of several."""
    found: Metrics = {}
    families = (*text_string_to_metric_families(text), *text_string_to_metric_families(text_of_several))
    for family in families:
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
        if not family.samples:
            found.setdefault(family.name, {})
    return found


def family_of(name: str) -> str:
    return re.sub(r"_(bucket|sum|count)$", "", name)


def recorded() -> dict[str, set[str]]:
    """Rules' own names, and their labels."""
    return {rule["record"]: grouping(promql.parse(rule["expr"])) for rule in RULES if "record" in rule}


# --- expressions -----------------------------------------------------------------------------------------------


def expressions() -> list[tuple[str, str, str]]:
    """Where it stands, the expression, what is said of its series."""
    of_panels = [
        (f"{panel['title']} {target['refId']}", target["expr"], target["legendFormat"])
        for panel in PANELS
        for target in panel["targets"]
    ]
    of_rules = [
        (rule.get("alert") or rule["record"], rule["expr"], json.dumps(rule.get("annotations", {}))) for rule in RULES
    ]
    of_marks = [(mark["name"], mark["expr"], mark["textFormat"]) for mark in DASHBOARD["annotations"]["list"]]
    of_tei = [(rule["record"], rule["expr"], "") for rule in TEI_RULES]
    return of_panels + of_rules + of_marks + of_tei


def parsed(expression: str) -> Any:
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression, expression
    return promql.parse(expression)


def nodes(tree: promql.Expr) -> list[Any]:
    found: list[Any] = []
    promql.walk(tree, found.append)
    return found


def selectors(node: Any) -> list[Selector]:
    found = []
    for each in nodes(node):
        if isinstance(each, promql.VectorSelector):
            matchers = tuple(
                (m.name, m.op in (promql.MatchOp.Re, promql.MatchOp.NotRe), m.value) for m in each.matchers.matchers
            )
            assert each.name is not None
            found.append(Selector(each.name, matchers))
    return found


def grouping(node: Any) -> set[str]:
    """Labels by which anything in it is summed up."""
    labels: set[str] = set()
    for each in nodes(node):
        if isinstance(each, promql.AggregateExpr) and each.modifier is not None:
            labels |= set(each.modifier.labels)
    return labels


def labels_of(name: str, metrics: Metrics) -> set[str]:
    known = recorded()
    if name in known:
        return known[name] | OF_A_SCRAPE
    return set({**metrics, **OF_PROMETHEUS}[name]) | OF_A_SCRAPE


@pytest.mark.parametrize(("where", "expression", "words"), expressions(), ids=lambda value: str(value)[:30])
def test_an_expression_is_of_metrics_labels_and_values_that_there_are(metrics, where, expression, words):
    tree = parsed(expression)
    found = selectors(tree)
    assert found, "it is of nothing"
    known: set[str] = set()
    for selector in found:
        assert selector.name in {*metrics, *OF_PROMETHEUS, *recorded()}, selector.name
        known |= labels_of(selector.name, metrics)
        for label, is_pattern, value in selector.matchers:
            assert label in labels_of(selector.name, metrics), f"{selector.name} has no {label}"
            if label in OF_A_SCRAPE:
                continue
            values = VALUES.get(label) or metrics[selector.name][label]
            if is_pattern:
                assert any(re.fullmatch(value, one) for one in values), f"{label}=~{value}"
            else:
                assert value in values, f"{label}={value}"
    assert grouping(tree) <= known
    in_words = set(re.findall(r"\{\{ *(?:\$labels\.)?(\w+) *\}\}", words)) - {"end"}
    is_summed = isinstance(tree, promql.AggregateExpr)
    assert in_words <= (grouping(tree) if is_summed else known)


def test_unsupported_methods_and_versions_are_no_failures_of_the_server():
    """A scanner that sends CONNECT must not wake an operator."""
    counted = set()
    for where, expression, _ in expressions():
        for statuses in selected_statuses(expression):
            if "500" in statuses:
                assert not statuses & {"501", "505"}, where
                counted.add(where.split()[0])
    assert "vecd:requests_failed:share5m" in counted


def test_the_panel_of_errors_has_each_status_of_an_error_once():
    [panel] = [panel for panel in PANELS if panel["title"] == "Errors"]
    shown = [status for target in panel["targets"] for found in selected_statuses(target["expr"]) for status in found]
    assert sorted(shown) == sorted(status for status in VALUES["status"] if status >= "400")


def selected_statuses(expression: str) -> Iterator[set[str]]:
    """Those of each selector in it that has a condition for them."""
    for node in nodes(parsed(expression)):
        if isinstance(node, promql.VectorSelector):
            of_status = [matcher for matcher in node.matchers.matchers if matcher.name == "status"]
            if of_status:
                yield {status for status in VALUES["status"] if all(is_matched(m, status) for m in of_status)}


def is_matched(matcher: Any, value: str) -> bool:
    is_pattern = matcher.op in (promql.MatchOp.Re, promql.MatchOp.NotRe)
    is_equal = bool(re.fullmatch(matcher.value, value)) if is_pattern else matcher.value == value
    return is_equal is (matcher.op in (promql.MatchOp.Re, promql.MatchOp.Equal))


def test_every_metric_is_on_the_dashboard_or_left_out_on_purpose(metrics):
    on_it = {
        family_of(selector.name)
        for panel in PANELS
        for target in panel["targets"]
        for selector in selectors(parsed(target["expr"]))
    }
    there_are = {family_of(name) for name in metrics}
    assert there_are - on_it == set(NOT_ON_THE_DASHBOARD)


# --- the dashboard ---------------------------------------------------------------------------------------------


def test_every_panel_has_an_id_a_place_words_and_a_unit():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in PANELS]
    assert len(set(titles)) == len(titles)
    for panel in PANELS:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
        refs = [target["refId"] for target in panel["targets"]]
        assert refs == sorted(set(refs))
        for target in panel["targets"]:
            assert 'job=~"$job"' in target["expr"], panel["title"]
            assert 'instance=~"$instance"' in target["expr"], panel["title"]


def test_its_variables_are_those_that_are_used():
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) - {"__rate_interval", "__all"}
    assert used == variables == {"DS_PROMETHEUS", "job", "instance", "model"}
    assert DASHBOARD["id"] is None, "it is not of one Grafana"


# --- the rules -------------------------------------------------------------------------------------------------


def test_alerts_are_whole():
    names = [rule["alert"] for rule in RULES if "alert" in rule]
    assert len(set(names)) == len(names) >= 13
    assert len({group["name"] for group in ALERTS["groups"]}) == len(ALERTS["groups"])
    for rule in RULES:
        if "record" in rule:
            assert set(rule) <= {"record", "expr", "labels"}
            continue
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert promql.parse_duration(rule.get("for", "1m")).total_seconds() >= 60
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert "$labels.instance" in rule["annotations"]["summary"]


def test_every_alert_leads_to_what_can_be_done():
    links = {rule["annotations"]["runbook_url"] for rule in RULES if "alert" in rule}
    assert all(link.startswith("docs/troubleshooting.md#") for link in links)
    assert {link.partition("#")[2] for link in links} <= anchors_of(ROOT / "docs/troubleshooting.md")


def test_every_alert_is_tried_both_ways():
    """What is tried is run below, where promtool is."""
    tests = yaml.safe_load((ROOT / "deploy/alerts.test.yaml").read_text())["tests"]
    tried = {(case["alertname"], bool(case["exp_alerts"])) for test in tests for case in test["alert_rule_test"]}
    assert tried == {(rule["alert"], fires) for rule in RULES if "alert" in rule for fires in (True, False)}


def promtool(*arguments: str, stdin: str | None = None) -> str:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not on the path")
    done = subprocess.run(
        [program, *arguments],
        check=False,
        input=stdin,
        capture_output=True,
        text=True,
        cwd=ROOT / "deploy",
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_promtool_accepts_the_rules():
    assert "rules found" in promtool("check", "rules", "alerts.yaml")


def test_each_alert_fires_when_it_should_and_not_when_it_should_not():
    assert "SUCCESS" in promtool("test", "rules", "alerts.test.yaml")


def test_promtool_finds_nothing_wrong_with_the_metrics(text):
    promtool("check", "metrics", stdin=text)


# --- docs/metrics.md -------------------------------------------------------------------------------------------

_ROW = re.compile(r"^\| `(\w+)` \| (\w+) \|([^|]*)\|", re.MULTILINE)


def described(text: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Type and labels of each metric, by name."""
    there_are = {}
    for family in text_string_to_metric_families(text):
        labels = frozenset(label for sample in family.samples for label in sample.labels) - {"le"}
        name = family.name + ("_total" if family.type == "counter" else "")
        there_are[name] = (family.type, labels)
    return there_are


def test_the_page_has_exactly_the_metrics_that_there_are(text, text_of_several):
    page = (ROOT / "docs/metrics.md").read_text()
    written = {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in _ROW.findall(page)}
    there_are, of_several = described(text), described(text_of_several)
    only_of_several = {
        name: each for name, each in of_several.items() if name.startswith("vecd_model_") and name not in there_are
    }
    assert len(only_of_several) == 7
    assert written == there_are | only_of_several


def test_with_several_models_the_label_model_is_the_only_difference(text, text_of_several):
    there_are, of_several = described(text), described(text_of_several)
    for name, (kind, labels) in there_are.items():
        assert of_several[name][0] == kind
        assert of_several[name][1] in (labels, labels | {"model"}), name


def test_a_panel_is_of_the_chosen_models_where_its_metric_has_the_label(text_of_several):
    labelled = {
        name.removesuffix("_total") for name, (_, labels) in described(text_of_several).items() if "model" in labels
    }
    for panel in PANELS:
        for target in panel["targets"]:
            for selector in selectors(parsed(target["expr"])):
                is_chosen = ("model", True, ".*") in selector.matchers
                assert is_chosen == (family_of(selector.name).removesuffix("_total") in labelled), target["expr"]


def test_the_page_names_every_alert_and_no_other():
    page = (ROOT / "docs/metrics.md").read_text()
    assert set(re.findall(r"`(Vecd\w+)`", page)) == {rule["alert"] for rule in RULES if "alert" in rule}
