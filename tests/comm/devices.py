"""Ranks with simulated GPUs: what carries their arrays, and a backend to train with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pydtnn.comm import Communicator
from pydtnn.comm.nccl import create_nccl
from pydtnn.comm.staged import CudaAware, Staged
from pydtnn.kernels import reference
from pydtnn.kernels.autotuner import Autotuner
from pydtnn.kernels.backend import Backend
from tests.comm.on_device import Aware
from tests.simulated import Fabric, SimulatedCupy

TRANSPORTS: dict[str, Callable[[Communicator, Any], Communicator]] = {
    "nccl": create_nccl,
    "staged": Staged,
    "handed": lambda comm, xp: CudaAware(Aware(comm), xp),
}
"""What `pydtnn.cli.parallel` chooses from."""

FABRICS: dict[int, Fabric] = {}


def device_of(comm: Communicator, seed: int = 0, gpus: int = 8) -> SimulatedCupy:
    """Make a rank's device; those of threads meet in one fabric. Collective."""
    fabric = Fabric(gpus)
    FABRICS[id(fabric)] = fabric
    first = comm.gather_object(id(fabric))[0]
    # Ranks that are processes have a fabric each, and no NCCL.
    return SimulatedCupy(FABRICS.get(first, fabric), seed=100 * seed + comm.rank)


class ReferenceOnDevice(Backend):
    """The reference's kernels on arrays of a device, which they compute as on the host, bit by bit.

    So whatever differs is the work of communicators and schemes.
    """

    def asarray(self, value: Any, dtype: Any = None) -> Any:
        return self.xp.asarray(value, None if dtype is None else np.dtype(dtype), order="C")

    def to_numpy(self, array: Any) -> np.ndarray:
        return self.xp.asnumpy(array)


def reference_on(xp: Any) -> Backend:
    families: dict[str, Any] = {name: make(xp) for name, make in reference.FAMILIES.items()}
    return ReferenceOnDevice("device", xp, 1, "none", Autotuner("direct"), **families)
