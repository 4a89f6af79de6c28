"""What each command says of a word that it does not know."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("srve", "vecd: unknown command 'srve'; did you mean serve?"),
        ("serve --wrokers 2", "vecd: unrecognized arguments: --wrokers; --wrokers: did you mean --workers?"),
        ("check --quik", "vecd check: unrecognized arguments: --quik; --quik: did you mean --quick?"),
        ("embed a.txt --ouput b.npy", "vecd embed: error: unrecognized arguments: --ouput; --ouput: did you mean "
         "--output?"),
        ("reload --prot 8000", "vecd reload: --prot: did you mean --port?"),
    ],
)  # fmt: skip
def test_what_may_have_been_meant(command, says, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "vecd", *command.split()],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert says in done.stderr.splitlines()
