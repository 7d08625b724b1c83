"""Names of packages that are imported on first use (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from pydtnn.utils.foreign_names import suggesting_getattr


def lazy_getattr(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package that imports its names when they are used.

    Parameters
    ----------
    package : str
    homes : mapping of str to str
        The module that defines each name.

    Returns
    -------
    callable
        Other names are answered as by `suggesting_getattr`.
    """
    suggest = suggesting_getattr(package)

    def __getattr__(name: str) -> Any:
        if name not in homes:
            return suggest(name)
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__
