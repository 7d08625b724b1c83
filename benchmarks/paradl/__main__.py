"""Runs `benchmarks.paradl.command`."""

import sys

from benchmarks.paradl.command import main

if __name__ == "__main__":
    sys.exit(main())
