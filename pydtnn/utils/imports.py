"""Imports at run time: of packages that may be missing, and of user code in a file."""

from __future__ import annotations

import importlib.util
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from pydtnn.utils.errors import describe
from pydtnn.utils.names import unknown


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


def import_object(where: str, who: str) -> Any:
    """Import an object from a file.

    Parameters
    ----------
    where : str
        ``path/to/file.py:name``.
    who : str
        First word of error messages, such as "model".

    Raises
    ------
    ValueError
        If the file does not exist, cannot be imported, or does not define the name.
    """
    path, colon, name = where.rpartition(":")
    if not colon:
        path, name = where, ""
    if not colon and not Path(path).is_file():
        raise ValueError(f"{who}: expected path/to/file.py:name, got {where}; use {where}:name")
    if not Path(path).is_file():
        raise ValueError(f"{who}: file {path} does not exist; use path/to/file.py:name")
    module_name = f"pydtnn_own_{Path(path).stem}"  # a file called json.py must not hide json
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{who}: {path} is not a Python file; use path/to/file.py:name")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # required by dataclasses
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(
            f"{who}: {path} cannot be imported: line {error.lineno}: {error.msg}"
        ) from error
    except Exception as error:
        raise ValueError(f"{who}: {path} cannot be imported: {describe(error)}") from error
    own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module_name]
    if not colon:
        use = " or ".join(f"{where}:{n}" for n in own or ["name"])
        raise ValueError(f"{who}: expected path/to/file.py:name, got {where}; use {use}")
    if not hasattr(module, name):
        raise ValueError(f"{who}: {unknown(f'name in {path}', name, own)}")
    return getattr(module, name)
