"""What a user has written, on the command line: ``path/to/file.py:name``."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydtnn.utils.errors import describe
from pydtnn.utils.suggest import unknown


def is_own(name: str) -> bool:
    """Whether something is asked for from a file, be it without its name."""
    return ":" in name or name.endswith(".py")


def import_object(where: str, who: str) -> Any:
    """Import ``path/to/file.py:name``.

    Parameters
    ----------
    where : str
    who : str
        Begins the sentence of an error: "--model".

    Raises
    ------
    ValueError
        If there is no such file, it cannot be imported, or it has no such name.
    """
    path, colon, name = where.rpartition(":")
    if not colon:
        raise ValueError(f"{who}: {where} needs the name of what is in it; give {where}:name")
    if not Path(path).is_file():
        raise ValueError(f"{who}: there is no file {path}; give path/to/file.py:name")
    module_name = f"pydtnn_own_{Path(path).stem}"  # a file called json.py must not hide json
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{who}: {path} is not a Python file; give path/to/file.py:name")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(
            f"{who}: {path} cannot be imported: line {error.lineno}: {error.msg}"
        ) from error
    except Exception as error:
        raise ValueError(f"{who}: {path} cannot be imported: {describe(error)}") from error
    if not hasattr(module, name):
        own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module_name]
        raise ValueError(f"{who}: {unknown(f'name in {path}', name, own)}")
    return getattr(module, name)


def import_class(where: str, who: str, kind: type) -> Any:
    """Import ``path/to/file.py:Class``, which must be a subclass of `kind`.

    Raises
    ------
    ValueError
        Also where `import_object` does.
    """
    found = import_object(where, who)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ValueError(f"{who}: {where} must be a subclass of {kind.__name__}, not {found!r}")
    return found


@contextlib.contextmanager
def naming_options(
    who: str, given: Mapping[str, Any], elsewhere: Mapping[str, str]
) -> Iterator[None]:
    """Refuse options that are set elsewhere, and say whose they are where a factory fails on them.

    Parameters
    ----------
    who : str
        The option of the command line that holds them.
    given : mapping
    elsewhere : mapping of str to str
        What sets an option that does not belong here.
    """
    for name in elsewhere:
        if name in given:
            raise ValueError(f"{who}: {name} is not set here but by {elsewhere[name]}")
    try:
        yield
    except TypeError as error:  # of Python itself, as a rule: "'int' object is not iterable"
        if not given:
            raise
        raise TypeError(f"{who} {json.dumps(dict(given), default=str)}: {error}") from error
