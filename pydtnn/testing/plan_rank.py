"""Training steps of a network on one rank of a mesh, or serially."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pydtnn.comm import Serial
from pydtnn.data import ArrayDataset
from pydtnn.kernels import create_backend
from pydtnn.layers import Block, Layer, Sequential, StepContext
from pydtnn.layers.base import Shape
from pydtnn.layers.blocks import Net
from pydtnn.layers.collectives import BATCH, Pending, Sum
from pydtnn.layers.parameters import Part
from pydtnn.layers.statistics import RUNNING
from pydtnn.model import Model
from pydtnn.model.execution import CollectiveCall
from pydtnn.model.partition import Plan
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
from pydtnn.parallel.mesh import Mesh
from pydtnn.testing.plan_trace import Trace, Traced
from pydtnn.training.examination import start_equal
from pydtnn.training.trainer import Trainer
from pydtnn.utils.split import even_cut

STEPS = 3
EVALUATION = STEPS
"""Number of the forward pass without training after the last step."""

BATCHES = 3
"""Batches of the data set with which a trainer is checked; another one has a single sample."""

AnyPlan = Plan | Mapping[str, Any] | str | None
Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Problem:
    """A network, and the same random data for every model of it.

    Attributes
    ----------
    net : callable
        Returns new layers.
    input_shape : tuple of int, or tuple of such tuples
    plan : Plan, mapping, str or None
    backend : str
    batch : int
        Samples of a step, over all ranks of the axis "data".
    seed : int
    prepare : callable, optional
        Called with each model before it is used.
    """

    net: Callable[[], Net]
    input_shape: Shape | Sequence[Shape]
    plan: AnyPlan
    backend: str
    batch: int
    seed: int
    prepare: Callable[[Model], Any] | None

    def model(self, mesh: Mesh | None, *, fuse: bool, input_gradient: bool = True) -> Model:
        """Construct a model in float64, for the ranks of a mesh or one rank."""
        model = Model(
            self.net(),
            self.input_shape,
            backend=create_backend(self.backend, threads=1, tuning="fixed"),
            dtype="float64",
            seed=self.seed,
            input_gradient=input_gradient,
            fuse=fuse,
            plan=None if mesh is None else self.plan,
            mesh=mesh,
        )
        if self.prepare is not None:
            self.prepare(model)
        return model

    def rows(self, mesh: Mesh | None) -> slice:
        """Return the samples of this rank: even parts along the axis "data"."""
        if mesh is None:
            return slice(0, self.batch)
        ranks, place = mesh.shape["data"], mesh.position["data"]
        return slice(*(even_cut(self.batch, ranks, p) for p in (place, place + 1)))

    def inputs(self, step: int, shapes: Sequence[Shape], rows: slice) -> Arrays:
        """Return a rank's inputs of a step."""
        return self._normal(step, shapes, rows)

    def gradients(self, step: int, shapes: Sequence[Shape], rows: slice) -> Arrays:
        """Return the gradient of the loss with respect to a rank's outputs."""
        return tuple(array / self.batch for array in self._normal(STEPS + 1 + step, shapes, rows))

    def _normal(self, stream: int, shapes: Sequence[Shape], rows: slice) -> Arrays:
        rng = np.random.default_rng([self.seed, stream])
        return tuple(rng.normal(size=(self.batch, *shape))[rows].copy() for shape in shapes)

    def dataset(self, model: Model) -> ArrayDataset:
        """Return samples and targets for a model of the whole network."""
        rng = np.random.default_rng([self.seed, 2 * EVALUATION + 1])
        samples = BATCHES * self.batch + 1
        x, y = (
            tuple(rng.normal(size=(samples, *shape)) for shape in shapes)
            for shapes in (model.input_shapes, model.output_shapes)
        )
        return ArrayDataset(x if len(x) > 1 else x[0], y if len(y) > 1 else y[0])

    def context(self, step: int, rows: slice) -> StepContext:
        """Return the settings of a rank's forward pass."""
        samples = np.arange(self.batch)[rows]
        return StepContext(step != EVALUATION, seed=self.seed, epoch=step, samples=samples)


