"""Whether tests can use a GPU here, and what for where they cannot."""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache
from typing import Any

import numpy as np
import pytest


@cache
def why_not(*, nccl: bool = False) -> str:
    """Why there is no GPU, or no NCCL, to test with; empty where there is."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without libnccl the import warns, and works
        import cupy
        import cupy.cuda.nccl

    if not cupy.cuda.is_available():
        return "there is no GPU"
    return "" if not nccl or cupy.cuda.nccl.available else "NCCL cannot be loaded"


def name() -> str:
    """What the GPU is called."""
    import cupy

    return cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()


def to_host(array: Any) -> np.ndarray:
    """Copy an array, from wherever it is."""
    return np.array(array.get() if hasattr(array, "get") else array)


def needed(*, nccl: bool = False) -> pytest.MarkDecorator:
    """Skip a test, and say why, where there is no GPU."""
    return pytest.mark.skipif(bool(why_not(nccl=nccl)), reason=why_not(nccl=nccl) or "-")
