"""What must work on a GPU before anything else can: ``gpu_check.py --only first``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    sys.argv[1:1] = ["--only", "first"]
    runpy.run_module("tests.gpu_check.check", run_name="__main__")
