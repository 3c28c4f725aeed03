"""``python -m ppe_ddp``."""

import sys

from ppe_ddp.cli import main

# Ranks that a command starts import this file under another name.
if __name__ == "__main__":
    sys.exit(main())
