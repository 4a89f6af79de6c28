"""The first lines of every process that the supervisor starts: `python -m vecd.launch.child KIND …`.

Imports nothing of the program before the kind is known, so that the gateway stays without torch and the fork server
without uvloop.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from vecd.launch.base.exit_codes import EXIT_COULD_NOT_START, EXIT_OK
from vecd.launch.base.standard_streams import fill_standard_streams


def main(kind: str, *arguments: str) -> int:
    """Become the child of this kind; returns its exit code. Orders come on stdin."""
    match kind, *arguments:
        case "gateway", control_fd:
            from vecd.gateway.main import run
            from vecd.shm.control import Channel

            return run(Channel.from_fd(int(control_fd)))
        case "forkserver", control_fd:
            from vecd.shm.control import Channel
            from vecd.workers.process.forkserver import serve

            return serve(Channel.from_fd(int(control_fd)))
        case "zygote", control_fd:
            from vecd.shm.control import Channel
            from vecd.workers.process.zygote import serve as serve_forks

            return serve_forks(Channel.from_fd(int(control_fd)))
        case "fetch", model, revision, parent_pid, answer_fd:
            return _answer(parent_pid, answer_fd, lambda answer: _fetch(model, revision, answer))
        case "convert", folder, vocab_size, parent_pid, answer_fd:
            return _answer(parent_pid, answer_fd, lambda answer: _convert(folder, vocab_size, answer))
        case "unpickle", pickles, parent_pid, answer_fd:
            return _answer(parent_pid, answer_fd, lambda answer: _unpickle(pickles))
        case "pairs", card, max_tokens, parent_pid, answer_fd:
            return _answer(parent_pid, answer_fd, lambda answer: _pairs(card, max_tokens, answer))
        case "select", answer_fd:
            from vecd.workers.process.selection_process import serve as select

            return select(sys.stdin, int(answer_fd))
        case "check", answer_fd:
            from vecd.workers.check.run import serve as check

            return check(sys.stdin, int(answer_fd))
        case "check_tokens", answer_fd:
            from vecd.launch.check.tokens import serve as check_tokens

            return check_tokens(sys.stdin, int(answer_fd))
    raise ValueError(f"no kind of child: {kind}, with {len(arguments)} arguments")


def _answer(parent_pid: str, answer_fd: str, write: Callable[[Path], None]) -> int:
    """Have `write` write to the file behind `answer_fd`, or write one line about why it cannot."""
    from vecd.shm.card import ModelError
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
    """Write the folder of a hub model."""
    from vecd.workers import hub

    answer.write_text(str(hub.fetch(model, revision or None)))


def _convert(folder: str, vocab_size: str, answer: Path) -> None:
    """Write the fast tokenizer of the model in `folder`."""
    from vecd.workers import conversion  # takes seconds

    conversion.convert(Path(folder), int(vocab_size), answer)


def _unpickle(pickles: str) -> None:
    """Make safetensors of pickles."""
    from vecd.workers.engines.torch.pickles import convert  # takes seconds

    convert(json.loads(pickles))


def _pairs(card: str, max_tokens: str, answer: Path) -> None:
    """Write the token ids of the pair by which a reranker is checked."""
    from vecd.launch.config.ordered_pair import write_sequences

    write_sequences(card, max_tokens, answer)


if __name__ == "__main__":
    fill_standard_streams()
    sys.exit(main(*sys.argv[1:]))
