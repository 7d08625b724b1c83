"""Predicted training on a platform: ``python -m pydtnn.oracle --help`` ranks all strategies."""

from __future__ import annotations

import sys

from pydtnn.perfmodel.oracle.command import main

if __name__ == "__main__":
    sys.exit(main())
