"""Achieved rates of the layers' kernels: small networks, run forward and backward."""

from __future__ import annotations

import copy
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pydtnn.comm import Serial
from pydtnn.kernels import Backend
from pydtnn.layers import (
    AvgPool2d,
    BatchNorm,
    Conv2d,
    Dropout,
    GroupNorm,
    Linear,
    MaxPool2d,
    Net,
    ReLU,
    Sequential,
    StepContext,
)
from pydtnn.layers.base import Layer
from pydtnn.model.model import Model, example_inputs
from pydtnn.tools.perfmodel.calibration.sample import excess
from pydtnn.tools.perfmodel.compute.analytic import accesses
from pydtnn.tools.perfmodel.compute.classes import classify
from pydtnn.tools.perfmodel.workload_rank import WorkloadRank
from pydtnn.training.workload import Workload
from pydtnn.utils.observer import Kind, Observer

REPEATS = 7
"""Steps of a network that are timed, after one that chooses algorithms and one that warms up."""

TINY = (4,)
"""Shape of samples for which layers take the time of Python only."""

MAPS = {16: 32, 32: 16, 64: 28, 128: 14, 256: 14, 512: 7}
"""Height of maps by channels, as in common networks."""

WIDTH = 4096
"""Rows and columns of the matrix whose update is measured: 64 MiB, more than caches hold."""

ELEMENTS = 1 << 19
"""Elements of a map of all samples: 2 MiB of float32."""


@dataclass
class Measured:
    """Times of layers on one rank; `combine` makes rates of those of all ranks.

    Attributes
    ----------
    work : dict of str to [float, float]
        Operations and time in s of the median passes, by class, size and direction, see
        `KernelClass.entry`.
    moved : dict of str to [float, float]
        Bytes and time, by class and direction.
    step, update : list of float
        Time of training steps besides passes and updates, and bandwidth of updates, in s and B/s.
    passes : list of ndarray of float64, shape (steps, passes)
        Times of all passes of each network, in s.
    spreads : dict of str to float
        Excess of the median over the shortest time of each network.
    """

    work: dict[str, list[float]] = field(default_factory=dict)
    moved: dict[str, list[float]] = field(default_factory=dict)
    step: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    passes: list[np.ndarray] = field(default_factory=list)
    spreads: dict[str, float] = field(default_factory=dict)


def combine(ranks: Sequence[Measured]) -> dict[str, Any]:
    """Return fields of `Compute`: rates of the mean rank, and what the slowest one needs more.

    Ranks that wait for each other after a pass, or a step, take the time of the slowest of that
    pass, or step.
    """
    fields: dict[str, Any] = {}
    for name, amounts in (
        ("rates", [rank.work for rank in ranks]),
        ("bandwidths", [rank.moved for rank in ranks]),
    ):
        sums = {key: np.sum([own[key] for own in amounts], axis=0) for key in amounts[0]}
        fields[name] = {key: float(amount / seconds) for key, (amount, seconds) in sums.items()}
    times = [np.stack(own) for own in zip(*(rank.passes for rank in ranks), strict=True)]
    steps = [own.sum(axis=2, keepdims=True) for own in times]
    for name, kinds in (("slowest_pass", times), ("slowest_step", steps)):
        slowest = sum(np.median(own.max(axis=0), axis=0).sum() for own in kinds)
        mean = sum(np.median(own.mean(axis=0), axis=0).sum() for own in kinds)
        fields[name] = float(slowest / mean) if mean > 0 else 1.0
    return fields


class _PassClock(Observer):
    """Time of each pass of each node of a step."""

    def __init__(self) -> None:
        self.now: Callable[[], float] = time.perf_counter
        self.times: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._open: list[tuple[str, str, float]] = []

    def begin(self, kind: Kind, name: str, *, nbytes: int = 0, bucket: int = -1) -> None:
        self._open.append((kind.name.lower(), name, self.now()))

    def end(self) -> None:
        kind, name, start = self._open.pop()
        self.times[name, kind].append(self.now() - start)


class MeasuredModel(NamedTuple):
    """What is measured.

    Attributes
    ----------
    name : str
    model : Model
    samples : int
        Of a step.
    step : callable
        Both passes of the model, or a whole training step.
    clock : _Clock
        Receives the passes of layers.
    accesses : int
        Numbers that a training step's update reads and writes for each parameter; 0: no update.
    """

    name: str
    model: Model
    samples: int
    step: Callable[[], object]
    clock: _PassClock
    accesses: int = 0

    def bandwidth(self, updates: Sequence[float]) -> float:
        """Return the bandwidth of updates that take these times, in B/s."""
        numbers = sum(p.size for p in self.model.parameters.values())
        return self.accesses * 4 * numbers / statistics.median(updates)


Networks = Callable[[Backend], Iterable[MeasuredModel]]
"""Creates networks for a backend that are measured."""


def training(name: str, work: Workload, backend: Backend) -> Iterator[MeasuredModel]:
    """Create the training steps of one rank."""
    clock = _PassClock()
    rank = WorkloadRank(work, Serial(), backend=backend, observers=[clock])
    numbers = accesses(work.slots)
    yield MeasuredModel(name, rank.trainer.model, work.batch, rank.step, clock, numbers)


