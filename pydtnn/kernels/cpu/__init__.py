"""The ``cpu`` backend: the reference families with their hot kernels in C, float32 and float64."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import pydtnn.kernels.cpu.openmp  # noqa: F401  # before modules that link its runtime
from pydtnn.kernels.autotuner import Autotuner
from pydtnn.kernels.cpu import _conv
from pydtnn.kernels.cpu._memory import MemoryPool
from pydtnn.kernels.cpu.attention import CpuAttention
from pydtnn.kernels.cpu.conv import CpuConv
from pydtnn.kernels.cpu.elementwise import CpuElementwise
from pydtnn.kernels.cpu.fused import CpuFused
from pydtnn.kernels.cpu.isa import available, select_isa
from pydtnn.kernels.cpu.linear import CpuLinear
from pydtnn.kernels.cpu.loss import CpuLoss
from pydtnn.kernels.cpu.norm import CpuNorm
from pydtnn.kernels.cpu.pool import CpuPool
from pydtnn.kernels.cpu.random import CpuRandom
from pydtnn.kernels.cpu.recurrent import CpuRecurrent
from pydtnn.kernels.cpu.update import CpuUpdate
from pydtnn.utils.machine import cpu_model

COMPILED = {
    "attention": CpuAttention,
    "conv": CpuConv,
    "elementwise": CpuElementwise,
    "fused": CpuFused,
    "linear": CpuLinear,
    "loss": CpuLoss,
    "norm": CpuNorm,
    "pool": CpuPool,
    "random": CpuRandom,
    "recurrent": CpuRecurrent,
    "update": CpuUpdate,
}

__all__ = ["MemoryPool", "available", "create_families", "select_isa", "this_machine"]


def create_families(threads: int, isa: str, autotuner: Autotuner) -> dict[str, Any]:
    """Create every family of kernels for `threads` threads and instruction set `isa`, by name.

    Convolutions choose their algorithms with `autotuner`.
    """
    families: dict[str, Any] = {name: family(np, isa, threads) for name, family in COMPILED.items()}
    families["conv"].autotuner = autotuner
    return families


@cache
def this_machine() -> str:
    """Return the CPU, the version, and a digest of the compiled kernels: what times depend on."""
    from pydtnn.utils.version import __version__

    kernels = hashlib.sha256(Path(_conv.__file__).read_bytes()).hexdigest()[:12]
    return f"{cpu_model()}, pydtnn {__version__}, kernels {kernels}"
