"""Training of a small problem on each rank, and the comparison of its steps with other runs.

`check_plan` and `check_scheme` train the same `Problem` serially and on ranks that are threads,
under several `Conditions`. A `Trajectory` has what a rank computes in each step.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from pydtnn.comm import Communicator, Serial, run_threads
from pydtnn.comm.wrapper import Delayed
from pydtnn.data import ArrayDataset
from pydtnn.kernels import create_backend
from pydtnn.layers.base import Shape
from pydtnn.layers.blocks import Net
from pydtnn.layers.parameters import ParameterPart
from pydtnn.layers.statistics import RUNNING
from pydtnn.losses import Loss
from pydtnn.model import Model
from pydtnn.model.partition import Plan
from pydtnn.model.pipeline import Schedule
from pydtnn.optimizers import SGD, Optimizer
from pydtnn.parallel.exchange import AllReduce, GradientExchange, gather_parameters, make_equal
from pydtnn.parallel.mesh import Mesh
from pydtnn.tools.testing.calls import CallLog, CallRecorder, Injected
from pydtnn.tools.testing.trace import Records, StepTrace, largest
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint
from pydtnn.training.nonfinite import NotFiniteError
from pydtnn.training.preparation import start_equal
from pydtnn.training.trainer import Trainer
from pydtnn.utils.errors import describe
from pydtnn.utils.split import even_cut

SAVED_STEP = 11
"""Step before which a run is saved, and from which it resumes: within an epoch."""

NAN_STEP = 4
"""Step whose loss is NaN if a step is to be abandoned."""

FAILING_STEP = 2
"""Step in which a method of the scheme raises if it is to fail."""

MAX_DELAY_S = 2e-4
"""Longest random delay, in s: long enough for several calls of other ranks."""

SMALL_BYTES = 63
"""Value of every byte of arrays in use: small floats, beside NaN (`CallLog.filler`)."""

MIN_DIFFERENCE = 5e-324
"""Difference of arrays that have other bytes: 0.0 and -0.0 are equal."""

NOISE = 0.1
"""Deviation of the changes of initial parameters, as some are 0 or 1."""

AnyPlan = Plan | Mapping[str, Any] | str | None
Scheme = Callable[[Communicator], GradientExchange]


@dataclass(frozen=True)
class Problem:
    """A network, its data and its training.

    Attributes
    ----------
    net : callable
        Returns new layers.
    input_shape : tuple of int, or tuple of such tuples
    data : ArrayDataset
    batch : int
        Global batch size.
    steps : int
        Steps of training.
    optimizer : callable
        Creates the rule.
    loss : sequence of Loss or str
        One for each output.
    exchange : callable
        Creates the parallel scheme from a communicator.
    plan : Plan, mapping, str or None
    pipeline_schedule : Schedule or str
    backend : str
    seed : int
        Seed of the initial weights and of the order of the samples.
    prepare : callable, optional
        Called with each model before it is used.
    """

    net: Callable[[], Net]
    input_shape: Shape | Sequence[Shape]
    data: ArrayDataset
    batch: int
    steps: int
    optimizer: Callable[[], Optimizer] = SGD
    loss: Sequence[Loss | str] = ("cross_entropy",)
    exchange: Scheme = AllReduce
    plan: AnyPlan = None
    pipeline_schedule: str | Schedule = "1f1b"
    backend: str = "numpy"
    seed: int = 0
    prepare: Callable[[Model], Any] | None = None

    def model(self, mesh: Mesh | None, conditions: Conditions) -> RecordedModel:
        """Construct a model in float64, for the ranks of a mesh or one rank."""
        model = RecordedModel(
            self.net(),
            self.input_shape,
            backend=create_backend(self.backend, threads=1, tuning="fixed"),
            dtype="float64",
            seed=self.seed,
            bucket_bytes=conditions.bucket_bytes,
            input_gradient=conditions.input_gradient,
            fuse=conditions.fuse,
            plan=None if mesh is None else self.plan,
            mesh=mesh,
            pipeline_schedule=self.pipeline_schedule,
        )
        if self.prepare is not None:
            self.prepare(model)
        return model


@dataclass(frozen=True)
class Conditions:
    """How a problem is trained.

    Attributes
    ----------
    fuse, input_gradient : bool
    bucket_bytes : int or None
        Options of the model; 1 byte gives one bucket per parameter.
    sync : bool
        Whether batch norm normalises with the statistics of the whole batch of all ranks.
    shards : int
        Parts of a batch that are computed one after the other, over all ranks; at least one each.
    delays : int or None
        Seed of random delays between the ranks.
    nan_step : bool
        Whether the loss of `NAN_STEP` is NaN on the last rank.
    save, resume : path or None
        Folder to which the state before `SAVED_STEP` is saved, or from which the run resumes.
    fails : str or int or None
        Failure on the last rank: a method of the scheme, in `FAILING_STEP`, or the call of its
        communicator with this number, counted from the first step.
    traced : int or None
        Step in which all layers are recorded; `END` is the evaluation.
    """

    fuse: bool = True
    input_gradient: bool = False
    bucket_bytes: int | None = None
    sync: bool = False
    shards: int = 1
    delays: int | None = None
    nan_step: bool = False
    save: Path | None = None
    resume: Path | None = None
    fails: str | int | None = None
    traced: int | None = None


@dataclass
class Local:
    """An array of a rank, and its part of the array of serial training.

    Attributes
    ----------
    array : ndarray
    part : Part or None
    rows : slice or None
        The samples of the rank, for arrays with a batch axis.
    """

    array: np.ndarray
    part: ParameterPart | None = None
    rows: slice | None = None

    def of(self, full: np.ndarray, position: Mapping[str, int]) -> np.ndarray:
        """Return the same part of another array."""
        if self.part is None:
            return full if self.rows is None else full[self.rows]
        shape = self.part.grid
        cuts = {cut.dim: cut.range(position) for cut in self.part.grid_cuts}
        part = full.reshape(shape)[tuple(cuts.get(d, slice(None)) for d in range(len(shape)))]
        return part.reshape(self.part.local_shape(position))

    def place(self, position: Mapping[str, int]) -> tuple[int, ...]:
        """Return the position along the axes of a mesh on which the values depend."""
        cuts = [cut.axis for cut in self.part.cuts] if self.part is not None else []
        axes = (*cuts, *(["data"] if self.rows is not None else []))
        return tuple(position.get(axis, 0) for axis in axes)


END = -1
"""In place of a step: after the last one."""

Key = tuple[int, str]
"""A step, and a kind of arrays."""


@dataclass
class Trajectory:
    """Results of a rank.

    Attributes
    ----------
    position : dict of str to int
        Position in the mesh.
    values : dict of (int, str) to dict of str to Local
        For each step and kind, arrays by name. After a step the kinds are "output", "gradient of
        input", "gradient", "statistic" and "parameter"; before the first "initial value"; at the
        end "output" in evaluation, and "parameter", which are
        averaged if they differ between ranks.
    buckets, parameters, gradient_bytes : int
        Number of buckets and parameters, and bytes of all gradients.
    first_loss, last_loss : float
        Loss of all samples, before the first step and after the last.
    calls : list of str
        Calls of the rank in all steps.
    messages, bytes : int
        Traffic of all steps; bytes in B.
    pending, unmatched : list of str
        Operations that were not complete on the rank at the end of the run, and those of them
        without a counterpart on other ranks.
    trace : dict of (str, str) to Traced
        What each layer computed in the step `Conditions.traced`.
    """

    position: dict[str, int]
    buckets: int
    parameters: int
    gradient_bytes: int
    values: dict[Key, dict[str, Local]] = field(default_factory=dict)
    first_loss: float = 0.0
    last_loss: float = 0.0
    calls: list[str] = field(default_factory=list)
    messages: int = 0
    bytes: int = 0
    pending: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
    trace: Records = field(default_factory=dict)


class RecordedModel(Model):
    """A model that keeps the outputs and the gradients of the inputs of a step.

    Attributes
    ----------
    outputs, gradients : list of tuple of ndarray
        Of each part of the batch, copied.
    trace : Trace or None
        Records all layers.
    """

    outputs: list[tuple[np.ndarray, ...]]
    gradients: list[tuple[np.ndarray, ...]]
    trace: StepTrace | None = None

    def begin(self, trace: StepTrace | None) -> None:
        """Forget what was recorded, and record a step."""
        hooks = self.graph.hooks
        if self.trace in hooks:
            hooks.remove(self.trace)
        if trace is not None:
            hooks.insert(0, trace)
        self.outputs, self.gradients, self.trace = [], [], trace

    def forward_shards(self, xs: Any, contexts: Any, **options: Any) -> list[Any]:
        """Run forward, and record the outputs."""
        if self.trace is not None:
            nodes = self.graph.part(options.get("part")).inputs
            self.trace.record_inputs(nodes, self._own(xs[0]))
            options["after_node"] = self.trace.record_output
        results = super().forward_shards(xs, contexts, **options)
        if options.get("part") in (None, len(self.graph.parts) - 1):
            self.outputs += [self._copy(y) for y, _ in results]
        return results

    def backward_shards(self, dys: Any, residuals: Any, **options: Any) -> list[Any]:
        """Run backward, and record the gradients of the inputs."""
        results = super().backward_shards(dys, residuals, **options)
        self.gradients += [self._copy(dx) for dx in results]
        return results

    def _copy(self, arrays: Any) -> tuple[np.ndarray, ...]:
        arrays = arrays if isinstance(arrays, tuple) else (arrays,)
        return tuple(self.backend.to_numpy(a).copy() for a in arrays if a is not None)


class TrajectoryRank:
    """A rank's trainer.

    Parameters
    ----------
    comm : Communicator
    problem : Problem
    conditions : Conditions
    axes : dict of str to int, optional
        Axes of the mesh; without them the ranks are those of the scheme alone, which start from
        different parameters.
    log : CallLog, optional
        Records the calls and layers of the rank.
    """

    def __init__(
        self,
        comm: Communicator,
        problem: Problem,
        conditions: Conditions,
        axes: Mapping[str, int] | None = None,
        log: CallLog | None = None,
    ) -> None:
        self.problem, self.conditions = problem, conditions
        self.log = log if log is not None else CallLog()
        if conditions.delays is not None:
            comm, self.log.filler = Delayed(comm, conditions.delays, MAX_DELAY_S), SMALL_BYTES
        recording = CallRecorder(comm, self.log)
        self.mesh = Mesh(recording, **axes) if axes else None
        self.model = model = problem.model(self.mesh, conditions)
        self.exchange = problem.exchange(recording if self.mesh is None else self.mesh.data)
        data = self.exchange.comm
        shards = max(conditions.shards, data.size)
        split: Any = {
            "accumulation" if model.pipeline is None else "micro_batches": shards // data.size
        }
        self.trainer = Trainer(
            model,
            problem.optimizer(),
            loss=[*problem.loss] if len(problem.loss) > 1 else problem.loss[0],
            metrics=() if len(problem.loss) == 1 else None,
            exchange=self.exchange,
            mesh=self.mesh,
            sync_batch_norm=conditions.sync,
            progress=False,
            observers=[self.log],
            **split,
        )
        self.loader = self.trainer.setup.loader(
            problem.data,
            problem.batch,
            self.exchange.sums.shards or shards,
            seed=problem.seed,
            prefetch=0,
        )
        self.loader.equal_numbers = self.trainer.setup.equal_numbers
        self.trajectory = Trajectory(
            position={} if self.mesh is None else self.mesh.position,
            buckets=len(model.buckets),
            parameters=sum(p.size for p in model.parameters.values()),
            gradient_bytes=sum(bucket.grads.nbytes for bucket in model.buckets),
        )

    @property
    def is_last(self) -> bool:
        """Whether failures are those of this rank."""
        return self.trainer.comm.rank == self.trainer.comm.size - 1

    def run(self) -> Trajectory:
        """Train from the beginning, or from the checkpoint, to the end."""
        trajectory, trainer, conditions = self.trajectory, self.trainer, self.conditions
        self._start()
        trajectory.first_loss, _ = self._evaluate()
        if self.is_last and isinstance(conditions.fails, int):
            self.log.fails_at = len(self.log.calls) + conditions.fails
        for step in range(SAVED_STEP if conditions.resume else 0, self.problem.steps):
            if step == SAVED_STEP and conditions.save:
                save_checkpoint(conditions.save, trainer)
            if step == FAILING_STEP and self.is_last and isinstance(conditions.fails, str):
                setattr(self.exchange, conditions.fails, _fail)
            self._step(step)
        trajectory.last_loss, outputs = self._evaluate()
        make_equal(self.exchange)
        end = {(END, "output"): outputs, (END, "parameter"): self._parameters()}
        trajectory.values.update(end)
        trainer.comm.barrier()  # all matching operations are complete
        trajectory.pending = [request.what for request in self.log.pending]
        if conditions.delays is None:  # a delayed request is never complete at the first test
            trajectory.unmatched = [r.what for r in self.log.pending if not r.inner.test()]
        if self.mesh is not None:
            self.mesh.free()
        return trajectory

    def _start(self) -> None:
        """Load the checkpoint, or change the initial parameters and make ranks equal."""
        if self.conditions.resume:
            load_checkpoint(self.conditions.resume, self.trainer)
            return
        self.trajectory.values[0, "initial value"] = self._parameters()
        own = 0 if self.mesh is not None else self.trainer.comm.rank
        for name, p in sorted(self.model.parameters.items()):
            rng = np.random.default_rng([self.problem.seed, zlib.crc32(name.encode()), own])
            noise = NOISE * rng.normal(size=p.whole_shape)
            p.master += Local(p.master, p.part).of(noise, self.trajectory.position)
        self.model.refresh()
        start_equal(self.trainer.setup)

    def _step(self, step: int) -> None:
        """Run one step; record its results and its cost."""
        epoch, index = divmod(step, len(self.loader))
        batch = next(self.loader.epoch(epoch, start=index))
        is_nan = self.conditions.nan_step and step == NAN_STEP
        if is_nan and self.is_last:
            batch = replace(batch, x=batch.x * np.nan)
        rows = self._begin(step, batch.total)
        trajectory, traffic = self.trajectory, self.trainer.comm.traffic
        messages, sent, calls = traffic.messages, traffic.bytes, len(self.log.calls)
        try:
            self.trainer.train_step(batch, epoch)
        except NotFiniteError:
            if not is_nan:
                raise
            for request in self.log.pending:
                what = f"{request.what} incomplete; add every request to self.in_flight"
                raise ValueError(f"the scheme leaves {what}") from None
        trajectory.messages += traffic.messages - messages
        trajectory.bytes += traffic.bytes - sent
        trajectory.calls += self.log.calls[calls:]
        self._record(step, rows)

    def _evaluate(self) -> tuple[float, dict[str, Local]]:
        """Return the loss of all samples, and the outputs."""
        samples = len(self.problem.data)
        rows = self._begin(END, samples)
        loss = self.trainer.evaluate(self.problem.data, global_batch_size=samples)["loss"]
        return loss, self._outputs(rows)

    def _begin(self, step: int, samples: int) -> slice:
        """Begin to record a step; return this rank's samples of it."""
        data = self.exchange.comm
        rows = slice(*(even_cut(samples, data.size, rank) for rank in (data.rank, data.rank + 1)))
        trace = None
        if step == self.conditions.traced:
            trace = StepTrace(self.model, rows, self.trajectory.position)
            self.trajectory.trace = trace.records
        self.model.begin(trace)
        return rows

    def _record(self, step: int, rows: slice) -> None:
        model = self.model
        inputs = [node.name for node in model.graph.inputs] if model.pipeline is None else ()
        statistics = {
            f"{s.name}.{what}": Local(array.copy(), s.part)
            for s in model.statistics.statistics
            for what, array in zip(RUNNING, (s.mean, s.variance), strict=True)
        }
        gradients = {
            name: Local(p.grad.copy(), p.part)
            for name, p in model.parameters.items()
            if not p.frozen
        }
        kinds: dict[str, dict[str, Local]] = {
            "output": self._outputs(rows),
            "gradient of input": _joined(inputs, model.gradients, rows),
            "gradient": gradients,
            "statistic": statistics,
            "parameter": self._parameters(),
        }
        self.trajectory.values.update({(step, kind): own for kind, own in kinds.items()})

    def _outputs(self, rows: slice) -> dict[str, Local]:
        count = len(self.model.output_nodes)
        return _joined([f"output {i}" for i in range(count)], self.model.outputs, rows)

    def _parameters(self) -> dict[str, Local]:
        gather_parameters(self.exchange)
        return {n: Local(p.master.copy(), p.part) for n, p in self.model.parameters.items()}


