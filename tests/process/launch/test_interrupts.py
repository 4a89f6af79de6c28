"""SIGINT while the `vecd` command is imported."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

_PYPROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
_MODULE, _, _FUNCTION = _PYPROJECT["project"]["scripts"]["vecd"].partition(":")
_STARTS = {
    "console script": f"from {_MODULE} import {_FUNCTION}; sys.exit({_FUNCTION}())",
    "python -m vecd": "import runpy; runpy.run_module('vecd', run_name='__main__', alter_sys=True)",
}
_INTERRUPTED_IMPORT = """
import signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[-1]:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
"""
_INTERRUPTED_COMMAND = """
import signal, sys
from vecd.launch.config import keys

keys.main = lambda arguments: signal.raise_signal(signal.SIGINT)
from vecd.__main__ import main
print(main())
"""


def run(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("start", _STARTS)
@pytest.mark.parametrize("module", ["vecd.launch", "vecd.supervisor"])
def test_ctrl_c_while_a_module_is_imported(module, start):
    done = run(_INTERRUPTED_IMPORT + _STARTS[start], "serve", "--log-format", module)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_subcommand_handles_ctrl_c_itself():
    """As Python does, unless it has a handler of its own."""
    assert run(_INTERRUPTED_COMMAND, "key").stdout == "130\n"
