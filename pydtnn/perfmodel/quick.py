"""The platform of a job, measured in a few seconds or taken from the user's cache.

`python -m pydtnn.calibrate` measures more, and more precisely.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import cast

import numpy as np

from pydtnn.comm import Communicator
from pydtnn.kernels import Backend
from pydtnn.kernels.autotuner import CACHE_VARIABLE
from pydtnn.kernels.dry import dry_backend
from pydtnn.kernels.limits import measure_limits
from pydtnn.layers import Net, ReLU, Sequential
from pydtnn.layers.base import StepContext
from pydtnn.model import Model
from pydtnn.model.graph import Graph, shapes_of
from pydtnn.perfmodel.calibration import machine
from pydtnn.perfmodel.calibration.calibrate import DEFAULT
from pydtnn.perfmodel.calibration.messages import measure_messages
from pydtnn.perfmodel.calibration.rates import measure_rates
from pydtnn.perfmodel.platform import Cluster, Compute, Platform
from pydtnn.utils import clock
from pydtnn.utils.files import user_cache
from pydtnn.utils.machine import cpu_model

MAX_PASS_S = 0.3
"""Time of a step with which the rates of layers are measured, at peak rate, in s."""

REPEATS = 4
"""Steps that are timed."""

CALLS = 50
"""Layers of the network whose passes give the time of Python per call."""

TIMED_PASSES = 9
"""Passes of this network, of which the median counts."""


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
    found = measure_platform(comm, backend)
    found = _with_rates(found, comm, backend, net, input_shape, batch)
    if comm.rank == 0 and place is not None:
        with contextlib.suppress(OSError):  # a cache that is not writable is not an error
            found.save(place)
    return found


def _with_rates(
    platform: Platform,
    comm: Communicator,
    backend: Backend,
    net: Net,
    input_shape: tuple[int, ...],
    batch: int,
) -> Platform:
    """Add the rates that the kernels of a network's layers achieve on all ranks at once."""
    work = _flops(net, input_shape, backend)
    samples = max(1, min(batch, int(MAX_PASS_S * platform.compute.peak["float32"] / max(work, 1))))
    own = measure_rates(backend, comm.barrier, [("", net, input_shape, samples)], REPEATS)
    everywhere = comm.gather_object((own.rates, own.bandwidths))
    rates, bandwidths = (
        {name: median(one[i][name] for one in everywhere) for name in everywhere[0][i]}
        for i in range(2)
    )
    compute = replace(platform.compute, rates=rates, bandwidths=bandwidths)
    return replace(platform, compute=compute)


def _flops(net: Net, input_shape: tuple[int, ...], backend: Backend) -> int:
    """Return the operations of forward and backward of one sample."""
    graph = Graph(shapes_of(input_shape), backend=dry_backend(backend, 1), dtype="float32")
    graph.add(copy.deepcopy(net), *graph.inputs)
    costs = [node.layer.cost(1) for node in graph.nodes if node.inputs]
    return sum(cost.flops_forward + cost.flops_backward for cost in costs)


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
    for _ in range(TIMED_PASSES):
        start = clock.now()
        call()
        times.append(clock.now() - start)
    return median(times)


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
