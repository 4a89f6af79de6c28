"""The first lines of every process that the supervisor starts: `python -m vecd.child KIND …`.

Imports nothing of the program before the kind is known, so that the gateway stays without torch and the fork server
without uvloop.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from vecd.base.failures import EXIT_COULD_NOT_START, EXIT_OK, fill_standard_streams


def main(kind: str, *arguments: str) -> int:
    """Become the child of this kind; returns its exit code. Orders come on stdin."""
    match kind, *arguments:
        case "gateway", control_fd:
            from vecd.gateway.main import run
            from vecd.shm.control import Channel

            return run(Channel.from_fd(int(control_fd)))
        case "forkserver", control_fd:
            from vecd.shm.control import Channel
            from vecd.workers.process.fork_server import serve

            return serve(Channel.from_fd(int(control_fd)))
        case "zygote", control_fd:
            from vecd.shm.control import Channel
            from vecd.workers.process.fork_server import serve_zygote as serve_forks

            return serve_forks(Channel.from_fd(int(control_fd)))
        case "fetch" | "convert" | "unpickle", *order, parent_pid, answer_fd:
            return _answer(parent_pid, answer_fd, partial(_ANSWERS[kind], *order))
        case "select", answer_fd:
            from vecd.workers.process.selection_process import serve as select

            return select(sys.stdin, int(answer_fd))
        case "check", answer_fd:
            from vecd.workers.check.run import serve as check

            return check(sys.stdin, int(answer_fd))
        case "tokenize", answer_fd:
            from vecd.launch.config.tokens import serve as tokenize

            return tokenize(sys.stdin, int(answer_fd))
    raise ValueError(f"no kind of child: {kind}, with {len(arguments)} arguments")


def _answer(parent_pid: str, answer_fd: str, write: Callable[[Path], None]) -> int:
    from vecd.model.card import ModelError
    from vecd.workers.process.kernel import die_with_parent

    if not die_with_parent(int(parent_pid)):  # no process would use the rest of a download
        return EXIT_COULD_NOT_START
    answer = Path(f"/proc/self/fd/{answer_fd}")
    try:
        write(answer)
    except ModelError as error:
        answer.write_text(str(error))
        return EXIT_COULD_NOT_START
    return EXIT_OK


def _fetch(model: str, revision: str, answer: Path) -> None:
    from vecd.model import hub

    answer.write_text(str(hub.fetch(model, revision or None)))


def _convert(folder: str, vocab_size: str, answer: Path) -> None:
    from vecd.model import conversion  # takes seconds

    conversion.convert(Path(folder), int(vocab_size), answer)


def _unpickle(pickles: str, _: Path) -> None:
    from vecd.workers.torch.pickles import convert  # takes seconds

    convert(json.loads(pickles))


_ANSWERS: dict[str, Callable[..., None]] = {"fetch": _fetch, "convert": _convert, "unpickle": _unpickle}


if __name__ == "__main__":
    fill_standard_streams()
    sys.exit(main(*sys.argv[1:]))
