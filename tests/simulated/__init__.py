"""A GPU that is none: CuPy, our kernels and their libraries as far as pydtnn uses them, in NumPy.

    backend = simulated_backend()               # a CudaBackend like any other
    with backend.xp.watched() as seen: ...      # who waited, allocated or uploaded, and where

It is meaner than a GPU. Work that is enqueued is carried out when somebody waits for it, streams
take turns in an order drawn at random, and memory that is given back is overwritten in the order of
its stream and then used again. Arrays of the device and of the host never mix. What a capture
forbids raises at once, on the line that did it. With ``eager=True`` work is carried out as soon as
it can be, for tests in which that is not the point.

==============  ====================================================================================
`cupy`          CuPy
`kernels.py`    our CUDA sources, compiled by g++ with `emulator.h`
`watched.py`    the same under a detector of races, `watch.cpp`
`libraries.py`  cuDNN's convolutions and cuBLAS's products, by the reference
`backend.py`    a `CudaBackend` of all these
`host.py`       our kernels on NumPy's own arrays
`small.py`      networks and trainings for the tests here
==============  ====================================================================================
"""

from tests.core import MISSING

if "pydtnn.kernels.cuda" in MISSING:

    def why_not() -> str:
        """Return why no device is simulated."""
        return "the code for GPUs is deleted"

else:
    from tests.simulated.backend import installed, simulated_backend, why_not
    from tests.simulated.cupy import Fabric, Seen, SimulatedCupy

__all__ = ["Fabric", "Seen", "SimulatedCupy", "installed", "simulated_backend", "why_not"]
