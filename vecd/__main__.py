"""`python -m vecd`, the same as the command `vecd`."""

import sys

from vecd.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
