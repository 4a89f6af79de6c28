"""What is missing for spans, before anything starts.

Owns the list of packages that `vecd.gateway.telemetry.span_sender` imports. Imports none of them. Called by
`vecd.launch.config.plan`.
"""

import importlib.util

from vecd.launch.exit_codes import ConfigurationError

_PACKAGES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")


def check_otel(endpoint: str) -> None:
    """Raises ConfigurationError where spans are wanted and cannot be made."""
    if endpoint and not all(map(_is_installed, _PACKAGES)):
        raise ConfigurationError(
            ["--otlp-endpoint: needs OpenTelemetry, which is not installed: pip install 'vecd[otel]'"]
        )


def _is_installed(name: str) -> bool:
    """Imports the packages above `name`; of these, it is `opentelemetry.sdk` and some that are empty."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
