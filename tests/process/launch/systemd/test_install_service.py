"""What `vecd install-service` writes, where, and what it refuses to touch."""

import subprocess
from pathlib import Path

from vecd.launch.systemd.placement import own_command


def test_this_installation():
    """What is on the command line is what runs now."""
    command = own_command()
    assert Path(command[0]).is_absolute()
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert version.startswith("vecd ")
