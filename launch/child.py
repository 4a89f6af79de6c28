"""The first lines of every process that the supervisor starts: `python -m vecd.launch.child KIND …`.

Imports nothing before the kind is known, so that the gateway stays without torch and the fork server without uvloop.
"""

import sys
from collections.abc import Callable

from vecd.launch.base.exit_codes import EXIT_COULD_NOT_START, EXIT_OK


def gateway(control_fd: str) -> int:
    from vecd.gateway.main import run
    from vecd.shm.control import Channel

    return run(Channel.from_fd(int(control_fd)))


def forkserver(control_fd: str) -> int:
    from vecd.shm.control import Channel
    from vecd.workers.process.forkserver import serve

    return serve(Channel.from_fd(int(control_fd)))


def fetch(model: str, revision: str, answer_fd: str) -> int:
    """Write the folder of a hub model to `answer_fd`, or one line about why there is none."""
    import os

    from vecd.shm.card import ModelError
    from vecd.workers.process.kernel import die_with_parent

    die_with_parent(os.getppid())  # no process would use the rest of a download
    from vecd.workers import hub

    with open(int(answer_fd), "w") as answer:
        try:
            answer.write(str(hub.fetch(model, revision or None)))
        except ModelError as error:
            answer.write(str(error))
            return EXIT_COULD_NOT_START
    return EXIT_OK


def convert(folder: str, vocab_size: str, answer_fd: str) -> int:
    """Write the fast tokenizer of the model in `folder` to `answer_fd`, or one line about why there is none."""
    import os
    from pathlib import Path

    from vecd.shm.card import ModelError
    from vecd.workers.process.kernel import die_with_parent

    die_with_parent(os.getppid())
    from vecd.workers import conversion  # takes seconds

    answer = Path(f"/proc/self/fd/{answer_fd}")
    try:
        conversion.convert(Path(folder), int(vocab_size), answer)
    except ModelError as error:
        answer.write_text(str(error))
        return EXIT_COULD_NOT_START
    return EXIT_OK


def choose(answer_fd: str) -> int:
    """The order comes on stdin."""
    from vecd.workers.process.selection_process import serve

    return serve(sys.stdin, int(answer_fd))


def check(answer_fd: str) -> int:
    """The order comes on stdin."""
    from vecd.workers.check.run import serve

    return serve(sys.stdin, int(answer_fd))


def check_tokens(answer_fd: str) -> int:
    """The order comes on stdin."""
    from vecd.launch.check.tokens import serve

    return serve(sys.stdin, int(answer_fd))


if __name__ == "__main__":
    _, kind, *arguments = sys.argv
    become: dict[str, Callable[..., int]] = {
        "gateway": gateway,
        "forkserver": forkserver,
        "fetch": fetch,
        "convert": convert,
        "choose": choose,
        "check": check,
        "check_tokens": check_tokens,
    }
    sys.exit(become[kind](*arguments))
