"""What a process of its own shows of `vecd.client.bulk.storage`."""

import subprocess
import sys


def test_what_uses_no_store_does_not_import_fsspec() -> None:
    program = (
        "import sys, vecd.client.bulk.command\n"
        "from vecd.client.bulk import storage\n"
        "storage.is_remote('a'), storage.expand(sys.argv[1])\n"
        "sys.exit('fsspec' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, __file__], check=True, timeout=60)