def _joined(
    names: Sequence[str], parts: Sequence[tuple[np.ndarray, ...]], rows: slice
) -> dict[str, Local]:
    """Return arrays whose samples were computed in several parts."""
    arrays = map(np.concatenate, zip(*parts, strict=True))
    return {name: Local(array, rows=rows) for name, array in zip(names, arrays, strict=False)}


def _fail(*args: Any) -> None:
    raise Injected("injected failure")


def train_serially(problem: Problem, conditions: Conditions) -> Trajectory:
    """Train on one rank."""
    return TrajectoryRank(Serial(), replace(problem, exchange=AllReduce), conditions).run()


@dataclass
class Ranks:
    """The ranks on which a problem is trained.

    Parameters
    ----------
    count : int
    axes : dict of str to int or None
        Axes of the mesh.
    comm : Communicator or None
        The ranks; None for threads, two of them per host.
    timeout : float
        Maximum duration of one run of threads, in s.

    Attributes
    ----------
    logs : list of CallLog
        What each thread does.
    """

    count: int
    axes: Mapping[str, int] | None = None
    _: KW_ONLY
    comm: Communicator | None = None
    timeout: float
    logs: list[CallLog] = field(default_factory=list)

    def train(self, problem: Problem, conditions: Conditions) -> list[Trajectory]:
        """Train, and return the results of all ranks."""

        def rank(comm: Communicator) -> Trajectory:
            log = self.logs[0 if self.comm is not None else comm.rank]
            return TrajectoryRank(comm, problem, conditions, self.axes, log).run()

        return self.call(rank)

    def call(self, function: Callable[[Communicator], Any]) -> list[Any]:
        """Call a function on all ranks, and return the results.

        Raises
        ------
        TimeoutError
            If it takes too long, with what each rank is doing.
        Exception
            Errors of `run_threads`.
        """
        self.logs = [CallLog() for _ in range(self.count)]
        if self.comm is not None:
            return list(self.comm.gather_object(function(self.comm)))
        comms: list[Communicator] = []
        results: list[list[Any]] = []
        errors: list[BaseException] = []

        def rank(comm: Communicator) -> Any:
            comms.append(comm)
            return function(comm)

        def run() -> None:
            try:
                hosts = [rank // 2 for rank in range(self.count)]
                results.append(run_threads(self.count, rank, hosts=hosts))
            except BaseException as error:
                errors.append(error)

        # In a thread, as a rank in an endless computation without calls cannot be terminated.
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self.timeout)
        if errors:
            raise errors[0]
        if results:
            return results[0]
        with contextlib.suppress(RuntimeError):  # raised to end the calling thread
            comms[0].abort(1)
        raise TimeoutError(f"not finished after {self.timeout:g} s")


