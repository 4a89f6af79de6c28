"""Model folders, read and refused. No test loads a weight: the files are there, and empty."""

import subprocess
import sys


def test_reading_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, vecd.shm.card; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
