"""`python -m vecd.client.ray.start --head …`: `ray start` in the environment of `vecd.client.ray.environment`.

Variables that are set already win, so that each can be changed. `--print` writes the variables instead, as
lines of `export` for `eval` in a shell. Never returns: the process becomes `ray`. Called from the command line.
"""

import os
import shlex
import shutil
import sys
from pathlib import Path

from vecd.client.ray.environment import environment
from vecd.missing import not_installed


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code, if Ray is not started."""
    arguments = sys.argv[1:] if argv is None else argv
    variables = environment()
    if arguments == ["--print"]:
        print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items()))
        return 0
    # Beside this Python first: an environment's programs are not always on the PATH.
    ray = shutil.which("ray", path=str(Path(sys.executable).parent)) or shutil.which("ray")
    if ray is None:
        print(f"vecd.client.ray.start: ray is {not_installed('vecd[ray]')}", file=sys.stderr)
        return 2
    return os.execve(ray, [ray, "start", *arguments], {**variables, **os.environ})


if __name__ == "__main__":
    sys.exit(main())
