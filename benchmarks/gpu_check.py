"""Every promise for one GPU, checked in one call: the program is `tests.gpu_check.check`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    runpy.run_module("tests.gpu_check.check", run_name="__main__")