@dataclass
class TrajectoryDifference:
    """A difference of an array of a rank from another one.

    Attributes
    ----------
    value : float
        The largest of its elements, relative to the largest magnitude of arrays of the kind.
    key : (int, str)
        Step and kind.
    name : str
    rank : int
    other : str
        Where the other array is from: "rank 0".
    """

    value: float
    key: Key
    name: str
    rank: int
    other: str

    @property
    def when(self) -> str:
        """The step in words."""
        step, kind = self.key
        end = "in evaluation" if kind == "output" else "at the end"
        return end if step == END else f"after step {step + 1}"

    def __str__(self) -> str:
        return (
            f"the {self.key[1]} {self.name} of rank {self.rank} differs from that of {self.other} "
            f"{self.when}, by {self.value:.1e} of the largest"
        )


def largest_difference(
    ranks: Sequence[Trajectory], serial: Trajectory, key: Key
) -> TrajectoryDifference:
    """Return the largest difference of ranks from serial training."""
    expected = serial.values[key]
    scale = max(largest(local.array) for local in expected.values()) or 1.0
    worst = TrajectoryDifference(0.0, key, "", 0, "serial training")
    for rank, trajectory in enumerate(ranks):
        for name, local in trajectory.values[key].items():
            full, value = expected[name].array, np.inf
            if local.part is None or local.part.shape == full.shape:
                part = local.of(full, trajectory.position)
                value = largest(local.array - part) if part.shape == local.array.shape else np.inf
            if not value / scale <= worst.value:
                worst = replace(worst, value=value / scale, name=name, rank=rank)
    return worst


