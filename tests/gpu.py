"""Whether tests can use a GPU here, and what for where they cannot."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import cache
from typing import Any

import numpy as np
import pytest

LOOK = """
import warnings
warnings.simplefilter("ignore")  # without libnccl the import warns, and works
import cupy
import cupy.cuda.nccl
if cupy.cuda.is_available():
    device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    print(int(cupy.cuda.nccl.available), device["name"].decode())
"""


@cache
def _found() -> tuple[str, str]:
    """Whether NCCL is there, "0" or "1", and what the GPU is called; empty where there is none.

    Another process looks: those that are forked from one that has used a GPU cannot use it.
    """
    done = subprocess.run([sys.executable, "-c", LOOK], stdout=subprocess.PIPE, text=True)
    done.check_returncode()
    nccl, _, device = done.stdout.strip().partition(" ")
    return nccl, device


@cache
def why_not(*, nccl: bool = False) -> str:
    """Why there is no GPU, or no NCCL, to test with; empty where there is."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    has_nccl, device = _found()
    if not device:
        return "there is no GPU"
    return "" if not nccl or has_nccl == "1" else "NCCL cannot be loaded"


def name() -> str:
    """What the GPU is called."""
    return _found()[1]


def to_host(array: Any) -> np.ndarray:
    """Copy an array, from wherever it is."""
    return np.array(array.get() if hasattr(array, "get") else array)


def needed(*, nccl: bool = False) -> pytest.MarkDecorator:
    """Skip a test, and say why, where there is no GPU."""
    return pytest.mark.skipif(bool(why_not(nccl=nccl)), reason=why_not(nccl=nccl) or "-")
