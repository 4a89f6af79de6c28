"""Runs a check on inputs that atheris makes up, guided by which lines they reach, for a number of seconds.

Not part of `make test`: atheris is none of the project's dependencies. In an environment that has it, and orjson and
httptools, and from the project's folder:

    PYTHONPATH=. python tests/system/fuzz/fuzz_json_pieces.py 300
    PYTHONPATH=. python tests/system/fuzz/fuzz_http1.py 300

A finding ends the run with a traceback and a nonzero exit code, and prints the input.
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import atheris  # type: ignore[import-untyped, import-not-found, unused-ignore]


def fuzz(check: Callable[[bytes], None], seeds: Sequence[bytes], words: Sequence[bytes], max_bytes: int) -> None:
    """Run `check`, which raises what it finds, for as many seconds as the first argument says (60).

    `seeds`: inputs to begin with. `words`: what is put into others. `max_bytes`: of the longest input.
    """
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    with tempfile.TemporaryDirectory(prefix="vecd-fuzz-") as name:
        corpus = Path(name) / "corpus"
        corpus.mkdir()
        for index, seed in enumerate(seeds):
            (corpus / str(index)).write_bytes(seed)
        dictionary = Path(name) / "words"
        dictionary.write_text("".join(f'"{_escaped(word)}"\n' for word in words))
        flags = [f"-max_total_time={seconds}", f"-max_len={max_bytes}", f"-dict={dictionary}", "-print_final_stats=1"]
        atheris.Setup([sys.argv[0], *flags, "-timeout=30", f"-artifact_prefix={name}/", str(corpus)], check)
        atheris.Fuzz()


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)
