"""Packages that only some functions require."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def import_optional(module: str, package: str, who: str) -> Any:
    """Import a module of a package that may not be installed.

    Parameters
    ----------
    module : str
        Such as "matplotlib.figure".
    package : str
        Name for pip, or several names with spaces.
    who : str
        First words of the error.

    Raises
    ------
    ImportError
        With the command that installs the package.
    """
    try:
        import_module(module.partition(".")[0])
        return import_module(module)
    except ImportError as error:
        them = "them" if " " in package else "it"
        raise ImportError(
            f"{who} requires {' and '.join(package.split())}; install {them} with: pip install "
            f"{package}"
        ) from error
