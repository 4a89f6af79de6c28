"""schemathesis finds nothing: what it makes of openapi.json is answered as that says.

It is none of the project's dependencies: skipped where it is not installed, beside this Python or on the path.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Server, running_server

DOCUMENT = Path(__file__).with_name("openapi.json")
TIMEOUT_S = 200.0
# A schema cannot say what else is ignored: unknown fields and headers are.
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance"
CHECKS += ",response_schema_conformance,positive_data_acceptance,unsupported_method,allow_header_conformance"


def schemathesis() -> str | None:
    beside = Path(sys.executable).parent / "schemathesis"
    return str(beside) if beside.exists() else shutil.which("schemathesis")


@pytest.fixture(scope="module")
def weightless() -> Iterator[Server]:
    with running_server("--engine", "weightless", "--workers", "1", "--max-inputs", "4") as server:
        yield server


@pytest.mark.skipif(schemathesis() is None, reason="schemathesis is not installed")
def test_every_route_answers_as_the_document_says(weightless, tmp_path):
    program = schemathesis()
    assert program is not None
    run = subprocess.run(
        [program, "run", str(DOCUMENT), "--url", weightless.url, "--checks", CHECKS, "--max-examples", "20",
         "--generation-deterministic", "--no-color", "--continue-on-failure"],
        cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Tested: 7" in run.stdout
