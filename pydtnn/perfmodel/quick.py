"""The platform of a job, calibrated with the layers of its network or taken from the user's cache.

`python -m pydtnn.calibrate` measures layers of many classes, and the disk.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
from collections import Counter
from pathlib import Path
from typing import cast

from pydtnn.comm import Communicator
from pydtnn.kernels import Backend
from pydtnn.kernels.autotuner import CACHE_VARIABLE
from pydtnn.kernels.dry import dry_backend
from pydtnn.layers import Net
from pydtnn.model.graph import Graph, shapes_of
from pydtnn.perfmodel.calibration import calibrate
from pydtnn.perfmodel.platform import Platform
from pydtnn.utils.files import user_cache
from pydtnn.utils.machine import cpu_model

MAX_FLOPS = 20e9
"""Operations of a step with which the rates of layers are measured: about 0.3 s of a core."""


def platform_of(
    comm: Communicator, backend: Backend, net: Net, input_shape: tuple[int, ...], batch: int
) -> Platform:
    """Return the platform of a job, with the rates of its network's layers. Collective.

    Later jobs with the same CPU, threads, ranks, hosts, network and batch take it from a file of
    the user's cache.

    Parameters
    ----------
    comm : Communicator
    backend : Backend
        With compiled kernels on the host.
    net : Net
        Not part of a model; it is not changed.
    input_shape : tuple of int
        Of a sample.
    batch : int
        Samples of a rank, the most that are measured.

    Returns
    -------
    Platform
        Equal on all ranks.
    """
    place = _file(comm, backend, repr(net), input_shape, batch)
    known = comm.gather_object(_load(place) if comm.rank == 0 else None)[0]
    if known is not None:
        return cast(Platform, known)
    samples = max(1, min(batch, int(MAX_FLOPS / max(_flops(net, input_shape, backend), 1))))
    network = "layers of the network", net, input_shape, samples
    found = calibrate(comm, name="this job", backend=backend, networks=[network]).platform
    if comm.rank == 0 and place is not None:
        with contextlib.suppress(OSError):  # a cache that is not writable is not an error
            found.save(place)
    return found


def _flops(net: Net, input_shape: tuple[int, ...], backend: Backend) -> int:
    """Return the operations of forward and backward of one sample."""
    graph = Graph(shapes_of(input_shape), backend=dry_backend(backend, 1), dtype="float32")
    graph.add(copy.deepcopy(net), *graph.inputs)
    costs = [node.layer.cost(1) for node in graph.nodes if node.inputs]
    return sum(cost.flops_forward + cost.flops_backward for cost in costs)


def _file(comm: Communicator, backend: Backend, *workload: object) -> Path | None:
    """Return the path of the file in the cache; None without a home directory."""
    per_host = sorted(Counter(comm.hosts).values())
    tuning = backend.autotuner.mode
    about = (cpu_model(), backend.isa, backend.threads, tuning, per_host, *workload)
    key = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    try:
        folder = os.environ.get(CACHE_VARIABLE)
        return (Path(folder).expanduser() if folder else user_cache()) / f"platform-{key}.yaml"
    except RuntimeError:
        return None


def _load(place: Path | None) -> Platform | None:
    """Return the platform in a file; None if there is none that is valid."""
    if place is None or not place.is_file():
        return None
    try:
        return Platform.load(place)
    except (OSError, ValueError):
        return None
