"""deploy/helm/vecd renders what Kubernetes and vecd understand, for five sets of values, and refuses values that cannot
work.

Helm itself renders and lints, from a wheel that `make check` installs. Built-in kinds are validated against Kubernetes'
own schemas. HTTPRoute, ScaledObject and PodMonitor have none here: their shape is asserted. `VECD_WRITE_GOLDEN=1`
writes anew what is rendered, the settings of vecd in values.schema.json, and the table of README.md.
"""

import json
import os
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from vecd.base.flags import Rules, kinds_in
from vecd.gateway.api.served import PREFIX
from vecd.gateway.app.table import ROUTES
from vecd.launch.config.models import TABLE, load_models
from vecd.launch.config.settings import SETTINGS, load_settings
from vecd.shm.shared_metrics import Gauge

helm = pytest.importorskip("helm_python.chart", reason="helm-python-sdk is not installed: make check does it")

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy" / "helm" / "vecd"
FOLDER = Path(__file__).parent / "chart"
SETS = sorted(path.stem for path in (FOLDER / "values").glob("*.yaml"))
WRITES = bool(os.environ.get("VECD_WRITE_GOLDEN"))
OF_OTHERS = {"HTTPRoute", "ScaledObject", "PodMonitor"}
"""Kinds whose schemas Kubernetes does not have."""
OF_THE_CHART = {
    "model", "host", "port", "uds", "admin_host", "admin_port", "admin_uds", "tls_cert", "tls_key", "dtype",
    "drain_grace", "drain_timeout", "keys_file", "cache_dir", "config", "ready_fd",
}  # fmt: skip
"""Settings that values of their own decide, or that the probes and the Service need as they are."""
OF_KUBERNETES = {
    "affinity", "authorization", "dataSource", "nodeSelector", "podSecurityContext", "resources", "securityContext",
}  # fmt: skip
"""Objects that are passed on, whose keys Kubernetes knows."""


def render(values: dict[str, Any], name: str = "search", namespace: str = "embedding") -> dict[str, str]:
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        manifests: dict[str, str] = chart.render(values, name=name, namespace=namespace)
    return manifests


@cache
def rendered(name: str) -> str:
    """All manifests of a set of values, as text."""
    values = yaml.safe_load((FOLDER / "values" / f"{name}.yaml").read_text()) or {}
    texts = [text.strip() for path, text in sorted(render(values).items()) if path.endswith(".yaml")]
    return "".join(f"---\n{text.removeprefix('---').strip()}\n" for text in texts if text)


def objects(name: str, kind: str = "") -> list[Any]:
    found = [each for each in yaml.safe_load_all(rendered(name)) if each is not None]
    return [each for each in found if not kind or each["kind"] == kind]


def one(name: str, kind: str) -> Any:
    [found] = objects(name, kind)
    return found


def container(deployment: Any) -> Any:
    [found] = deployment["spec"]["template"]["spec"]["containers"]
    return found


# --- the schema and the README ----------------------------------------------------------------------------------


def schema() -> Any:
    return json.loads((CHART / "values.schema.json").read_text())


def dashed(names: Any) -> Iterator[str]:
    return (name.replace("_", "-") for name in names)


def schema_of(kind: Any, rules: Rules) -> dict[str, Any]:
    """Null is the same as absent, which TOML cannot say otherwise."""
    one, *others = kinds_in(kind)
    if others:
        return {"anyOf": [schema_of(each, rules) for each in (*others, one)]}
    if names := get_args(one):
        return {"type": "string"} | ({"enum": list(names)} if names[1:] else {"const": names[0]})
    if one in (int, float):
        bounds = {"minimum": rules.at_least, "exclusiveMinimum": rules.above, "maximum": rules.at_most}
        finite = {name: bound for name, bound in bounds.items() if abs(bound) < float("inf")}
        return finite | {"type": "integer" if one is int else "number"}
    return {"type": "boolean" if one is bool else "string"}


_OF_TABLES = ("source", "aliases", "prompts", "default-prompt", "yes", "no", "template", "weight")
"""What no flag says."""