def different_copies(
    ranks: Sequence[Trajectory], keys: Iterable[Key]
) -> Iterator[TrajectoryDifference]:
    """Yield the arrays of which two ranks have the same part, but not the same bytes.

    Arrays with a batch axis are compared if the ranks have the same samples.
    """
    for key in keys:
        seen: dict[Any, int] = {}
        for rank, trajectory in enumerate(ranks):
            for name, local in trajectory.values[key].items():
                first = seen.setdefault((name, *local.place(trajectory.position)), rank)
                if value := _difference(local, ranks[first].values[key][name]):
                    yield TrajectoryDifference(value, key, name, rank, f"rank {first}")


def changed_bytes(
    ranks: Sequence[Trajectory], plain: Sequence[Trajectory], kinds: Sequence[str]
) -> Iterator[TrajectoryDifference]:
    """Yield the arrays of these kinds that have other bytes than in an ordinary run."""
    for rank, (trajectory, usual) in enumerate(zip(ranks, plain, strict=True)):
        for key, arrays in trajectory.values.items():
            for name, local in arrays.items() if key[1] in kinds else ():
                if value := _difference(local, usual.values[key][name]):
                    yield TrajectoryDifference(value, key, name, rank, "an ordinary run")


def _difference(local: Local, other: Local) -> float:
    """Return the difference of two arrays relative to the second, 0 if the bytes are the same."""
    if local.array.tobytes() == other.array.tobytes():
        return 0.0
    return max(largest(local.array - other.array) / (largest(other.array) or 1.0), MIN_DIFFERENCE)


