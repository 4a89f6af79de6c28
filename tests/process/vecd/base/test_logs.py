"""The log's two formats, its limits, and stderr that nobody reads."""

import socket
import subprocess
import sys

from vecd.base.logs import Stderr


def test_a_socket_that_nobody_reads_is_not_waited_for():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stderr = Stderr(ours.fileno())
        line = b"w" * 999 + b"\n"
        for _ in range(1000):
            stderr.write(line)
        assert stderr._kept
        theirs.settimeout(10)
        assert theirs.recv(1 << 16).startswith(line)
        stderr.close()


def test_without_stderr_nothing_is_written_to_whatever_has_its_number(tmp_path):
    """A daemon may be started with the descriptor closed: the next file that is opened gets it."""
    code = (
        "import os, sys\n"
        f"fd = os.open({str(tmp_path / 'other')!r}, os.O_WRONLY | os.O_CREAT)\n"
        "assert fd == 2 and sys.stderr is None\n"
        "import logging\nfrom vecd.base import logs\n"
        "logs.configure('supervisor', 'info', 'text')\nlogging.getLogger('x').error('x')\nlogs.say('x')\n"
    )
    subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", code], check=True, timeout=60)
    assert (tmp_path / "other").read_bytes() == b""


def test_a_log_that_nobody_reads_does_not_keep_a_process_from_ending():
    code = (
        "import logging\nfrom vecd.base import logs\nlogs.configure('x', 'info', 'text')\n"
        "for n in range(3000): logging.getLogger('vecd.access').info('x' * 200)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) as process:
        assert process.wait(60) == 0
