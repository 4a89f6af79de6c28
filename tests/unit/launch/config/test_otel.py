"""Spans that are wanted and cannot be made."""

import sys

import pytest

from vecd.launch.base.exit_codes import ConfigurationError
from vecd.launch.config.plan import check_otel
from vecd.launch.config.settings import load_settings

MISSING = ["opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"]


def test_all_is_well_where_nobody_wants_any(monkeypatch):
    monkeypatch.setitem(sys.modules, MISSING[0], None)
    check_otel("")


def test_all_is_well_where_the_packages_are_there():
    check_otel("http://localhost:4318")


@pytest.mark.parametrize("name", [*MISSING, "opentelemetry.sdk", "opentelemetry.exporter"])
def test_what_is_missing_is_told_before_anything_starts(name, monkeypatch):
    for module in [module for module in sys.modules if module.startswith(name)]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigurationError, match=r"--otlp-endpoint: .*pip install 'vecd\[otel\]'"):
        check_otel("http://localhost:4318")


@pytest.mark.parametrize(
    "url", ["http://localhost:4318", "https://collector.example/otlp", "http://[::1]:4318/v1/traces"]
)
def test_a_collector_s_url(url):
    assert load_settings(["--otlp-endpoint", url]).otlp_endpoint == url


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("localhost:4318", "is not the URL of a collector"),
        ("grpc://localhost:4317", "is not the URL of a collector"),
        ("http://", "is not the URL of a collector"),
        ("http://localhost:port", "is not the URL of a collector"),
        ("http://localhost:70000", "is not the URL of a collector"),
        ("http://localhost:4318/?a=b", "is not the URL of a collector"),
        ("http://me:secret@localhost:4318", "must not have a password in it"),
    ],
)
def test_what_is_none(url, problem):
    with pytest.raises(ConfigurationError, match=problem) as raised:
        load_settings(["--otlp-endpoint", url])
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("ratio", ["-0.1", "1.5", "nan"])
def test_a_ratio_is_between_0_and_1(ratio):
    with pytest.raises(ConfigurationError, match="--trace-ratio"):
        load_settings(["--trace-ratio", ratio])