def factory_of(net: Net | Sequence[Net] | Callable[[], Net | Sequence[Net]]) -> Callable[[], Net]:
    """Return a function that returns new layers.

    Raises
    ------
    TypeError
        If `net` is neither a layer, block, list of them nor a function.
    """
    if isinstance(net, Layer | Block | list | tuple):
        return lambda: _joined(copy.deepcopy(net))
    if not callable(net):
        raise TypeError(
            "check_plan: expected a layer, a block, a list of them or a function that returns "
            f"one, got {net!r}"
        )
    return lambda: _joined(net())


def _joined(net: Any) -> Net:
    made: Net = Sequential(*net) if isinstance(net, list | tuple) else net
    return made


LR, MOMENTUM = 0.01, 0.9
NOISE = 0.1
"""Deviation of the changes of initial parameters."""

KINDS = ("initial value", "output", "gradient of input", "gradient", "statistic", "parameter")
"""What is compared, in the order in which a step computes it."""

TRAINED = ("loss", "norm of the gradient", "parameter")
"""What is compared after the steps of a trainer."""

TRAINER_STEPS = 10
"""Steps of a trainer: two epochs and a half, of which each ends with a batch of one sample."""

PARTS = 2
"""Micro-batches of a rank in these steps, if its batch has so many samples."""

DECAY = 1e-3


@dataclass
class Own:
    """An array of a rank, and its part of the whole array.

    Attributes
    ----------
    array : ndarray
    part : Part or None
    rows : slice or None
        The samples of the rank, for arrays with a batch axis.
    """

    array: np.ndarray
    part: Part | None = None
    rows: slice | None = None

    def of(self, whole: np.ndarray, position: Mapping[str, int]) -> np.ndarray:
        """Return the same part of another array."""
        if self.part is None:
            return whole if self.rows is None else whole[self.rows]
        shape = self.part.view or self.part.shape
        cuts = {cut.dim: cut.range(position) for cut in self.part.cuts}
        part = whole.reshape(shape)[tuple(cuts.get(d, slice(None)) for d in range(len(shape)))]
        return part.reshape(*part.shape[: whole.ndim - 1], -1)  # a view has more axes


@dataclass
class Course:
    """Results of a rank.

    Attributes
    ----------
    position : dict of str to int
        Position in the mesh.
    values : dict of (int, str) to dict of str to Own
        For each step and kind (`KINDS`), arrays by name.
    messages, bytes : float
        Messages sent per training step, and B.
    trace : list of Traced
        What each layer computed in one step, if that was asked for.
    """

    position: dict[str, int]
    values: dict[tuple[int, str], dict[str, Own]] = field(default_factory=dict)
    messages: float = 0
    bytes: float = 0
    trace: list[Traced] = field(default_factory=list)