def _passes(
    backend: Backend, name: str, net: Net, shape: tuple[int, ...], samples: int
) -> MeasuredModel:
    """Return both passes of a network, the gradient of the input included."""
    parts = net if isinstance(net, Sequential) else ()
    fuse = not any(isinstance(part, GroupNorm) for part in parts)  # that one is of single layers
    model = Model(copy.deepcopy(net), shape, backend=backend, fuse=fuse, input_gradient=True)
    rng = np.random.default_rng(0)
    xs = example_inputs(model, samples, rng)
    shapes = [(samples, *shape) for shape in model.output_shapes]
    gradients = [rng.standard_normal(shape).astype("float32") for shape in shapes]
    context = StepContext(training=True, samples=np.arange(samples))

    def step() -> None:
        _, saved = model.forward(xs, context)
        dy = tuple(gradient.copy() for gradient in gradients)
        model.backward(dy if len(dy) > 1 else dy[0], saved)

    model.observer = _PassClock()
    return MeasuredModel(name, model, samples, step, model.observer)


def measure_rates(
    backend: Backend,
    together: Callable[[], object] = lambda: None,
    networks: Networks | None = None,
    repeats: int = REPEATS,
    now: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Measure the layers' kernels with the threads of a backend.

    Parameters
    ----------
    backend : Backend
    together : callable
        Called before each step, such as a barrier of ranks that share a host.
    networks : callable, optional
        Whose layers are measured; by default networks with layers of many classes.
    repeats : int
        Steps of each network.
    now : callable
        Current time, in s.
    """
    found = Measured()
    tiny = Sequential(*(part for _ in range(8) for part in (Linear(4), Dropout(0.0), ReLU())))
    times, *_ = _run(_passes(backend, "Python", tiny, TINY, 2), together, 30, now)
    call = statistics.median(min(own) for *_, own in times)
    for network in (networks or _networks)(backend):
        times, steps, updates = _run(network, together, repeats, now)
        found.spreads[network.name] = excess(steps)
        found.passes.append(np.array([own for *_, own in times]).T)
        if network.accesses:
            inside = found.passes[-1].sum(axis=1) + updates
            found.step.append(float(np.median(np.subtract(steps, inside))))
            found.update.append(network.bandwidth(updates))
        for layer, direction, own in times:
            work, nbytes = layer.cost(network.samples).of_pass(direction == "backward")
            kind = classify(layer)
            amount, sums = (work, found.work) if kind.size and work else (nbytes, found.moved)
            if amount:
                entry = sums.setdefault(kind.entry(direction), [0.0, 0.0])
                entry[0] += amount
                entry[1] += max(statistics.median(own) - call, 1e-7)
    if not found.update:  # that of a large matrix, by SGD with momentum
        large = Workload(_matrix, (WIDTH,), classes=WIDTH, batch=1, threads=backend.threads)
        (network,) = training("update", large, backend)
        *_, updates = _run(network, together, REPEATS, now)
        found.update.append(network.bandwidth(updates))
    return found


def _matrix(classes: int, shape: tuple[int, ...]) -> Linear:
    return Linear(classes)


def _networks(backend: Backend) -> Iterator[MeasuredModel]:
    """Create the networks with layers of many classes."""
    return (_passes(backend, *net) for net in _nets())


def _nets() -> Iterator[tuple[str, Net, tuple[int, ...], int]]:
    for channels, size in MAPS.items():
        batch = max(ELEMENTS // (channels * size * size), 1)
        shape = (size, size, channels)
        parts: list[Layer] = []
        for kernel, stride in ((3, 1), (3, 1), (1, 1), (3, 2), (1, 1)):
            conv = Conv2d(channels, kernel, stride=stride, padding=kernel // 2, bias=False)
            parts += [conv, BatchNorm(), ReLU()]
        net = Sequential(*parts)
        yield f"convolutions of {channels} channels with norms", net, shape, batch
        net = Sequential(
            *(Conv2d(channels, k, padding="same") for k in (1, 3, 3)),
            Conv2d(channels, 3, stride=2, padding=1),
        )
        yield f"convolutions of {channels} channels", net, shape, batch
    for channels, size in ((32, 28), (256, 14)):
        batch = max(ELEMENTS // (channels * size * size), 1)
        net = Sequential(*(Conv2d(channels, 3, padding=1, groups=channels) for _ in range(3)))
        yield f"depthwise convolutions of {channels} channels", net, (size, size, channels), batch
    net = Sequential(Conv2d(16, 3, padding=1, bias=False), BatchNorm(), ReLU(), Conv2d(16, 1))
    yield "convolution of small images", net, (32, 32, 3), 32
    net = Sequential(Conv2d(64, 7, stride=2, padding=3), MaxPool2d(3, 2))
    yield "convolution of images", net, (224, 224, 3), 2
    net = Sequential(*(Linear(n) for n in (64, 64, 512, 512, 2048, 2048)))
    yield "matrices", net, (64,), 64
    net = Sequential(
        *(BatchNorm(), ReLU(), Dropout(0.5), MaxPool2d(2), AvgPool2d(3, 1, padding=1)),
        *(GroupNorm(4), BatchNorm(), Dropout(0.5)),
    )
    yield "norms, pools and elementwise layers", net, (32, 32, 16), 64


Times = list[tuple[Layer, str, list[float]]]


def _run(
    network: MeasuredModel,
    together: Callable[[], object],
    repeats: int,
    now: Callable[[], float],
) -> tuple[Times, list[float], list[float]]:
    """Return the times of each layer and direction, of steps, and of updates."""
    clock, steps, updates = network.clock, [], []
    clock.now = now
    for step in range(2 + repeats):
        if step == 2:
            clock.times.clear()
        together()
        clock.times["update", "phase"].clear()
        start = now()
        network.step()
        steps.append(now() - start)
        updates.append(sum(clock.times["update", "phase"]))
    layers = {node.name: node.layer for node in network.model.graph.nodes}
    times = [
        (layers[name], kind, own) for (name, kind), own in clock.times.items() if name in layers
    ]
    return times, steps[2:], updates[2:]
