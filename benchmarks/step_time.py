"""Whole training steps, ours beside PyTorch's: the program is `benchmarks.cpu.step_time`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    runpy.run_module("benchmarks.cpu.step_time", run_name="__main__")
