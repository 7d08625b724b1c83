"""The cuda backend, unchanged, over a device that is none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from pydtnn.kernels.cuda import CudaBackend, backend, create_cuda_backend
from pydtnn.kernels.cuda.module import DeviceState
from tests.simulated import kernels
from tests.simulated.cupy import Fabric, SimulatedCupy
from tests.simulated.libraries import Convolutions, GraphConvolutions, Handle, Products

_LOCK = threading.RLock()


class SimulatedDevice(DeviceState):
    """What families share, with kernels that are emulated."""

    def module(self, source: str) -> Any:
        return kernels.Module(source, self._cupy.put)


def why_not() -> str:
    """Why there can be no simulated device here; empty where there can."""
    return "" if kernels.COMPILER else "there is no g++ to emulate the CUDA kernels with"


def simulated_backend(
    xp: SimulatedCupy | None = None,
    *,
    fabric: Fabric | None = None,
    seed: int = 0,
    eager: bool = False,
    **options: Any,
) -> CudaBackend:
    """Make a `CudaBackend` whose `xp` is simulated.

    Parameters
    ----------
    xp : SimulatedCupy, optional
        By default a new one, of `fabric`, `seed` and `eager`.
    **options
        Of `create_cuda_backend`.
    """
    with installed(xp or SimulatedCupy(fabric, seed, eager=eager)):
        return create_cuda_backend(**options)


@contextmanager
def installed(xp: SimulatedCupy) -> Iterator[None]:
    """Let ``create_backend("cuda")`` make simulated backends of this device meanwhile."""
    libraries = SimpleNamespace(
        usable_cupy=lambda device=None, *, local_rank=None: xp,
        load=lambda name: f"simulated {name}",
        Unavailable=backend.libraries.Unavailable,
    )
    with (
        _LOCK,
        patch.multiple(
            backend,
            libraries=libraries,
            Cudnn=lambda library: library,
            Handle=Handle,
            CudnnConvolutions=Convolutions,
            GraphConvolutions=GraphConvolutions,
            Products=Products,
            DeviceState=SimulatedDevice,
        ),
    ):
        yield
