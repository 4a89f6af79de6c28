"""Embed many files on a Ray cluster: one Ray task per shard runs `vecd embed` on a node (docs/ray.md).

    python ray_shards.py --manifest files.txt --output-dir out --num-shards 400 [-- --model M --output-format parquet …]

The manifest, its files and the output folder are at the same place on every node: a shared filer, or URLs of an
object store. Each node offers {"vecd": 1}, and runs one shard at a time. A task whose node dies runs again on another
one; this program may die, too, and is then run again with the same arguments. Outputs that are complete are skipped, so
a death costs at most the shards under way. Exit code: 0 all outputs are complete, 1 some are left, 2 vecd refuses the
arguments.
"""

import argparse
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time

import ray

NUM_RETRIES = 20
"""Of a shard whose node has died, or that ended with some rows left."""
NUM_REFUSALS, PAUSE_S = 3, 5.0
"""vecd also refuses an output that another run holds: that of a node which dies just now."""


class ShardLeft(Exception):
    """Raised by a task whose shard is not complete, and may be tried again."""


class ShardRefused(Exception):
    """Raised by a task when vecd begins nothing: its arguments or inputs are wrong."""


# 0 CPUs: the node's are vecd's. The resource alone says where a shard may run, and how many at a time.
@ray.remote(  # type: ignore[untyped-decorator]
    num_cpus=0, resources={"vecd": 1}, max_retries=NUM_RETRIES, retry_exceptions=[ShardLeft]
)
def embed_shard(shard: str, arguments: list[str]) -> str:
    """Run one shard to its end, on whatever node has room. The last line of what vecd said."""
    command = shlex.split(os.environ.get("VECD_COMMAND", "")) or [sys.executable, "-P", "-m", "vecd"]
    for attempt in range(NUM_REFUSALS):
        time.sleep(PAUSE_S if attempt else 0)
        ended = subprocess.run(
            [*command, "embed", "--shard", shard, "--quiet", *arguments],
            env={name: value for name, value in os.environ.items() if name != "VECD_COMMAND"},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            # PR_SET_PDEATHSIG: a task that is killed takes its shard along. The next try would find the output locked.
            preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGTERM),
        )
        last_line = (ended.stderr.strip().splitlines() or [""])[-1]
        if ended.returncode != 2:
            break
    if ended.returncode:
        why = f"shard {shard}: vecd embed ended with {ended.returncode}: {last_line}"
        raise ShardRefused(why) if ended.returncode == 2 else ShardLeft(why)
    return last_line


def main() -> int:
    """Returns the exit code."""
    place = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description="Embed the files of a manifest on a Ray cluster.")
    parser.add_argument("--manifest", required=True, help="a file with the path or URL of an input in each line")
    parser.add_argument("--output-dir", required=True, help="folder or URL of the outputs")
    parser.add_argument("--num-shards", type=int, required=True, help="some minutes of one node's work each")
    parser.add_argument("--num-gpus", type=float, default=0, help="of a node (0: Ray hides them from vecd)")
    options = parser.parse_args(sys.argv[1:place])
    arguments = ["--manifest", options.manifest, "--output-dir", options.output_dir, *sys.argv[place + 1 :]]
    ray.init(log_to_driver=False)
    task = embed_shard.options(num_gpus=options.num_gpus)
    waiting = {task.remote(f"{n}/{options.num_shards}", arguments): n for n in range(options.num_shards)}
    exit_code = 0
    while waiting:
        [done], _ = ray.wait(list(waiting), num_returns=1)
        shard = waiting.pop(done)
        try:
            print(f"{shard}/{options.num_shards}: {ray.get(done)}; {len(waiting)} left", flush=True)
        except (ray.exceptions.RayError, ShardLeft, ShardRefused) as error:
            print(str(error).strip().splitlines()[-1], file=sys.stderr, flush=True)
            if isinstance(error, ShardRefused):
                return 2  # the others would be, too
            exit_code = 1
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
