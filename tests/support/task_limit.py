"""A cgroup with a limit on tasks, where this machine lets one be made. The limit of a user does not hold for root."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from tests.support.serving import eventually


@contextmanager
def task_cgroup() -> Iterator[Path | None]:
    """Its folder; None where none can be made."""
    for root in (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")):
        folder = root / f"vecd-test-{uuid4().hex}"
        with suppress(OSError):
            folder.mkdir()
            if (folder / "pids.max").exists() and os.access(folder / "cgroup.procs", os.W_OK):
                break
            folder.rmdir()
    else:
        yield None
        return
    yield folder
    eventually(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


def limited(cgroup: Path, num_tasks: int) -> tuple[str, ...]:
    """The command that runs another one within the limit."""
    (cgroup / "pids.max").write_text(str(num_tasks))
    return "sh", "-c", f'echo $$ > {cgroup}/cgroup.procs; exec "$0" "$@"'
