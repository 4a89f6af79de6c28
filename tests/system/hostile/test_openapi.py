"""schemathesis finds nothing: what it makes of /openapi.json is answered as that says."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.serving import Server, running_server
from tests.support.soak.form import only_long

TIMEOUT_S = 200.0
# Not "negative_data_rejection": unknown fields and headers are ignored, null is absent, and a schema cannot say so.
# Not "positive_data_acceptance": nor which fields contradict each other.
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance"
CHECKS += ",response_schema_conformance,unsupported_method,allow_header_conformance"


@pytest.fixture(scope="module")
def dummy() -> Iterator[Server]:
    with running_server("--engine", "dummy", "--workers", "1", "--max-inputs", "4") as server:
        yield server


@only_long
def test_every_route_answers_as_the_document_says(dummy, tmp_path):
    document = httpx.get(f"{dummy.url}/openapi.json", timeout=10).raise_for_status()
    path = tmp_path / "openapi.json"
    path.write_bytes(document.content)
    num_operations = sum(method != "parameters" for item in document.json()["paths"].values() for method in item)
    run = subprocess.run(
        [str(Path(sys.executable).parent / "schemathesis"), "run", str(path), "--url", dummy.url,
         "--checks", CHECKS, "--max-examples", "5", "--generation-deterministic", "--no-color",
         # Else it asks for an answer within a millisecond, and is told truly that there is none.
         "--header", "x-vecd-timeout-ms: 60000", "--continue-on-failure"],
        cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"Tested: {num_operations}" in run.stdout
