"""Runs that the command line has trained: their folders as objects, and as a table."""

from __future__ import annotations

from pydtnn.runs.run import Run, find_runs, load_run

__all__ = ["Run", "find_runs", "load_run"]
