"""The list of modules for the fork server."""

import subprocess
import sys


def test_the_supervisor_can_ask_without_loading_anything() -> None:
    modules = "vecd.workers.process.preload, vecd.workers.config"
    code = f"import sys, {modules}; sys.exit(bool({{'torch', 'numpy'}} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
