"""``--survive``: a run continues without ranks that have failed.

`pydtnn.cli.run` finds `Survival` by its entry point: without this package no run survives.
"""

from __future__ import annotations

from pydtnn.tools.survival.attempts import Survival

__all__ = ["Survival"]
