"""Wrappers around every kernel of a backend: reports to an observer of each call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pydtnn.kernels.backend import Backend
from pydtnn.kernels.reference import FAMILIES
from pydtnn.utils.observer import Activity, Kind, Observer

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


@contextmanager
def observed_kernels(backend: Backend, observer: Observer) -> Iterator[None]:
    """Context in which every kernel of a backend is an activity, such as "conv.forward".

    On a GPU the activity is the launch of the kernel. A call costs about 1 us more.

    Parameters
    ----------
    backend : Backend
    observer : Observer
        That of the thread in which the kernels are called.
    """

    def reported(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def report(*args: Any, **options: Any) -> Any:
            with Activity(observer, Kind.KERNEL, name):
                return call(*args, **options)

        return report

    with wrapped_kernels(backend, reported):
        yield
