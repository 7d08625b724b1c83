"""Reports of runs: one HTML page with curves, times, scaling, traces and configuration."""

from __future__ import annotations

from pydtnn.reports.page import render
from pydtnn.reports.runs import Run, read_runs
from pydtnn.reports.traced import Step

__all__ = ["Run", "Step", "read_runs", "render"]