class Rank:
    """A rank's model.

    Parameters
    ----------
    problem : Problem
    mesh : Mesh or None
        None trains serially.
    fuse, input_gradient : bool
        Options of the model.
    at : callable, optional
        Called with the name of each layer that communicates, before it does, and with what else
        the rank does.
    """

    def __init__(
        self,
        problem: Problem,
        mesh: Mesh | None,
        *,
        fuse: bool,
        input_gradient: bool = True,
        at: Callable[[str], Any] | None = None,
    ) -> None:
        self.problem, self.mesh, self.at = problem, mesh, at or (lambda name: None)
        self.at("the construction of the model")
        self.model = problem.model(mesh, fuse=fuse, input_gradient=input_gradient)
        self.rows = problem.rows(mesh)
        self.joint = mesh is not None and mesh.shape["data"] > 1
        self.optimizer = SGD(LR, momentum=MOMENTUM)
        self.optimizer.bind(self.model.backend, self.model.buffers)
        self.course = Course({} if mesh is None else mesh.position)
        self.samples = 0

    def run(self, traced: int | None = None) -> Course:
        """Train and evaluate; record what all layers compute in the step `traced`."""
        course, mesh = self.course, self.mesh
        self._keep(0, "initial value", self._parameters())
        self._randomize()
        for step in range(STEPS):
            self._step(step, Trace(self.model, self.rows) if step == traced else None)
        if mesh is not None:
            course.messages = mesh.comm.traffic.messages / STEPS
            course.bytes = mesh.comm.traffic.bytes / STEPS
        trace = Trace(self.model, self.rows) if traced == EVALUATION else None
        self._forward(EVALUATION, trace)
        return course

    def _step(self, step: int, trace: Trace | None) -> None:
        model = self.model
        model.statistics.begin_step()
        saved = self._forward(step, trace)
        dys = self._output_gradients(step)
        if trace is not None:
            trace.record_gradients(self.course.position)
        (dx,) = model.backward_shards(
            [dys if len(dys) > 1 else dys[0]],
            [saved],
            communicate=self.communicate,
            joint=self.joint,
        )
        if trace is not None:
            trace.done = True
        names = [node.name for node in model.graph.inputs]
        if model.stage is not None:
            self.at("the gradients for the stage before")
            model.stage.send_gradients(dx).wait()
            names, dx = [], ()
        self._keep(step, "gradient of input", self._batched(names, _as_tuple(dx)))
        self._sum_gradients()
        self._keep(step, "gradient", self._gradients())
        model.statistics.fold()
        self._keep(step, "statistic", self._statistics())
        self.optimizer.step()
        model.refresh()
        self._keep(step, "parameter", self._parameters())

    def _output_gradients(self, step: int) -> Arrays:
        """Return the gradients of the outputs: of the model, or received from the stage after."""
        model, stage = self.model, self.model.stage
        if stage is None or stage.last:
            return self.problem.gradients(step, [*model.output_shapes], self.rows)
        self.at("the gradients of the stage after")
        return stage.receive_gradients(self.samples).wait()

    def _forward(self, step: int, trace: Trace | None) -> Any:
        model, problem, stage = self.model, self.problem, self.model.stage
        xs = problem.inputs(step, model.input_shapes, self.rows)
        self.samples = len(xs[0])
        if stage is not None:
            self.at("the values of the stage before")
            xs = stage.inputs(xs, stage.receive_values(self.samples).wait())
        after = None
        if trace is not None:
            trace.record_inputs(xs, self.course.position)
            after = trace.after_node(self.course.position)
            self.course.trace = trace.records
        ((y, saved),) = model.forward_shards(
            [xs if len(xs) > 1 else xs[0]],
            [problem.context(step, self.rows)],
            communicate=self.communicate,
            joint=self.joint and step != EVALUATION,
            keep=step != EVALUATION,
            after_node=after,
        )
        outputs = _as_tuple(y)
        if stage is not None:
            self.at("the values for the stage after")
            stage.send_values(y).wait()
            outputs = outputs if stage.last else ()
        names = [f"output {i}" for i in range(len(outputs))]
        self._keep(step, "output", self._batched(names, outputs))
        return saved

    def communicate(self, asked: Sequence[CollectiveCall]) -> Sequence[Pending]:
        """Start collectives; sums over the batch are those along the axis "data"."""
        assert self.mesh is not None
        self.at(asked[0][0].name)
        return self.mesh.communicate([(node, _along_data(op)) for node, op in asked])

    def _randomize(self) -> None:
        """Change all parameters, as some are initially 0 or 1."""
        for name, p in sorted(self.model.parameters.items()):
            rng = np.random.default_rng([self.problem.seed, zlib.crc32(name.encode())])
            noise = NOISE * rng.normal(size=p.whole_shape)
            p.master += Own(p.master, p.part).of(noise, self.course.position)
        self.model.refresh()

    def _sum_gradients(self) -> None:
        """Sum the gradients over the axes of their groups."""
        if self.mesh is None:
            return
        for bucket in self.model.buckets:
            self.at(f"the sum of the gradients of {bucket.parameters[0].name}")
            for axis in reversed(bucket.group.split("+")):
                self.mesh.group(axis).allreduce(bucket.grads)

    def _keep(self, step: int, kind: str, arrays: dict[str, Own]) -> None:
        self.course.values[step, kind] = arrays

    def _batched(self, names: Sequence[str], arrays: Arrays) -> dict[str, Own]:
        pairs = zip(names, arrays, strict=True)
        return {n: Own(a.copy(), rows=self.rows) for n, a in pairs if a is not None}

    def _parameters(self) -> dict[str, Own]:
        return {n: Own(p.master.copy(), p.part) for n, p in self.model.parameters.items()}

    def _gradients(self) -> dict[str, Own]:
        parameters = self.model.parameters.items()
        return {n: Own(p.grad.copy(), p.part) for n, p in parameters if not p.frozen}

    def _statistics(self) -> dict[str, Own]:
        return {
            f"{s.name}.{what}": Own(array.copy(), s.part)
            for s in self.model.statistics.statistics
            for what, array in zip(RUNNING, (s.mean, s.variance), strict=True)
        }


