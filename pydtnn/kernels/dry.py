"""Backends whose kernels do nothing: with them a step can be rehearsed for what it allocates."""

from __future__ import annotations

from typing import Any

import numpy as np

from pydtnn.kernels.backend import Backend
from pydtnn.kernels.geometry import ConvGeometry
from pydtnn.kernels.reference import FAMILIES, Norm


class Idle:
    """Stands in for a family of kernels: every kernel returns 0 and writes nothing.

    Attributes
    ----------
    geometries : set of ConvGeometry
        Of the convolutions that were asked for.
    """

    def __init__(self) -> None:
        self.geometries: set[ConvGeometry] = set()

    def __getattr__(self, kernel: str) -> Any:
        return self._idle

    def _idle(self, *arguments: Any, **options: Any) -> float:
        self.geometries.update(a for a in arguments if isinstance(a, ConvGeometry))
        return 0.0


class IdleNorm(Idle):
    """Idle kernels of normalisation; what layers ask about sums is answered as by `norm`."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        host = Norm(np)
        self.sums_length = norm.sums_length
        self.moments, self.constant_sums = host.moments, host.constant_sums


def dry_backend(backend: Backend, threshold: int) -> Backend:
    """Make a backend like another one that has memory of its own and computes nothing.

    Its arrays have addresses, but are never written, so they take no memory.

    Parameters
    ----------
    backend : Backend
    threshold : int
        Bytes from which on arrays come from its pool, ``memory``, and are counted there.
    """
    from pydtnn.kernels.cpu import MemoryPool

    idle: dict[str, Any] = {family: Idle() for family in FAMILIES}
    idle["norm"] = IdleNorm(backend.norm)
    kept: dict[str, Any] = {
        "name": backend.name,
        "threads": backend.threads,
        "isa": backend.isa,
        "autotuner": backend.autotuner,
        "keeps_values": backend.keeps_values,
        "gates": backend.gates,
    }
    return Backend(xp=np, **kept, **idle, memory=MemoryPool(threshold=threshold, huge_pages=False))


def scratch(backend: Backend, dry: Backend, itemsize: int) -> int:
    """Estimate the bytes that kernels of a backend allocate for themselves at one time, at most.

    Parameters
    ----------
    backend : Backend
    dry : Backend
        Its `dry_backend`, after the rehearsal.
    itemsize : int
        Bytes of an element.
    """
    if backend.name == "cuda":
        return int(backend.memory.scratch.nbytes)  # what libraries have needed so far
    if backend.name != "cpu" or itemsize == 2:  # what the reference allocates is not counted
        return 0
    from pydtnn.kernels.cpu.scratch import conv_scratch

    idle: Any = dry.conv
    winograd = backend.autotuner.mode != "direct"
    return conv_scratch(idle.geometries, itemsize, backend.threads, winograd=winograd)
