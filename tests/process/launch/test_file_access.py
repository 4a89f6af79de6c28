"""A file that hangs keeps no process from its end. The rest is in tests/unit/launch/test_file_access.py."""

import subprocess
import sys

_HANGING = """
import asyncio, threading
from vecd.launch.files import FileAccess, FilesHang

async def main():
    try:
        await FileAccess().call("/keys", threading.Event().wait, timeout_s=0.1)
    except FilesHang:
        print("hangs", flush=True)

asyncio.run(main())
"""


def test_a_process_ends_though_a_file_hangs() -> None:
    done = subprocess.run([sys.executable, "-c", _HANGING], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "hangs\n"
