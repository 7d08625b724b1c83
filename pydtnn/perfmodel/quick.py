"""The platform of a job, measured in about a second or taken from the user's cache.

`python -m pydtnn.calibrate` measures more, and more precisely.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from pydtnn.comm import Communicator
from pydtnn.kernels import Backend
from pydtnn.kernels.autotuner_file import VARIABLE
from pydtnn.kernels.limits import measure_limits
from pydtnn.layers import ReLU, Sequential
from pydtnn.layers.base import StepContext
from pydtnn.model import Model
from pydtnn.perfmodel.calibration import machine
from pydtnn.perfmodel.calibration.calibrate import DEFAULT
from pydtnn.perfmodel.calibration.messages import measure_messages
from pydtnn.perfmodel.platform import Cluster, Compute, Platform
from pydtnn.utils import clock
from pydtnn.utils.files import user_cache
from pydtnn.utils.machine import cpu_model

CALLS = 50
"""Layers of the network whose passes give the time of Python per call."""

TURNS = 9
"""Passes of this network, of which the median counts."""


def platform_of(comm: Communicator, backend: Backend) -> Platform:
    """Return the platform of a job. Collective: all ranks call it.

    Later jobs with the same CPU, threads, ranks and hosts take it from a file of the user's cache.

    Parameters
    ----------
    comm : Communicator
    backend : Backend
        With compiled kernels on the host.

    Returns
    -------
    Platform
        Equal on all ranks.
    """
    place = _file(comm, backend)
    known = comm.gather_object(_load(place) if comm.rank == 0 else None)[0]
    if known is not None:
        return known
    found = measure_platform(comm, backend)
    if comm.rank == 0 and place is not None:
        with contextlib.suppress(OSError):  # a cache that is not writable is not an error
            found.save(place)
    return found


def measure_platform(comm: Communicator, backend: Backend) -> Platform:
    """Measure the platform of a job. Collective: all ranks call it.

    All ranks compute at the same time, as in training. Of ranks that differ, the slowest counts.
    """
    messages, _ = measure_messages(comm, Platform.load(DEFAULT).messages)
    comm.barrier()
    limits = measure_limits(backend)
    own = (limits["flops_per_second"], limits["bytes_per_second"], _seconds_per_call(backend))
    flops, moved, calls = zip(*comm.gather_object(own), strict=True)
    per_host = max(Counter(comm.hosts).values())
    bandwidth = min(moved)
    return Platform(
        name="this job",
        cluster=Cluster(
            hosts=len(set(comm.hosts)),
            ranks_per_host=per_host,
            cores_per_host=max(os.cpu_count() or 1, 1),
            memory_per_rank=machine.memory() / per_host,
        ),
        compute=Compute(
            threads=backend.threads,
            peak={"float32": min(flops), "float64": min(flops) / 2},
            memory_bandwidth=bandwidth,
            host_bandwidth=per_host * bandwidth,
            call=max(calls),
        ),
        messages=messages,
    )


def _seconds_per_call(backend: Backend) -> float:
    """Return the time of a pass of a layer with hardly any values, in s."""
    net = Sequential(*(ReLU() for _ in range(CALLS)))
    model = Model(net, (8,), backend=backend, fuse=False, input_gradient=True)
    x, dy = np.ones((1, 8), "float32"), np.ones((1, 8), "float32")
    context = StepContext(training=True, samples=np.arange(1))

    def passes() -> None:
        _, saved = model.forward(x, context)
        model.backward(dy, saved)

    return _median(passes) / (2 * CALLS)


def _median(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(TURNS):
        start = clock.now()
        call()
        times.append(clock.now() - start)
    return median(times)


def _file(comm: Communicator, backend: Backend) -> Path | None:
    """Return the path of the file in the cache; None without a home directory."""
    per_host = sorted(Counter(comm.hosts).values())
    about = (cpu_model(), backend.isa, backend.threads, per_host)
    key = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    try:
        folder = os.environ.get(VARIABLE)
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
