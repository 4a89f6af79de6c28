"""The command line that `vecd install-service` writes."""

import subprocess
from pathlib import Path

from vecd.launch.systemd.install_service import own_program


def test_this_installation():
    """What is on the command line is what runs now."""
    program = own_program()
    assert Path(program[0]).is_absolute()
    version = subprocess.run([*program, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert version.startswith("vecd ")
