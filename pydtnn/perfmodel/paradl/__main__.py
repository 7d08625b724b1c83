"""Runs `pydtnn.perfmodel.paradl.command`."""

import sys

from pydtnn.perfmodel.paradl.command import main

if __name__ == "__main__":
    sys.exit(main())
