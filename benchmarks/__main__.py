"""``python -m benchmarks``."""

import sys

from benchmarks import COMMANDS
from ppe_ddp.cli import main

# Ranks that a command starts import this file under another name.
if __name__ == "__main__":
    sys.exit(main(program="python -m benchmarks", commands=COMMANDS))
