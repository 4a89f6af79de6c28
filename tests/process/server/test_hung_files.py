"""A file on a network mount that hangs: the supervisor restarts workers and drains all the same."""

import os
import time
from hashlib import sha256
from pathlib import Path

from tests.support.serving import eventually, running_server

# What Python runs first in each process of the server: `os.stat` of the file hangs while there is a file `hang`.
SITECUSTOMIZE = """
import os, time
stat_of_os = os.stat
def stat(path, *arguments, **options):
    while str(path) == {keys!r} and os.access({hang!r}, os.F_OK):
        time.sleep(0.05)
    return stat_of_os(path, *arguments, **options)
os.stat = stat
"""


def test_a_keys_file_that_hangs_stops_neither_restarts_nor_the_drain(tmp_path: Path) -> None:
    keys, hang = tmp_path / "keys.toml", tmp_path / "hang"
    keys.write_text(f'[[keys]]\nname = "first"\nsha256 = "{sha256(b"a-key-of-a-good-length").hexdigest()}"\n')
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE.format(keys=str(keys), hang=str(hang)))
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])}
    with running_server("--engine", "dummy", "--workers", "1", "--keys-file", str(keys), env=env) as server:
        [worker] = server.workers()
        hang.touch()
        time.sleep(3)  # the file is looked at every two seconds
        worker.kill()
        eventually(lambda: [w for w in server.workers() if w.pid != worker.pid] != [], 5)
        message = f"{keys}: the file system has not responded within 10 s"
        eventually(lambda: message in server.stderr, 20)
        time.sleep(3)
        assert server.stderr.count(message) == 1
