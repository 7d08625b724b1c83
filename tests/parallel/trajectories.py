"""What a network does in three steps of training and afterwards; how alike two such records are.

Two ways to compute the same differ by rounding, and how far that shows depends on the network:
batch norm over a few rows enlarges it, and at a ReLU's corner it decides over a gradient. So where
results differ by more than rounding, the bound is measured: the reference is run again with every
layer's output changed a little. Networks that change much by that are not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis
import numpy as np

from pydtnn.layers import StepContext
from pydtnn.layers.collectives import Pending, Sum
from pydtnn.model import Model
from pydtnn.model.execution import CollectiveCall
from pydtnn.model.graph import Node
from pydtnn.optimizers import SGD
from tests.random_networks import NUMPY, Network

Record = dict[str, np.ndarray]

STEPS, LR, MOMENTUM = 3, 0.01, 0.9
ROUNDING = {"float64": 2.3e-16, "float32": 1.2e-7}
NOISE = {"float64": 1e-9, "float32": 1e-5}
"""By how much outputs are changed, relative to themselves: much more than rounding."""
FRAGILE = 1e3
"""Results that change by so many times as much make a network worthless to compare."""
LARGEST = 1e12
"""Of the values to compare: training that diverges further soon leaves the range of float32."""


def randomize(model: Model, network: Network) -> None:
    """Let no parameter and no running statistic be what it is at first."""
    rng, backend = np.random.default_rng(network.seed), model.backend
    for key in sorted(model.parameters):
        p = model.parameters[key]
        p.master += backend.asarray(0.2 * rng.normal(size=p.shape), p.buffer.dtype)
    for s in model.statistics.statistics:
        s.mean += 0.1
        s.variance *= 1.3
    model.refresh()


class Data:
    """Inputs and gradients of outputs, the same for every model of a network.

    They are numbers of float32, so that they are the same in every type.
    """

    def __init__(self, network: Network) -> None:
        self.network = network

    def inputs(self, step: int) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng([self.network.seed, step])
        return tuple(self._normal(rng, shape) for shape in self.network.inputs)

    def gradients(self, step: int, shapes: list[tuple[int, ...]]) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng([self.network.seed, step, 1])
        return tuple(self._normal(rng, shape) / self.network.batch for shape in shapes)

    def context(self, step: int, training: bool, rows: slice = slice(None)) -> StepContext:
        samples = np.arange(self.network.batch)[rows]
        return StepContext(training=training, seed=3, epoch=step, samples=samples)

    @property
    def cut(self) -> int:
        """Where to cut the batch in two, neither of them empty."""
        return 1 + self.network.seed % (self.network.batch - 1)

    def _normal(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return rng.normal(size=(self.network.batch, *shape)).astype("float32").astype("float64")


class Recorder:
    """Runs a model and writes down all that can be seen of it."""

    def __init__(self, model: Model, network: Network, noise: float = 0, seed: int = 0) -> None:
        self.model = model
        self.backend = model.backend
        self.data = Data(network)
        self.noise = noise
        self.rng = np.random.default_rng(seed)
        self.record: Record = {}
        self.optimizer = SGD(LR, momentum=MOMENTUM)
        self.optimizer.bind(model.backend, model.buffers)

    def keep(self, name: str, arrays: Any) -> None:
        for i, array in enumerate(arrays if isinstance(arrays, tuple) else (arrays,)):
            if array is not None:
                self.record[f"{name}{i}"] = self.backend.to_numpy(array).astype("float64")

    def inputs(self, step: int) -> tuple[Any, ...]:
        given = (x.copy() for x in self.data.inputs(step))
        return tuple(self.backend.asarray(x, self.model.dtype) for x in given)

    def gradients(self, step: int) -> tuple[Any, ...]:
        given = self.data.gradients(step, [node.shape for node in self.model.graph.outputs])
        return tuple(self.backend.asarray(dy, self.model.dtype) for dy in given)

    def disturb(self, node: Node, y: Any) -> None:
        if self.noise:
            y *= 1 + (self.noise * self.rng.normal(size=y.shape)).astype(y.dtype)

    def run(self, name: str, step: int, training: bool, accumulate: bool = False) -> None:
        xs, context = self.inputs(step), self.data.context(step, training)
        before = [x.copy() for x in xs]
        ys, saved = self.model.forward(xs, context, after_node=self.disturb)
        self.keep(f"{name} y", ys)
        dys = self.gradients(step)
        self.keep(f"{name} dx", self.model.backward(dys, saved, accumulate=accumulate))
        if not self.noise:
            assert all(np.array_equal(x, y) for x, y in zip(xs, before, strict=True)), "changed x"
        self.keep_gradients(name)

    def keep_gradients(self, name: str) -> None:
        for key, p in self.model.parameters.items():
            self.keep(f"{name} gradient {key} ", p.grad)

    def update(self, name: str) -> None:
        self.model.statistics.fold()
        self.optimizer.step()
        for key, value in self.model.state().items():
            self.keep(f"{name} state {key} ", value)

    def predict(self, name: str, step: int) -> None:
        context = StepContext(training=False)
        ys, _ = self.model.forward(self.inputs(step), context, keep=False, after_node=self.disturb)
        self.keep(f"{name} y", ys)


def observe(
    model: Model, network: Network, *, micro: int = 1, noise: float = 0, seed: int = 0
) -> Record:
    """Train three steps, evaluate with gradients, predict; return all that can be seen.

    `micro` is the number of micro-batches of the second step; `noise` disturbs the output of every
    layer.
    """
    recorder = Recorder(model, network, noise, seed)
    for step in range(STEPS):
        for part in range(micro if step == 1 else 1):
            recorder.run(f"step{step}.{part}", STEPS * part + step, True, accumulate=part > 0)
        recorder.update(f"step{step}")
    recorder.run("evaluation", 0, False)
    recorder.predict("prediction", 1)
    return recorder.record


def together(model: Model, network: Network, cut: int) -> Record:
    """Do the same with each batch cut in two shards that are normalised together."""
    recorder, data = Recorder(model, network), Data(network)
    shards = (slice(cut), slice(cut, None))

    def communicate(calls: Sequence[CollectiveCall]) -> list[Pending]:
        first, *rest = (op.array for _, op in calls if isinstance(op, Sum))
        total = sum(rest, first)
        return [Pending(None, lambda: total)] * len(calls)

    def join(parts: list[Any]) -> Any:
        if not isinstance(parts[0], tuple):
            parts = [(part,) for part in parts]
        pairs = zip(*parts, strict=True)
        return tuple(None if a is None else np.concatenate([a, b]) for a, b in pairs)

    for step in range(STEPS):
        xs, dys = recorder.inputs(step), recorder.gradients(step)
        results = model.forward_shards(
            [tuple(x[rows] for x in xs) for rows in shards],
            [data.context(step, True, rows) for rows in shards],
            communicate=communicate,
            joint=True,
        )
        recorder.keep(f"step{step}.0 y", join([y for y, _ in results]))
        dxs = model.backward_shards(
            [tuple(dy[rows] for dy in dys) for rows in shards],
            [saved for _, saved in results],
            communicate=communicate,
            joint=True,
        )
        recorder.keep(f"step{step}.0 dx", join(dxs))
        recorder.keep_gradients(f"step{step}.0")
        recorder.update(f"step{step}")
    recorder.run("evaluation", 0, False)
    recorder.predict("prediction", 1)
    return recorder.record


@dataclass
class Expected:
    """A record of the plain reference, and how far others may be from each of its entries.

    Most agree to within rounding. Only where they do not, the reference is run again, disturbed, to
    measure how far rounding can show.
    """

    network: Network
    micro: int
    dtype: str
    record: Record

    @classmethod
    def of(cls, network: Network, *, micro: int = 1, dtype: str = "float64") -> Expected:
        """Run the reference in float64; `dtype` is that of the others.

        To be called before them, since it rejects a network whose training diverges.
        """
        expected = cls(network, micro, dtype, {})
        expected.record = expected.run()
        if max(scales(expected.record).values()) > LARGEST:
            hypothesis.reject()
        return expected

    def run(self, noise: float = 0, seed: int = 0) -> Record:
        model = self.network.model(NUMPY, fuse=False)
        randomize(model, self.network)
        with np.errstate(all="ignore"):  # what is not finite is rejected
            return observe(model, self.network, micro=self.micro, noise=noise, seed=seed)

    def assert_alike(self, given: Record, other: Record | None = None) -> None:
        """Compare with another record, by default with the reference's.

        Rejects the network if they are not alike and it is fragile.
        """
        expected = self.record if other is None else other
        # Sums have some hundred terms and networks some dozen layers; and what batch norm over two
        # rows hands back is the little that is left of gradients which cancel.
        rounding = ROUNDING[self.dtype]
        unit = rounding * (1e4 if self.dtype == "float64" else 1e3)
        sizes, off = scales(expected), distances(given, expected)
        if all(distance <= unit * sizes[key] for key, distance in off.items()):
            return
        changes = self.changes()
        if not all(changes[key] <= FRAGILE * size for key, size in sizes.items()):
            hypothesis.reject()
        for key, distance in off.items():
            allowed = unit * sizes[key] + 100 * rounding * changes[key]
            assert distance <= allowed, f"{key}: off by {distance:.2g}, allowed {allowed:.2g}"

    def changes(self) -> dict[str, float]:
        """By how much entries change in units of the noise that the type would make."""
        noise, changes = NOISE[self.dtype], dict.fromkeys(self.record, 0.0)
        for seed in range(2):  # one may miss a corner by chance
            for key, distance in distances(self.run(noise, seed), self.record).items():
                changes[key] = max(changes[key], distance / noise)
        return changes


def distances(given: Record, expected: Record) -> dict[str, float]:
    assert given.keys() == expected.keys(), given.keys() ^ expected.keys()
    return {key: _most(given[key] - array) for key, array in expected.items()}


def scales(record: Record) -> dict[str, float]:
    """Size of each entry; all gradients of a step count as large as the largest of them.

    Those of the inputs are among them: batch norm over two rows may leave a millionth of what it is
    given, with the rounding of all of it.
    """
    group = {key: _group(key) for key in record}
    largest: dict[str, float] = {}
    for key, array in record.items():
        largest[group[key]] = max(largest.get(group[key], 0.0), _most(array))
    return {key: max(largest[group[key]], 1e-30) for key in record}


def _group(key: str) -> str:
    step, what, *_ = key.split()
    return f"{step} gradients" if what == "gradient" or what.startswith("dx") else key


def _most(array: np.ndarray) -> float:
    worst = float(np.abs(array).max(initial=0))
    return worst if np.isfinite(worst) else np.inf