def test_the_schema_knows_the_settings_of_vecd() -> None:
    described = {name: schema_of(kind, rules) for name, (kind, rules) in SETTINGS.items()}
    config = {
        name.replace("_", "-"): described[name]
        for name in described
        if name not in {*OF_THE_CHART, "api_key", "api_keys"}
    }
    own = {name.replace("_", "-"): described[name] for name, (_, rules) in SETTINGS.items() if rules.is_per_model}
    found = schema()
    model = found["$defs"]["model"]["properties"]
    of_tables = {name: model[name] for name in _OF_TABLES}
    if WRITES:
        found["$defs"]["config"]["properties"], found["$defs"]["model"]["properties"] = config, of_tables | own
        (CHART / "values.schema.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    found = schema()
    assert found["$defs"]["config"]["properties"] == config, (
        "VECD_WRITE_GOLDEN=1 pytest tests/system/deploy/test_chart.py"
    )
    assert found["$defs"]["model"]["properties"] == of_tables | own
    assert found["$defs"]["model"]["properties"].keys() == {*dashed(TABLE)} - {"model"}


def described_values(part: Any, values: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Of each value that is not an object of the chart's own: its path, its default and its description."""
    while "$ref" in part:
        target: Any = schema()
        for step in part["$ref"].removeprefix("#/").split("/"):
            target = target[step]
        part = target
    if part.get("type") == "object" and "description" not in part:
        assert part["additionalProperties"] is False, path
        assert values.keys() == part["properties"].keys() - ({"global"} if not path else set()), path
        for name in values:
            yield from described_values(part["properties"][name], values[name], f"{path}.{name}".lstrip("."))
    else:
        is_passed_on = path.rpartition(".")[2] in OF_KUBERNETES
        assert is_passed_on or part.get("type") != "object" or "additionalProperties" in part, path
        yield path, json.dumps(values) if values not in ("", {}, []) else "", part["description"]


def test_the_readme_has_every_value() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    rows = []
    for path, default, text in described_values(schema(), values):
        shown = f"`{default}`" if 0 < len(default) <= 40 else "" if not default else "see values.yaml"
        rows.append(f"| `{path}` | {shown} | {text} |")
    table = "\n".join(["| value | default | meaning |", "| --- | --- | --- |", *rows])
    readme = CHART / "README.md"
    before, _, rest = readme.read_text().partition("<!-- values -->\n")
    _, _, after = rest.partition("\n<!-- end of values -->")
    if WRITES:
        readme.write_text(f"{before}<!-- values -->\n{table}\n<!-- end of values -->{after}")
    assert table in readme.read_text(), "VECD_WRITE_GOLDEN=1 pytest tests/system/deploy/test_chart.py"


# --- what is rendered -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETS)
def test_helm_lints_it(name: str) -> None:
    values = yaml.safe_load((FOLDER / "values" / f"{name}.yaml").read_text())
    report = helm.lint(CHART, values, strict=True)
    assert report["errors"] == []
    assert [each for each in report["messages"] if each["severity"] > 1] == []


@pytest.mark.parametrize("name", SETS)
def test_it_is_what_was_rendered_before(name: str) -> None:
    golden = FOLDER / "rendered" / f"{name}.yaml"
    if WRITES:
        golden.write_text(rendered(name))
    assert rendered(name) == golden.read_text()


@pytest.mark.parametrize("name", SETS)
def test_kubernetes_understands_it(name: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    found = objects(name)
    for each in found:
        assert each["metadata"]["namespace"] == "embedding"
        if each["kind"] not in OF_OTHERS:
            kubernetes_validate.validate(each, "1.37", strict=True)
    identities = [(each["kind"], each["metadata"]["name"]) for each in found]
    assert len(set(identities)) == len(identities)


@pytest.mark.parametrize("name", SETS)
def test_vecd_understands_its_settings(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VECD_WRITE_GOLDEN", raising=False)  # is no setting
    text = one(name, "ConfigMap")["data"]["vecd.toml"]
    file = tmp_path / "vecd.toml"
    file.write_text(text)
    for deployment in objects(name, "Deployment"):
        command, flag, path, *flags = container(deployment)["args"]
        assert (command, flag, path) == ("serve", "--config", "/etc/vecd/vecd.toml")
        settings = load_settings([flag, str(file), *flags])
        assert (settings.host, settings.port) == ("0.0.0.0", 8080)
        entries = load_models(settings)
        spec = deployment["spec"]["template"]["spec"]
        assert spec["terminationGracePeriodSeconds"] > settings.drain_grace + settings.drain_timeout
        readiness = container(deployment)["readinessProbe"]
        assert readiness["periodSeconds"] * readiness["failureThreshold"] < settings.drain_grace
        startup = container(deployment)["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= settings.start_timeout
        if name == "models":
            assert [entry.name for entry in entries] == ["embed", "org/rerank"]
            assert (entries[0].prompts, entries[0].default_prompt) == ((("query", 'query: "<'),), "query")
            assert entries[1].settings.load == "demand"
            assert settings.keys_file == Path("/etc/vecd-keys/keys.toml")


def test_without_values_it_is_what_deploy_kubernetes_has() -> None:
    """Two ways to install one thing."""
    theirs = yaml.safe_load((ROOT / "deploy/kubernetes/deployment.yaml").read_text())["spec"]
    ours = one("minimal", "Deployment")["spec"]
    assert ours["strategy"] == theirs["strategy"]
    ours, theirs = ours["template"]["spec"], theirs["template"]["spec"]
    for key in (
        "automountServiceAccountToken",
        "enableServiceLinks",
        "securityContext",
        "terminationGracePeriodSeconds",
    ):
        assert ours[key] == theirs[key], key
    [our_container], [their_container] = ours["containers"], theirs["containers"]
    for key in ("image", "ports", "resources", "startupProbe", "readinessProbe", "livenessProbe", "securityContext"):
        assert our_container[key] == their_container[key], key
    mounts, volumes = their_container["volumeMounts"], theirs["volumes"]
    assert our_container["volumeMounts"] == [each for each in mounts if each["name"] != "keys"]
    assert [each["name"] for each in ours["volumes"]] == [each["name"] for each in volumes if each["name"] != "keys"]
    config = yaml.safe_load((ROOT / "deploy/kubernetes/configmap.yaml").read_text())["data"]["vecd.toml"]
    assert tomllib.loads(one("minimal", "ConfigMap")["data"]["vecd.toml"]) == tomllib.loads(config)
    hpa = yaml.safe_load((ROOT / "deploy/kubernetes/horizontalpodautoscaler.yaml").read_text())["spec"]
    [ours] = [each for each in objects("pools", "HorizontalPodAutoscaler") if each["metadata"]["name"] == "embed-amd"]
    assert {**ours["spec"], "scaleTargetRef": None} == {**hpa, "scaleTargetRef": None}


@pytest.mark.parametrize("name", SETS)
def test_what_selects_pods_selects_all_of_them_and_a_deployment_its_own(name: str) -> None:
    deployments = objects(name, "Deployment")
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in deployments]
    selectors = [
        one(name, "Service")["spec"]["selector"],
        one(name, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
    ]
    selectors += [each["spec"]["podSelector"]["matchLabels"] for each in objects(name, "NetworkPolicy")]
    selectors += [each["spec"]["selector"]["matchLabels"] for each in objects(name, "PodMonitor")]
    for deployment in deployments:
        spread = deployment["spec"]["template"]["spec"].get("topologySpreadConstraints", [])
        selectors += [each["labelSelector"]["matchLabels"] for each in spread]
        own = deployment["spec"]["selector"]["matchLabels"].items()
        assert [own <= each.items() for each in labels].count(True) == 1
    assert all(selector.items() <= each.items() for selector in selectors for each in labels)


SCALED = {"enabled": True, "keda": {"serverAddress": "http://prometheus"}}


def test_names_that_yaml_takes_for_something_else_are_text() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    pool = {"persistence": {"enabled": True}, "autoscaling": SCALED}
    values = {
        "pools": dict.fromkeys(("on", "null", "100", "1e5"), pool),
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]},
        "podMonitor": {"enabled": True},
        "weights": {"claim": {"size": "1Gi"}},
        "fullnameOverride": "1e3",
        "nameOverride": "off",
    }  # fmt: skip
    found = [
        each
        for path, text in render(values, "123", "100").items()
        if path.endswith(".yaml")
        for each in yaml.safe_load_all(text)
        if each is not None
    ]
    assert {each["kind"] for each in found} >= {"Deployment", "ScaledObject", "HTTPRoute", "PersistentVolumeClaim"}
    for each in found:
        metadata = each["metadata"]
        assert all(isinstance(text, str) for text in (metadata["name"], *metadata["labels"].values())), metadata
        assert metadata["namespace"] == "100"
        if each["kind"] not in OF_OTHERS:
            kubernetes_validate.validate(each, "1.37", strict=True)


@pytest.mark.parametrize("pool", ["a", "large-and-small"])
def test_keda_finds_the_pods_of_a_long_name(pool: str) -> None:
    """Kubernetes cuts the name of a ReplicaSet at 58 characters with its dash, and appends five to it."""
    values = {"fullnameOverride": "f" * 60, "pools": {pool: {"autoscaling": SCALED}}}
    manifests = render(values)
    name = yaml.safe_load(manifests["vecd/templates/deployment.yaml"])["metadata"]["name"]
    assert name.endswith(f"-{pool}")
    scaled = yaml.safe_load(manifests["vecd/templates/autoscaling.yaml"])
    [pods] = re.findall(r'pod=~"([^"]*)"', scaled["spec"]["triggers"][0]["metadata"]["query"])
    assert re.fullmatch(pods, f"{name}-6d4cf56db6-"[:58] + "x2x9z")


def test_the_notes_warn_of_what_may_mix_or_lose() -> None:
    notes = render({})["vecd/templates/NOTES.txt"]
    assert "dtype is auto" in notes
    assert "Set httpRoute" in notes
    route = {"enabled": True, "parentRefs": [{"name": "public"}]}
    notes = render({"dtype": "float32", "httpRoute": route})["vecd/templates/NOTES.txt"]
    assert "dtype is auto" not in notes
    assert "Set httpRoute" not in notes
    assert "http://search-vecd.embedding:80/v1" in notes
    assert "Set config.trusted-proxies" in notes
    for values in ({}, {"httpRoute": route, "config": {"trusted-proxies": "10.0.0.0/8"}}):
        assert "Set config.trusted-proxies" not in render(values)["vecd/templates/NOTES.txt"]


# --- objects whose schemas Kubernetes does not have: what `rendered` does not show -------------------------------


def test_the_route_repeats_and_passes_on_what_is_not_about_one_pod() -> None:
    [rule] = one("scaled", "HTTPRoute")["spec"]["rules"]
    service = one("scaled", "Service")
    assert rule["backendRefs"] == [{"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}]
    assert {match["path"]["type"] for match in rule["matches"]} == {"PathPrefix"}
    passed = {match["path"]["value"] for match in rule["matches"]}
    assert len(rule["matches"]) <= 64, "the Gateway API's limit"
    for path, methods in ROUTES.items():
        first = "/" + path.split("/")[1]
        is_own = first in ("/", "/docs", "/live", "/ping") or {route.scope for route in methods.values()} & {
            "metrics",
            "admin",
        }
        assert (first in passed) is not bool(is_own), path
    assert PREFIX.rstrip("/") in passed


def test_keda_scales_by_the_mean_age_of_a_pool_s_queue() -> None:
    promql_parser = pytest.importorskip("promql_parser")
    name, spec = one("scaled", "Deployment")["metadata"]["name"], one("scaled", "ScaledObject")["spec"]
    assert spec["scaleTargetRef"]["name"] == name
    [trigger] = spec["triggers"]
    assert all(isinstance(value, str) for value in trigger["metadata"].values()), "KEDA takes strings"
    query = trigger["metadata"]["query"]
    assert isinstance(promql_parser.parse(query), promql_parser.AggregateExpr)
    [metric] = re.findall(r"(\w+)\{", query)
    assert metric in {f"vecd_{gauge.metric}" for gauge in Gauge}
    [pods] = re.findall(r'pod=~"([^"]*)"', query)
    assert re.fullmatch(pods, f"{name}-6d4cf56db6-x2x9z")
    assert not re.fullmatch(pods, f"{name}-pool-6d4cf56db6-x2x9z"), "another pool's"


# --- what is refused --------------------------------------------------------------------------------------------

TWO_POOLS: dict[str, Any] = {"a": {}, "b": {}}
REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"replicas": 3}, ["replicas"]),
    ({"image": {"repo": "x"}}, ["/image", "repo"]),
    ({"pools": {"a": {"replicas": 3}}}, ["/pools/a", "replicas"]),
    ({"pools": {"a": {"model": "x"}}}, ["/pools/a", "model"]),
    ({"pools": {"A_": {}}}, ["propertyName", "A_"]),
    ({"models": {"m": {"sauce": "x"}}}, ["/models/m", "sauce"]),
    ({"config": {"max-waits": 3}}, ["/config", "max-waits"]),
    ({"config": {"max-wait": "long"}}, ["/config/max-wait", "number"]),
    ({"config": {"dtype": "float32"}}, ["/config", "dtype"]),
    ({"autoscaling": {"targetCPUUtilizationPercentage": 80}}, ["/autoscaling", "targetCPUUtilizationPercentage"]),
    ({"autoscaling": {"hpa": {"metric": "Resource"}}}, ["/autoscaling/hpa/metric"]),
    ({"autoscaling": {"type": "cpu"}}, ["/autoscaling/type"]),
    ({"autoscaling": {"enabled": True}}, ["autoscaling.keda.serverAddress"]),
    ({"autoscaling": {"minReplicas": 9}}, ["autoscaling.minReplicas"]),
    ({"dtype": "fp16"}, ["/dtype"]),
    ({"dtype": "auto", "pools": TWO_POOLS}, ["pools.a.dtype: auto"]),
    ({"dtype": "int8", "pools": TWO_POOLS}, ["pools.a.dtype: int8"]),
    ({"pools": {"a": {}, "b": {"dtype": "bfloat16"}}}, ["pools.a.dtype: float32", "pools.b.dtype: bfloat16"]),
    ({"pools": TWO_POOLS, "models": {"m": {"dtype": "auto"}}}, ["models.m.dtype"]),
    ({"pools": TWO_POOLS, "models": {"m": {}, "n": {"dtype": "int8"}}}, ["models.n.dtype"]),
    ({"pools": {"a": {}, "b": {"extraArgs": ["--dtype=int8"]}}}, ["pools.b.extraArgs", "--dtype"]),
    ({"extraArgs": ["--port", "9000"]}, ["extraArgs", "--port"]),
    ({"env": [{"name": "VECD_DTYPE", "value": "int8"}]}, ["env", "VECD_DTYPE"]),
    ({"envVars": {"VECD_PORT": "1"}}, ["env", "VECD_PORT"]),
    ({"model": "x", "models": {"m": {}}}, ["model: has no effect"]),
    ({"weights": {"existingClaim": "a", "image": "b"}}, ["weights: only one"]),
    ({"drain": {"graceSeconds": 8}}, ["drain.graceSeconds: is 8, at least 9"]),
    ({"probes": {"readiness": {"failureThreshold": 3}}}, ["drain.graceSeconds: is 10, at least 11"]),
    ({"config": {"start-timeout": 301}}, ["probes.startup", "301"]),
    ({"httpRoute": {"enabled": True}}, ["httpRoute.parentRefs"]),
    ({"podMonitor": {"enabled": True}, "existingSecret": "keys"}, ["podMonitor.authorization"]),
]  # fmt: skip


@pytest.mark.parametrize(("values", "words"), REFUSED, ids=lambda each: json.dumps(each)[:60])
def test_values_that_cannot_work_are_refused_by_name(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(Exception, match=".*".join(map(re.escape, words))) as refused:
        render(values)
    assert type(refused.value).__module__ == "helm_python.errors"


def test_all_that_only_the_chart_decides_is_refused_in_arguments_and_variables() -> None:
    """Those of the server's sockets and of what values decide; `model` is an argument without a flag."""
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    expected = OF_THE_CHART - {"model", "ready_fd"}
    assert {each.replace("-", "_") for each in re.findall(r'"--([\w-]+)"', helpers)} == expected
    assert {each.lower() for each in re.findall(r'"VECD_(\w+)"', helpers)} == expected
