"""Reports of runs: one HTML page with curves, times, scaling, traces and configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydtnn.tools.report.page import render
from pydtnn.tools.report.runs import RunView, read_runs
from pydtnn.utils.moved import renamed

__all__ = ["RunView", "read_runs", "render"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = renamed(__name__)
