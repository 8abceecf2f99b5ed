"""The `gccomm` command as a module: ``python -m gccomm_launch``."""

import sys

from gccomm_launch.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
