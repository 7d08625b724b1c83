"""Wrappers around every kernel of a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pydtnn.kernels.backend import Backend
from pydtnn.kernels.reference import FAMILIES

Wrap = Callable[[Callable[..., Any], str], Callable[..., Any]]
"""Returns the wrapper of a kernel of a name, such as "conv.forward"."""


@contextmanager
def wrapped_kernels(backend: Backend, wrap: Wrap) -> Iterator[None]:
    """Context in which every kernel of a backend is wrapped."""
    before: list[tuple[Any, str, Any]] = []
    try:
        for name, reference in FAMILIES.items():
            family = getattr(backend, name)
            for kernel, method in vars(reference).items():
                if not kernel.startswith("_") and callable(method):
                    before.append((family, kernel, vars(family).get(kernel)))
                    setattr(family, kernel, wrap(getattr(family, kernel), f"{name}.{kernel}"))
        yield
    finally:
        for family, kernel, wrapper in before:
            if wrapper is None:
                vars(family).pop(kernel, None)
            else:
                setattr(family, kernel, wrapper)
