"""What must work on a GPU before anything else can: the program is `tests.gpu_check.first`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    runpy.run_module("tests.gpu_check.first", run_name="__main__")
