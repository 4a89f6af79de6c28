"""The first lines of every process that the program starts for itself: `python -m vecd.child KIND CONTROL_FD`.

Imports nothing of the program before the kind is known, so that the gateway stays without torch and the fork server
without uvloop.
"""

import sys

from vecd.base.failures import fill_standard_streams

_JOBS = {
    "fetch": "vecd.model.hub",
    "convert": "vecd.model.conversion",
    "make": "vecd.workers.torch.making",
    "select": "vecd.workers.process.selection_process",
    "check": "vecd.workers.check.run",
    "tokenize": "vecd.launch.config.tokens",
    "render": "vecd.gateway.tokenization.chat_template",
}
"""By kind: the module whose function `work` carries out orders (`vecd.shm.job`)."""


def main(kind: str, control_fd: str) -> int:
    """Become the child of this kind; returns its exit code."""
    from vecd.shm.control import Channel

    channel = Channel.from_fd(int(control_fd))
    match kind:
        case "gateway":
            from vecd.gateway.main import run

            return run(channel)
        case "forkserver" | "zygote":
            from vecd.workers.process.fork_server import serve

            return serve(channel, kind)
    from vecd.shm.job import carry_out

    return carry_out(kind, _JOBS[kind], channel)


if __name__ == "__main__":
    fill_standard_streams()
    sys.exit(main(*sys.argv[1:]))