class TrainedRank:
    """A rank's trainer: its batches, micro-batches, sums of gradients, clipping and updates.

    Batch norm normalises each micro-batch, or the whole batch with `sync`. Serial training computes
    the micro-batches of all ranks.

    Parameters
    ----------
    problem : Problem
    mesh : Mesh or None
        None trains serially.
    data : ArrayDataset
    ranks : int
        Ranks along the axis "data", also of the mesh with which serial training is compared.
    clip : float
        Largest norm of the gradient.
    sync : bool
    """

    def __init__(
        self,
        problem: Problem,
        mesh: Mesh | None,
        data: ArrayDataset,
        *,
        ranks: int,
        clip: float,
        sync: bool,
    ) -> None:
        model = problem.model(mesh, fuse=True, input_gradient=False)
        parts = PARTS if problem.batch >= PARTS * ranks else 1
        own = parts if mesh is not None else parts * ranks
        name = "accumulation" if model.stage is None else "micro_batches"
        split: dict[str, Any] = {name: own}
        outputs = len(data.y) if isinstance(data.y, tuple) else 1
        self.trainer = Trainer(
            model,
            SGD(LR, momentum=MOMENTUM, weight_decay=DECAY, clip_norm=clip),
            loss=["mse"] * outputs if outputs > 1 else "mse",
            metrics=None if outputs > 1 else (),
            exchange=AllReduce(Serial() if mesh is None else mesh.data),
            mesh=mesh,
            sync_batch_norm=sync,
            progress=False,
            **split,
        )
        self.loader = self.trainer.setup.loader(
            data, problem.batch, parts * ranks, seed=problem.seed, prefetch=0
        )
        self.course = Course({} if mesh is None else mesh.position)

    def run(self) -> Course:
        """Train."""
        trainer, values = self.trainer, self.course.values
        start_equal(trainer.setup)
        for step in range(TRAINER_STEPS):
            epoch, index = divmod(step, len(self.loader))
            totals = trainer.train_step(next(self.loader.epoch(epoch, start=index)), epoch)
            norm = np.array([trainer.optimizer.gradient_norm], float)
            parameters = trainer.model.parameters.items()
            found = (
                {"loss": Own(np.array([totals.means()["loss"]]))},
                {"norm": Own(norm)},
                {name: Own(p.master.copy(), p.part) for name, p in parameters},
            )
            values.update({(step, kind): own for kind, own in zip(TRAINED, found, strict=True)})
        return self.course


def train_serially(
    problem: Problem, data: ArrayDataset, ranks: int, *, sync: bool
) -> tuple[Course, float]:
    """Return the results of serial training, and the norm to which it clips every other step."""
    options: dict[str, Any] = {"ranks": ranks, "sync": sync}
    free = TrainedRank(problem, None, data, clip=1e300, **options).run()
    norms = [own["norm"].array for (_, kind), own in free.values.items() if kind == TRAINED[1]]
    clip = float(np.median(norms))
    return TrainedRank(problem, None, data, clip=clip, **options).run(), clip


def _along_data(op: Any) -> Any:
    if not isinstance(op, Sum) or BATCH not in op.axes:
        return op
    return Sum(op.array, tuple("data" if axis == BATCH else axis for axis in op.axes))


def _as_tuple(arrays: Any) -> Arrays:
    return arrays if isinstance(arrays, tuple) else (arrays,)
