"""What deploy/kserve says of vecd is so. KServe's schemas are not here: the files are compared with the settings, the
routes and the metrics, and the pod of the runtime is one of Kubernetes."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from vecd.gateway.api.registry import ROUTES
from vecd.launch.config.settings import load_settings
from vecd.shm.shared_metrics import Gauge

KSERVE = Path(__file__).parents[3] / "deploy" / "kserve"


def read(name: str) -> Any:
    return yaml.safe_load((KSERVE / f"{name}.yaml").read_text())


def container() -> Any:
    [found] = read("servingruntime")["spec"]["containers"]
    return found


def test_the_runtime_starts_vecd_on_kserve_s_port_and_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert container()["name"] == "kserve-container", "KServe finds it by this name"
    command, *flags = container()["args"]
    assert command == "serve"
    settings = load_settings(flags)
    assert (settings.model, settings.host, settings.port) == ("/mnt/models", "0.0.0.0", 8080)
    assert settings.served_model_name == "{{.Name}}"
    assert settings.dtype != "auto"
    assert [port["containerPort"] for port in container()["ports"]] == [settings.port]
    predictor = read("inferenceservice")["spec"]["predictor"]
    assert predictor["terminationGracePeriodSeconds"] > settings.drain_grace + settings.drain_timeout
    readiness, startup = container()["readinessProbe"], container()["startupProbe"]
    assert readiness["periodSeconds"] * readiness["failureThreshold"] < settings.drain_grace
    assert startup["periodSeconds"] * startup["failureThreshold"] >= settings.start_timeout


def test_probes_ask_the_open_inference_protocol_s_routes() -> None:
    for probe, path in (("startupProbe", "ready"), ("readinessProbe", "ready"), ("livenessProbe", "live")):
        asked = container()[probe]["httpGet"]
        assert asked == {"path": f"/v2/health/{path}", "port": 8080}
        assert "GET" in ROUTES[asked["path"]]
    assert read("servingruntime")["spec"]["annotations"]["prometheus.kserve.io/path"] in ROUTES


def test_the_runtime_s_pod_is_one_of_kubernetes() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    spec = read("servingruntime")["spec"]
    pod = {"containers": spec["containers"], "volumes": spec["volumes"]}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "vecd"}, "spec": pod}
    kubernetes_validate.validate(body, "1.37", strict=True)
    assert {each["name"] for each in container()["volumeMounts"]} == {each["name"] for each in spec["volumes"]}


def test_the_service_is_of_the_runtime_s_format_and_scales_by_the_age_of_the_queue() -> None:
    service, runtime = read("inferenceservice"), read("servingruntime")
    [accepted] = runtime["spec"]["supportedModelFormats"]
    predictor = service["spec"]["predictor"]
    assert predictor["model"]["modelFormat"]["name"] == accepted["name"]
    assert predictor["model"]["protocolVersion"] in runtime["spec"]["protocolVersions"]
    [metric] = predictor["autoScaling"]["metrics"]
    assert metric["type"] == "External"
    query = metric["external"]["metric"]["query"]
    [name] = re.findall(r"(\w+)\{", query)
    assert name in {f"vecd_{gauge.metric}" for gauge in Gauge}
    assert f'"{service["metadata"]["name"]}-predictor-' in query
