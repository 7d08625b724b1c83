"""Runs that the command line has trained: their folders as objects, and as a table."""

from __future__ import annotations

from pydtnn.tools.runs.run import Run, load_run
from pydtnn.training.run_folder import find_runs

__all__ = ["Run", "find_runs", "load_run"]
