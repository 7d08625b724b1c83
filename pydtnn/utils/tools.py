"""Tools, which attach to the library by entry points of the group "pydtnn.tools"."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from importlib.util import find_spec
from typing import Any

GROUP = "pydtnn.tools"


@cache
def find_tool(name: str, purpose: str = "") -> Any:
    """Return what a package registers in the group under a name.

    Parameters
    ----------
    name : str
    purpose : str, optional
        What needs the tool; without it, the result is None if there is no tool.

    Raises
    ------
    ValueError
        If no package registers the name, or that package is not installed.
    """
    for entry in _entries(name):
        with suppress(ModuleNotFoundError):
            return entry.load()
    if purpose:
        missing = "which are not installed"
        if find_spec("pydtnn.tools") is not None:
            missing = f"among which the installation knows no {name!r}; install pydtnn again"
        raise ValueError(f"{purpose} requires the tools of pydtnn, {missing}")
    return None


def _entries(name: str) -> list[EntryPoint]:
    """Return the entry points of pydtnn, and only without one those of all packages: slower."""
    with suppress(PackageNotFoundError):
        if found := [*distribution("pydtnn").entry_points.select(group=GROUP, name=name)]:
            return found
    return [*entry_points(group=GROUP, name=name)]
