"""Measurement of a platform by the ranks of a job."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydtnn.comm import Communicator
from pydtnn.comm.agree import on_rank_0, together
from pydtnn.kernels import Backend, create_backend
from pydtnn.tools.perfmodel.calibration import machine
from pydtnn.tools.perfmodel.calibration.messages import exchange_sample, measure_messages
from pydtnn.tools.perfmodel.calibration.rates import (
    REPEATS,
    Measured,
    Networks,
    combine,
    measure_rates,
)
from pydtnn.tools.perfmodel.calibration.sample import Sample, noisy, processor_clock
from pydtnn.tools.perfmodel.entries import UPDATE
from pydtnn.tools.perfmodel.platform import Cluster, Compute, Platform, Storage
from pydtnn.tools.tracing.kernels import COPIED, SIDE
from pydtnn.utils.machine import cpu_name
from pydtnn.utils.units import format_quantity

DTYPES = ("float32", "float64")

DEFAULT = "laptop"
"""Platform from which the figures of messages are taken that cannot be measured."""


MAX_EXCHANGE_S = 5e-3
"""Time of a message of a few bytes above which ranks wait for cores: the hundreds of messages of a
measurement would take minutes."""


@dataclass(frozen=True)
class Calibration:
    """A measured platform.

    Attributes
    ----------
    platform : Platform
    isa : str
        Instruction set of the kernels.
    processor : str
        Name of the CPU.
    spreads : tuple of str
        Quantities that other work on the machine disturbed, with their spread.
    assumed : tuple of str
        Entries that could not be measured on these ranks.
    """

    platform: Platform
    isa: str
    processor: str
    spreads: tuple[str, ...]
    assumed: tuple[str, ...]

    def save(self, path: str | Path) -> None:
        """Write the platform file, with comments on its origin."""
        compute = self.platform.compute
        plural = "s" * (compute.threads > 1)
        head = [
            f"Measured on {self.processor}, {self.isa}, {compute.threads} thread{plural} a rank."
        ]
        if self.assumed:
            head.append(f"Not measured, replace by figures of your own: {', '.join(self.assumed)}.")
        if self.spreads:
            head.append(f"The machine was under load, spread of {', '.join(self.spreads)}.")
        self.platform.save(path, comments=head)


def calibrate(
    comm: Communicator,
    *,
    name: str = "measured",
    threads: int | None = None,
    isa: str | None = None,
    backend: Backend | None = None,
    folder: Path | None = None,
    networks: Networks | None = None,
    repeats: int = REPEATS,
    rates: bool = True,
    allow_noise: bool = True,
) -> Calibration:
    """Measure the platform of a job. Collective: all ranks call it.

    Parameters
    ----------
    comm : Communicator
    name : str
        Of the platform.
    threads, isa : optional
        See `pydtnn.create_backend`.
    backend : Backend, optional
        Instead of `threads` and `isa`: that of the job.
    folder : Path, optional
        Folder in which the disk is measured; by default it is not.
    networks : callable, optional
        Creates those with which the rates of layers' kernels are measured; by default networks with
        layers of many classes, which take most of the time.
    repeats : int
        Steps of each network.
    rates : bool, default True
        Whether to measure rates of layers' kernels and of updates, the peak of float64, and the
        time of Python; not if the compute of a run is measured itself.
    allow_noise : bool, default True
        Whether to measure the rates on a machine under load, too.

    Raises
    ------
    AgreedError
        If an option is invalid, or the folder cannot be written.
    """
    backend = together(comm, lambda: backend or create_backend("cpu", threads=threads, isa=isa))
    samples: list[Sample] = []
    hosts, cores = [*comm.hosts], os.cpu_count() or 1
    per_host = max(map(hosts.count, hosts))
    shared = backend.threads * per_host > cores
    # where ranks share cores, models multiply the time for which a rank has one
    now = processor_clock(backend.threads) if shared else time.perf_counter
    compute = _compute(comm, backend, samples, now, rates)
    early = [one for own in comm.gather_object(samples) for one in own]
    if rates and (allow_noise or not noisy(early)):
        found = measure_rates(backend, comm.barrier, networks, repeats, now)
        compute = _with_rates(comm, compute, found, samples)
    messages, assumed, late = Platform.load(DEFAULT).messages, ["messages"], False
    if comm.size > 1:
        samples.append(exchange_sample(comm))
        late = _median(comm, statistics.median(samples[-1].times)) > MAX_EXCHANGE_S
    if not late:
        messages, assumed = measure_messages(comm, messages)
    cluster = Cluster(len(set(hosts)), per_host, cores, machine.memory() / per_host)
    platform = Platform(name, cluster, compute, messages, _storage(comm, folder))
    everywhere = [one for own in comm.gather_object(samples) for one in own]
    spreads = (*noisy(everywhere), *["messages, which waited for cores"] * late)
    return Calibration(platform, backend.isa, cpu_name(), spreads, tuple(assumed))


def _compute(
    comm: Communicator,
    backend: Backend,
    samples: list[Sample],
    now: Callable[[], float],
    rates: bool,
) -> Compute:
    """Measure the compute of all ranks at the same time, and the bandwidth of one rank alone."""
    peaks = {}
    for dtype in DTYPES if rates else DTYPES[:1]:
        try:
            one = machine.product(backend, dtype, comm.barrier, now)
        except RuntimeError:  # kernels of this type have not been compiled, on any rank
            continue
        samples.append(one)
        peaks[dtype] = _median(comm, 2 * SIDE**3 / one.shortest)
    comm.barrier()
    alone = on_rank_0(comm, machine.copy, backend, now)
    samples += [] if alone is None else [alone]
    own = comm.gather_object(0.0 if alone is None else 2 * COPIED / alone.shortest)[0]
    together = machine.copy(backend, now, comm.barrier)
    here = [2 * COPIED / s for s in comm.gather_object(statistics.median(together.times))]
    host = [rate for rate, h in zip(here, comm.hosts, strict=True) if h == comm.hosts[0]]
    call = step = 0.0
    if rates:
        python = machine.python(backend.threads, now)
        samples += python
        call, step = (_median(comm, own) for own in machine.python_times(python))
    return Compute(
        threads=backend.threads,
        peak=peaks,
        memory_bandwidth=own,
        host_bandwidth=min(sum(host), own * len(host)),
        call=call,
        step=step,
    )


def _with_rates(
    comm: Communicator, compute: Compute, found: Measured, samples: list[Sample]
) -> Compute:
    """Return the compute with the rates that all ranks have measured at the same time."""
    spread = statistics.median(found.spreads.values() or (0.0,))
    samples.append(Sample("layers", (1.0, 1 + spread) * 2 + (2.0,)))
    fields = combine(comm.gather_object(found))
    fields["bandwidths"][UPDATE] = _median(comm, found.update[0])
    if found.step:
        fields["step"] = max(_median(comm, found.step[0]), 0.0)
    return replace(compute, **fields)


def _storage(comm: Communicator, folder: Path | None) -> Storage:
    """Measure the loader on all ranks at the same time, and the disk on rank 0."""
    comm.barrier()
    sample, rate = machine.loader_rates()
    disk = None if folder is None else on_rank_0(comm, machine.disk, folder)
    write = machine.WRITTEN / disk.shortest if disk is not None else None
    return Storage(_median(comm, sample), _median(comm, rate), comm.gather_object(write)[0])


def _median(comm: Communicator, value: float) -> float:
    return float(statistics.median(comm.gather_object(value)))


def describe(calibration: Calibration) -> Sequence[str]:
    """Return lines with the main figures."""
    p = calibration.platform
    between, inside = p.messages.between, p.messages.inside
    return [
        f"{calibration.processor}, {calibration.isa}, {p.compute.threads} threads a rank",
        f"peak {format_quantity(p.compute.peak['float32'], 'flop/s')} in float32",
        f"memory {format_quantity(p.compute.memory_bandwidth, 'B/s')} alone, "
        f"{format_quantity(p.rank_bandwidth, 'B/s')} with all ranks of a host",
        f"Python {format_quantity(p.compute.call, 's')} per pass of a layer, "
        f"{format_quantity(p.compute.step, 's')} per step",
        f"messages inside a host {format_quantity(inside.latency, 's')}, "
        f"{format_quantity(inside.bandwidth, 'B/s')}; between hosts "
        f"{format_quantity(between.latency, 's')}, {format_quantity(between.bandwidth, 'B/s')}",
    ]
