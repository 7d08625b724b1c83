"""Predicted time and memory of training steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from pydtnn.comm import Communicator
from pydtnn.comm.schedules.network import Network
from pydtnn.comm.wrapper import Wrapper
from pydtnn.kernels.dry import dry_backend
from pydtnn.layers import Net
from pydtnn.perfmodel.breakdown import Breakdown, Times
from pydtnn.perfmodel.compression import temporary_memory
from pydtnn.perfmodel.compute.analytic import AnalyticCosts
from pydtnn.perfmodel.compute.base import ComputeCosts
from pydtnn.perfmodel.memory import RankMemory, rank_memory
from pydtnn.perfmodel.platform import Platform
from pydtnn.perfmodel.virtual import Processor, SharedCores, run_virtual
from pydtnn.perfmodel.virtual.communicator import VirtualCommunicator
from pydtnn.perfmodel.workload import Rank, Workload, check_timed, period
from pydtnn.utils import clock
from pydtnn.utils.units import align, quantity

WHO = "predict"

MOST_RANKS = 16
"""Largest number of ranks that are executed as virtual ranks."""

WARM_UP = 2
"""Steps before those that are predicted: the first ones create groups and buffers."""

STEPS = 5
"""Steps of which the one with the median time is predicted; periods of schemes with periods."""

ITEM = 4
"""Bytes of a value of a sample in the loader."""


@dataclass(frozen=True)
class RankPrediction:
    """Prediction for one rank.

    Attributes
    ----------
    times : Times
        Of a step.
    memory : RankMemory
    """

    times: Times
    memory: RankMemory


@dataclass(frozen=True)
class Prediction:
    """Predicted time and memory of a training step.

    Attributes
    ----------
    workload : str
        Network and plan in words.
    platform : str
    batch : int
        Samples of all ranks per step.
    ranks : tuple of RankPrediction
    loader : float
        Time by which a step is longer because a rank waits for its batch, in s.
    checkpoint : float
        Time to write a checkpoint, in s; 0 if the platform has no rate.
    """

    workload: str
    platform: str
    batch: int
    ranks: tuple[RankPrediction, ...]
    loader: float = 0.0
    checkpoint: float = 0.0

    @property
    def seconds(self) -> float:
        """Time of a step in s."""
        return max(rank.times.step for rank in self.ranks) + self.loader

    @property
    def throughput(self) -> float:
        """Samples per second of all ranks."""
        return self.batch / self.seconds

    @property
    def memory(self) -> int:
        """Memory of the rank with the most, in B."""
        return max(rank.memory.total for rank in self.ranks)

    @property
    def slowest(self) -> RankPrediction:
        """The rank that computes longest."""
        return max(self.ranks, key=lambda rank: rank.times.compute + rank.times.update)

    @property
    def bottleneck(self) -> str:
        """What takes the largest part of a step, in words."""
        times = self.slowest.times
        parts = {
            "compute": times.compute,
            "communication": times.communication,
            "loader": self.loader,
            "update": times.update,
            "loss": times.loss,
            "other": times.other,
        }
        largest = max(parts, key=parts.__getitem__)
        text = f"{largest}: {parts[largest] / self.seconds:.0%} of a step"
        if largest == "compute" and times.layers:
            name, layer = max(
                times.layers.items(), key=lambda item: item[1].forward + item[1].backward
            )
            text += f", most of it in {name} ({(layer.forward + layer.backward) * 1e3:.3g} ms)"
        if largest == "communication":
            name, layer = max(times.layers.items(), key=lambda item: item[1].communication)
            inside = sum(layer.communication for layer in times.layers.values())
            where = f"in {name}" if inside > times.communication / 2 else "after backward"
            text += f", most of it {where}"
        return text

    def to_json(self) -> dict[str, Any]:
        """Return the prediction as JSON values."""
        return {
            "workload": self.workload,
            "platform": self.platform,
            "batch": self.batch,
            "seconds": self.seconds,
            "throughput": self.throughput,
            "loader": self.loader,
            "checkpoint": self.checkpoint,
            "bottleneck": self.bottleneck,
            "ranks": [
                {
                    "step": rank.times.step,
                    "compute": rank.times.compute,
                    "communication": rank.times.communication,
                    "loss": rank.times.loss,
                    "update": rank.times.update,
                    "other": rank.times.other,
                    "memory": rank.memory.to_json(),
                    "layers": {name: asdict(layer) for name, layer in rank.times.layers.items()},
                }
                for rank in self.ranks
            ],
        }

    def __str__(self) -> str:
        title = ["rank", "step", "compute", "comm.", "loss", "update", "other", "memory"]
        rows = [title]
        for number, rank in enumerate(self.ranks):
            t = rank.times
            parts = (t.step, t.compute, t.communication, t.loss, t.update, t.other)
            memory = quantity(rank.memory.total, 1024, "B")
            rows.append([str(number), *(f"{1e3 * part:.3f}" for part in parts), memory])
        return "\n".join(
            [
                f"{self.workload}, batch {self.batch}, on {self.platform}: "
                f"{1e3 * self.seconds:.3f} ms per step, {self.throughput:.1f} samples/s",
                *align(rows, left=1),
                "(times in ms; comm. is exposed communication)",
                *([f"loader: {1e3 * self.loader:.3f} ms per step"] if self.loader else []),
                f"bottleneck: {self.bottleneck}",
            ]
        )


def predict(
    workload: Workload | str | Callable[..., Net],
    platform: Platform | str | Path,
    costs: ComputeCosts | Sequence[ComputeCosts] | None = None,
    **options: Any,
) -> Prediction:
    """Predict the time and memory of a step: virtual ranks execute it with empty kernels.

    Parameters
    ----------
    workload : Workload, str or callable
        Of at most 16 ranks; or a model, as in `Workload`.
    platform : Platform, str or Path
        A platform, its name or its file.
    costs : ComputeCosts or sequence of ComputeCosts, optional
        Time of compute, or that of each rank; by default from the rates of the platform.
    **options
        Of a model: the other parameters of `Workload`, such as `input_shape`, `batch` and `axes`.

    Raises
    ------
    ValueError
        If there are too many ranks, or the workload is not possible.
    TypeError
        If an option does not exist.
    """
    if not isinstance(workload, Workload):
        workload = Workload(workload, **options)
    elif options:
        raise TypeError(
            f"{WHO}: expected options as arguments of the Workload, got {', '.join(options)}; use "
            "dataclasses.replace(workload, ...)"
        )
    if not isinstance(platform, Platform):
        platform = Platform.load(platform)
    if workload.ranks > MOST_RANKS:
        raise ValueError(
            f"{WHO}: expected at most {MOST_RANKS} ranks, got {workload.ranks}; use the oracle"
        )
    check_timed(workload)
    network, processor = platform.network(workload.ranks), Processor.of(platform)
    costs = AnalyticCosts.of(workload, platform) if costs is None else costs
    ranks = simulate(workload, network, costs, processor, shared_cores(workload, platform))
    step = max(rank.times.step for rank in ranks)
    sample, storage = prod(workload.input_shape) * ITEM, platform.storage
    saved = max(rank.memory.parameters + rank.memory.slots for rank in ranks)
    return Prediction(
        workload.name,
        platform.name,
        workload.batch,
        tuple(ranks),
        loader=storage.delay(workload.samples_per_rank, sample, workload.loader_threads, step),
        checkpoint=storage.checkpoint(saved),
    )


def shared_cores(workload: Workload, platform: Platform) -> SharedCores | None:
    """Return the cores that the ranks of a host share; None if there are enough for all."""
    cluster = platform.cluster
    wanted = min(cluster.ranks_per_host, workload.ranks) * (workload.threads or 1)
    if wanted <= cluster.cores_per_host:
        return None
    number = max(cluster.cores_per_host // (workload.threads or 1), 1)
    return SharedCores(number, platform.hosts(workload.ranks))


def simulate(
    workload: Workload,
    network: Network,
    costs: ComputeCosts | Sequence[ComputeCosts],
    processor: Processor,
    cores: SharedCores | None = None,
) -> list[RankPrediction]:
    """Execute steps on virtual ranks with empty kernels; return the step with the median time.

    If communication repeats with a period, it is the mean step of the median period.

    Parameters
    ----------
    workload : Workload
    network : Network
        With the host of every rank.
    costs : ComputeCosts or sequence of ComputeCosts
    processor : Processor
        What messages cost the processor of a rank.
    cores : SharedCores, optional
        Cores that ranks share; by default each has its own.
    """
    run = run_virtual(
        _run_rank(workload), network=network, costs=costs, processor=processor, cores=cores
    )
    steps = list(zip(*(times for times, _ in run.results), strict=True))
    middle = sorted(steps, key=lambda ranks: max(times.step for times in ranks))[len(steps) // 2]
    memory = [memory for _, memory in run.results]
    return [RankPrediction(t, m) for t, m in zip(middle, memory, strict=True)]


def _run_rank(workload: Workload) -> Callable[[Communicator], tuple[list[Times], RankMemory]]:
    length, temporary = period(workload), 0.0
    if workload.compress:
        temporary = temporary_memory(workload.compress, workload.compress_options)

    def run(comm: Communicator) -> tuple[list[Times], RankMemory]:
        breakdown = Breakdown(clock.current().now_ns)
        backend = dry_backend(workload.create_backend(), threshold=1)
        rank = Rank(workload, comm, backend=backend, observers=[breakdown])
        rank.trainer.optimizer.iterations = 1  # the first step checks values of gradients
        breakdown.traffic = rank.trainer.comm.traffic
        for _ in range(length * -(-WARM_UP // length)):
            rank.step()
        breakdown.take(0.0)
        found = []
        for _ in range(STEPS):
            begin = clock.now()
            for _ in range(length):
                rank.step()
            found.append(breakdown.take((clock.now() - begin) / length, length))
        largest = max((bucket.grads.nbytes for bucket in rank.trainer.model.buckets), default=0)
        return found, rank_memory(rank, library=_buffers(comm) + int(temporary * largest))

    return run


def _buffers(comm: Communicator) -> int:
    """Return the most memory of the MPI library for the sums of a virtual rank, in B."""
    while isinstance(comm, Wrapper):
        comm = comm.inner
    assert isinstance(comm, VirtualCommunicator)
    return comm.buffers.most
