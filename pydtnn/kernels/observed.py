"""Reports to an observer of every call of a kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pydtnn.kernels.backend import Backend
from pydtnn.kernels.reference import FAMILIES
from pydtnn.utils.observer import Activity, Kind, Observer


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
    wrapped: list[tuple[Any, str]] = []
    try:
        for name, reference in FAMILIES.items():
            family = getattr(backend, name)
            for kernel, method in vars(reference).items():
                if not kernel.startswith("_") and callable(method):
                    call = _reported(getattr(family, kernel), observer, f"{name}.{kernel}")
                    setattr(family, kernel, call)
                    wrapped.append((family, kernel))
        yield
    finally:
        for family, kernel in wrapped:
            delattr(family, kernel)


def _reported(call: Callable[..., Any], observer: Observer, name: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def reported(*args: Any, **options: Any) -> Any:
        with Activity(observer, Kind.KERNEL, name):
            return call(*args, **options)

    return reported
