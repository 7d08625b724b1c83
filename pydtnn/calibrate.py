"""Measure the platform of a job and write it to a file: ``python -m pydtnn.calibrate --help``."""

from __future__ import annotations

import sys

from pydtnn.perfmodel.calibration.command import main

if __name__ == "__main__":
    sys.exit(main())