class TrajectoryCase:
    """A problem on ranks, whose results are compared with those of serial training.

    Parameters
    ----------
    problem : Problem
    ranks : Ranks
    """

    def __init__(self, problem: Problem, ranks: Ranks) -> None:
        self.problem, self.ranks = problem, ranks

    def train(self, problem: Problem, conditions: Conditions, when: str) -> list[Trajectory]:
        """Train without expected errors."""
        try:
            return self.ranks.train(problem, conditions)
        except Exception as error:
            if self.ranks.comm is not None:  # ranks of MPI stop together
                raise
            hint = "; here arrays hold NaN until their request is complete"
            hint = hint if isinstance(error, NotFiniteError) else ""
            logs = enumerate(self.ranks.logs)
            places = "; ".join(f"rank {rank} {log.where()}" for rank, log in logs)
            self.fail(f"{describe(error)}{hint} ({places})", when, error)

    def check_requests(self, ranks: Sequence[Trajectory], when: str) -> None:
        """Check that no request is left at the end."""
        for rank, trajectory in enumerate(ranks):
            if trajectory.unmatched:
                self.fail(f"the {trajectory.unmatched[0]} of rank {rank} has no counterpart", when)
            if trajectory.pending:
                self.fail(
                    f"the {trajectory.pending[0]} of rank {rank} is not complete at the end; wait "
                    "for every request, in averaged() at the latest",
                    when,
                )

    def fail(self, what: str, when: str = "", error: Exception | None = None) -> NoReturn:
        """Raise the error of a failed check."""
        raise NotImplementedError
