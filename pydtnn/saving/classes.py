"""Classes of layers by name. Loading a model imports nothing: others must be passed."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydtnn import layers
from pydtnn.layers import Block, Layer
from pydtnn.utils.suggest import unknown


def library() -> dict[str, type]:
    """Return the library's layers and blocks by name, without their names in other libraries."""
    return {
        name: kind
        for name in layers.__all__
        if isinstance(kind := getattr(layers, name), type)
        and issubclass(kind, Layer | Block)
        and kind.__name__ == name
        and not inspect.isabstract(kind)
    }


def name_of(kind: type) -> str:
    """Return the name of a class of the library, ``module:Class`` or ``file.py:Class``.

    Files are those of scripts, relative to the current folder if they are in it.
    """
    if library().get(kind.__name__) is kind:
        return kind.__name__
    module = sys.modules.get(kind.__module__)
    where = kind.__module__
    spec = getattr(module, "__spec__", None)
    # the script that is executed, and files that were imported by path
    if spec is None or where == "__main__" or where.startswith("pydtnn_own_"):
        path = Path(getattr(module, "__file__", None) or where)
        here = Path.cwd()
        where = str(path.relative_to(here)) if path.is_relative_to(here) else path.name
    return f"{where}:{kind.__qualname__}"


def class_of(name: Any, where: str, custom: Mapping[str, type]) -> type:
    """Return the class of a name: one of the library, or one of `custom`.

    Parameters
    ----------
    name : str
        As returned by `name_of`.
    where : str
        First words of error messages.
    custom : mapping of str to type
        Classes by name, with or without ``module:``.

    Raises
    ------
    ValueError
        If it is neither.
    TypeError
        If the class is no layer.
    """
    if not isinstance(name, str):
        raise ValueError(f"{where}: its class must be a name")
    short = name.rpartition(":")[2].rpartition(".")[2]
    if ":" not in name:
        known = library()
        if name not in known:
            raise ValueError(f"{where}: {unknown('layer', name, known)}")
        return known[name]
    kind = custom.get(name, custom.get(short))
    if kind is None:
        raise ValueError(
            f"{where}: {short} is not a layer of the library but {name}, which is not imported "
            f"from there; import it yourself and pass custom={{{short!r}: {short}}}"
        )
    if not isinstance(kind, type) or not issubclass(kind, Layer | Block):
        raise TypeError(f"{where}: custom[{short!r}] must be a class of layers, got {kind!r}")
    return kind
