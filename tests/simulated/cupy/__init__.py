"""CuPy without a GPU: arrays, streams, events, graphs, memory and NCCL, made of NumPy.

===============  ===================================================================================
`module.py`      the module: what pydtnn may ask of CuPy, and no more
`functions.py`   the names of its functions, and how one becomes work of a stream
`array.py`       arrays of the device; their parts are in `indexing.py`
`cuda.py`        ``cupy.cuda``
`streams.py`     streams and events
`graphs.py`      captures, and what is replayed
`memory.py`      pools, pinned memory
`nccl.py`        ``cupy.cuda.nccl`` between threads
`fabric.py`      what the devices of all ranks share
===============  ===================================================================================
"""

from tests.simulated.cupy.fabric import Fabric
from tests.simulated.cupy.module import Seen, SimulatedCupy

__all__ = ["Fabric", "Seen", "SimulatedCupy"]
