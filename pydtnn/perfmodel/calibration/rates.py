"""Achieved rates of the layers' kernels: small networks, run forward and backward."""

from __future__ import annotations

import copy
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

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
from pydtnn.perfmodel.calibration.sample import excess, processor_clock
from pydtnn.perfmodel.compute.classes import classify
from pydtnn.perfmodel.workload import Rank, Workload
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
    """Rates and times of layers.

    Attributes
    ----------
    rates : dict of str to float
        In flop/s, by class, size and direction, see `KernelClass.entry`.
    bandwidths : dict of str to float
        In B/s, by class and direction.
    call : float
        Time of Python per pass of a layer, in s.
    spreads : dict of str to float
        Excess of the median over the shortest time of each network.
    """

    rates: dict[str, float] = field(default_factory=dict)
    bandwidths: dict[str, float] = field(default_factory=dict)
    call: float = 0.0
    spreads: dict[str, float] = field(default_factory=dict)


class _Clock(Observer):
    """Time of each pass of each node of a step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.times: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._open: list[tuple[str, str, float]] = []

    def begin(self, kind: Kind, name: str, *, nbytes: int = 0, bucket: int = -1) -> None:
        self._open.append((kind.name.lower(), name, self._clock()))

    def end(self) -> None:
        kind, name, start = self._open.pop()
        self.times[name, kind].append(self._clock() - start)


Network = tuple[str, Net, tuple[int, ...], int]
"""Name, network, shape of a sample and samples of a step."""


def measure_rates(
    backend: Backend,
    together: Callable[[], object] = lambda: None,
    networks: Iterable[Network] | None = None,
    repeats: int = REPEATS,
) -> Measured:
    """Measure the layers' kernels with the threads of a backend.

    Parameters
    ----------
    backend : Backend
    together : callable
        Called before each step, such as a barrier of ranks that share a host.
    networks : iterable, optional
        Whose layers are measured; by default networks with layers of many classes.
    repeats : int
        Steps of each network.
    """
    found = Measured()
    tiny = Sequential(*(part for _ in range(8) for part in (Linear(4), Dropout(0.0), ReLU())))
    times, _ = _run(tiny, TINY, 2, backend, together, 30)
    found.call = statistics.median(min(own) for _, own in times.values())
    flops: dict[str, list[float]] = defaultdict(list)
    moved: dict[str, list[float]] = defaultdict(list)
    for title, net, shape, batch in _networks() if networks is None else networks:
        times, found.spreads[title] = _run(net, shape, batch, backend, together, repeats)
        for (layer, direction), own in times.values():
            cost = layer.cost(batch)
            work, nbytes = cost.flops_forward, cost.bytes_forward
            if direction == "backward":
                work, nbytes = cost.flops_backward, cost.bytes_backward
            kind, seconds = classify(layer), max(min(own) - found.call, 1e-7)
            if kind.size and work:
                flops[kind.entry(direction)].append(work / seconds)
            elif nbytes:
                moved[kind.entry(direction)].append(nbytes / seconds)
    found.rates = {name: statistics.median(own) for name, own in flops.items()}
    found.bandwidths = {name: statistics.median(own) for name, own in moved.items()}
    return found


def update_bandwidth(threads: int) -> float:
    """Return the bandwidth of updates by SGD with momentum, in B/s: five accesses a parameter."""
    clock = _Clock(processor_clock(threads))
    rank = Rank(
        Workload(_matrix, (WIDTH,), classes=WIDTH, batch=1, threads=threads),
        Serial(),
        observers=[clock],
    )
    seconds = []
    for _ in range(2 + REPEATS):
        clock.times.clear()
        rank.trainer.train_step(rank.batch)
        seconds.append(sum(clock.times["update", "phase"]))
    numbers = sum(p.size for p in rank.trainer.model.parameters.values())
    return 5 * 4 * numbers / min(seconds[2:])


def _matrix(classes: int, shape: tuple[int, ...]) -> Linear:
    return Linear(classes)


def _networks() -> Iterator[Network]:
    """Return name, network, input and batch of everything that is measured."""
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


Times = dict[tuple[str, str], tuple[tuple[Layer, str], list[float]]]


def _run(
    net: Net,
    shape: tuple[int, ...],
    batch: int,
    backend: Backend,
    together: Callable[[], object],
    repeats: int,
) -> tuple[Times, float]:
    """Return the times of each layer and direction, and the spread of those of the step."""
    parts = net if isinstance(net, Sequential) else ()
    fuse = not any(
        isinstance(part, GroupNorm) for part in parts
    )  # that network is of single layers
    model = Model(copy.deepcopy(net), shape, backend=backend, fuse=fuse, input_gradient=True)
    rng = np.random.default_rng(0)
    xs = example_inputs(model.graph, model.input_shapes, batch, rng)
    shapes = [(batch, *shape) for shape in model.output_shapes]
    gradients = [rng.standard_normal(shape).astype("float32") for shape in shapes]
    context = StepContext(training=True, samples=np.arange(batch))
    steps = []
    clock = _Clock(processor_clock(backend.threads))
    for step in range(2 + repeats):
        if step == 2:
            model.observer = clock
        together()
        start = time.perf_counter()
        _, saved = model.forward(xs, context)
        dy = tuple(gradient.copy() for gradient in gradients)
        model.backward(dy if len(dy) > 1 else dy[0], saved)
        steps.append(time.perf_counter() - start)
    layers = {node.name: node.layer for node in model.graph.nodes}
    times: Times = {
        key: ((layers[key[0]], key[1]), own) for key, own in clock.times.items() if key[0] in layers
    }
    return times, excess(steps[2:])
