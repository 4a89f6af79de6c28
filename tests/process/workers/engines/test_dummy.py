"""The engine without a model: its definition, and what the rest of the server's tests rely on."""

import subprocess
import sys


def test_a_worker_without_a_model_loads_no_torch() -> None:
    code = "import sys, vecd.workers.process.forkserver, vecd.workers.engines.dummy; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
