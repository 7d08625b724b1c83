"""Reports of runs: one HTML page with curves, times, scaling, configuration and environment."""

from __future__ import annotations

from pydtnn.reports.page import render
from pydtnn.reports.runs import Run, read_runs

__all__ = ["Run", "read_runs", "render"]
