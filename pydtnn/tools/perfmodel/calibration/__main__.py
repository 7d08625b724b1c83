"""The command ``pydtnn calibrate``."""

from __future__ import annotations

import sys

from pydtnn.tools.perfmodel.calibration.command import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
