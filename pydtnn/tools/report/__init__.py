"""Reports of runs: one HTML page with curves, times, scaling, traces and configuration."""

from __future__ import annotations

from pydtnn.tools.report.page import render
from pydtnn.tools.report.runs import Run, Step, read_runs

__all__ = ["Run", "Step", "read_runs", "render"]
