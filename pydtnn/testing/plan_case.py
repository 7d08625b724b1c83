"""A plan on one mesh: its runs, and their comparison with serial training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple, NoReturn

import numpy as np

from pydtnn.comm import Communicator
from pydtnn.comm.agree import agree
from pydtnn.comm.wrapper import Delayed
from pydtnn.layers.collectives import PIPELINE
from pydtnn.parallel.mesh import Mesh
from pydtnn.testing.plan_rank import (
    EVALUATION,
    KINDS,
    STEPS,
    Course,
    Own,
    Problem,
    Rank,
    TrainedRank,
    train_serially,
)
from pydtnn.testing.plan_trace import Wrong, first_wrong
from pydtnn.testing.ranks import run_within
from pydtnn.utils.errors import AgreedError, describe


def mesh_name(axes: Mapping[str, int]) -> str:
    """Return the axes of a mesh: "data=2, filter=2"."""
    return ", ".join(f"{name}={ranks}" for name, ranks in axes.items())


@dataclass(frozen=True)
class PlanRow:
    """A plan on one mesh.

    Attributes
    ----------
    mesh : dict of str to int
    differences : dict of str to float
        For each kind of arrays the largest difference from serial training, relative to the largest
        magnitude of the kind, over all steps, with and without fusion; "training" is that of
        losses, norms of gradients and parameters in the steps of a trainer, if they were checked.
    messages, bytes : float
        Messages that rank 0 sends in a step, and B, those for gradients included.
    refused : str
        Why the plan is not possible on this mesh; an empty string if it is.
    """

    mesh: dict[str, int]
    differences: dict[str, float]
    messages: float = 0.0
    bytes: float = 0.0
    refused: str = ""


@dataclass(frozen=True)
class PlanReport:
    """Result of `check_plan`; its string is a table.

    Attributes
    ----------
    plan : str
    parameters : int
        Number of parameters of the network.
    batch : int
    rows : tuple of PlanRow
        One for each mesh.
    """

    plan: str
    parameters: int
    batch: int
    rows: tuple[PlanRow, ...]

    def __str__(self) -> str:
        width = max(len(mesh_name(row.mesh)) for row in self.rows)
        kinds = [kind for kind in KINDS if kind != "initial value"]
        if any("training" in row.differences for row in self.rows):
            kinds.append("training")
        short = {"gradient of input": "dx"}
        head = "".join(f"{short.get(kind, kind):>11}" for kind in kinds)
        lines = [
            f"{self.plan}: {self.parameters} parameters, {STEPS} steps of {self.batch} samples, "
            "float64; largest difference from serial training, relative",
            f"{'mesh':{width}}{head}  messages/step    B/step",
        ]
        for row in self.rows:
            name = f"{mesh_name(row.mesh):{width}}"
            if row.refused:
                lines.append(f"{name}  not possible: {row.refused}")
                continue
            found = "".join(f"{row.differences[kind]:11.1e}" for kind in kinds)
            lines.append(f"{name}{found}  {row.messages:13.1f}  {row.bytes:8.0f}")
        return "\n".join(lines)


LONGEST_DELAY = 1e-4
"""In s."""


class Way(NamedTuple):
    """How the network is run.

    Attributes
    ----------
    fuse : bool
    input_gradient : bool
        Whether the gradient of the input is computed; if not, ranks take their parts of the input
        without an exchange.
    delays : int or None
        Seed of random delays.
    """

    fuse: bool
    input_gradient: bool
    delays: int | None = None

    def __str__(self) -> str:
        delayed = "" if self.delays is None else f" with random delays (seed {self.delays})"
        return f"{'fused' if self.fuse else 'not fused'}{delayed}"


TRAINING_TOLERANCE = 100
"""Factor on the tolerance in ten steps with updates, as rounding grows from step to step."""

WAYS = (Way(False, True), Way(True, False), Way(False, True, 1), Way(True, False, 2))


REPLICATED = ("output", "gradient of input", "statistic", "parameter")
"""Kinds of arrays of which ranks with the same part must have the same bytes."""


class Difference(NamedTuple):
    """The largest difference of arrays of a kind, relative to the largest magnitude of the kind."""

    value: float
    name: str
    rank: int


class Case:
    """A plan on one mesh.

    Parameters
    ----------
    problem : Problem
    serial : Course
        Results of serial training.
    axes : dict of str to int
        Axes of the mesh.
    comm : Communicator or None
        The ranks; None for threads.
    tolerance : float
    timeout : float
        Time limit of one run of threads, in s.
    training : bool
        Whether a trainer is compared, too.
    """

    def __init__(
        self,
        problem: Problem,
        serial: Course,
        axes: Mapping[str, int],
        *,
        comm: Communicator | None,
        tolerance: float,
        timeout: float,
        training: bool,
    ) -> None:
        self.problem, self.serial, self.axes = problem, serial, dict(axes)
        self.training = training
        self.comm, self.tolerance, self.timeout = comm, tolerance, timeout
        self.stages = self.axes.get(PIPELINE, 1) > 1
        self.at: dict[int, str] = {}
        self.differences = dict.fromkeys((*KINDS, *(["training"] if training else [])), 0.0)

    def refusal(self) -> str:
        """Return why the plan is not possible on this mesh; an empty string if it is."""

        def rank(comm: Communicator) -> str:
            error = None
            with Mesh(comm, **self.axes) as mesh:
                try:
                    self.problem.model(mesh, fuse=True, input_gradient=not self.stages)
                except (ValueError, TypeError) as found:
                    error = found
                try:
                    agree(comm, error)
                except AgreedError as agreed:
                    return str(agreed)
            return ""

        return str(self._on_ranks(rank)[0])

    def check(self) -> PlanRow:
        """Run the network in all ways and compare.

        Raises
        ------
        AssertionError
        """
        plain: dict[bool, list[Course]] = {}
        for way in (own._replace(input_gradient=False) if self.stages else own for own in WAYS):
            courses = self._run(way)
            self._compare(courses, way)
            if way.delays is None:
                plain[way.fuse] = courses
            else:
                self._compare_bytes(courses, plain[way.fuse], way)
        if self.training:
            self._check_training()
        first = plain[True][0]
        return PlanRow(dict(self.axes), self.differences, first.messages, first.bytes)

    def _check_training(self) -> None:
        """Compare a trainer with serial training, batch norm over micro-batches and over all."""
        norms = any(key[1] == "statistic" and own for key, own in self.serial.values.items())
        data = self.problem.dataset(self.problem.model(None, fuse=False))
        ranks = self.axes.get("data", 1)
        for sync in (False, True) if norms and not self.stages else (False,):
            expected, clip = train_serially(self.problem, data, ranks, sync=sync)
            rank = partial(self._train, data=data, ranks=ranks, clip=clip, sync=sync)
            way = f"training{' with sync_batch_norm' if sync else ''}"
            self._compare_training(self._on_ranks(rank), expected, way)

    def _train(self, comm: Communicator, **options: Any) -> Course:
        with Mesh(comm, **self.axes) as mesh:
            return TrainedRank(self.problem, mesh, **options).run()

    def _compare_training(self, courses: Sequence[Course], expected: Course, way: str) -> None:
        for (step, kind), arrays in expected.values.items():
            worst = _largest(arrays, courses, (step, kind))
            name = f"the {kind}" + (f" {worst.name}" if kind == "parameter" else "")
            if not worst.value <= TRAINING_TOLERANCE * self.tolerance:
                self._fail(
                    f"trainer: {name} of rank {worst.rank} differs from that of serial training by "
                    f"{worst.value:.1e} of the largest in step {step + 1}, although outputs and "
                    "gradients of the passes agree; check weights of micro-batches, sums of "
                    "gradients, clipping and the update",
                    way,
                )
            self.differences["training"] = max(self.differences["training"], worst.value)
            if kind == "parameter":
                self._compare_replicas(courses, (step, kind), way)

    def _run(self, way: Way, traced: int | None = None) -> list[Course]:
        def rank(comm: Communicator) -> Course:
            def at(what: str) -> None:
                self.at[comm.rank] = what

            delayed = comm if way.delays is None else Delayed(comm, way.delays, LONGEST_DELAY)
            with Mesh(delayed, **self.axes) as mesh:
                return Rank(
                    self.problem, mesh, fuse=way.fuse, input_gradient=way.input_gradient, at=at
                ).run(traced)

        self.at = {}
        try:
            return self._on_ranks(rank)
        except Exception as error:
            if self.comm is not None:  # ranks of MPI stop together
                raise
            places = "; ".join(f"rank {rank} at {self.at[rank]}" for rank in sorted(self.at))
            self._fail(f"{describe(error)} ({places})", way, error)

    def _on_ranks(self, function: Any) -> list[Any]:
        if self.comm is not None:
            return list(self.comm.gather_object(function(self.comm)))
        ranks = prod(self.axes.values())
        return run_within(
            ranks, function, lambda rank: f"at {self.at.get(rank)}", timeout=self.timeout
        )

    def _compare(self, courses: Sequence[Course], way: Way) -> None:
        for (step, kind), expected in self.serial.values.items():
            if not expected or (kind == "gradient of input" and not way.input_gradient):
                continue
            for rank, course in enumerate(courses):
                if unknown := course.values[step, kind].keys() - expected.keys():
                    self._fail(f"{min(unknown)}: rank {rank} has a {kind} that serial training "
                               "does not have", way)  # fmt: skip
            if missing := expected.keys() - {n for c in courses for n in c.values[step, kind]}:
                self._fail(f"{min(missing)}: no rank has the {kind}", way)
            worst = _largest(expected, courses, (step, kind))
            if not worst.value <= self.tolerance:
                self._fail_step(step, kind, worst, way)
            self.differences[kind] = max(self.differences[kind], worst.value)
        for key in self.serial.values:
            if key[1] in REPLICATED:
                self._compare_replicas(courses, key, way)

    def _compare_replicas(
        self, courses: Sequence[Course], key: tuple[int, str], way: Way | str
    ) -> None:
        """Ranks with the same part of an array, of the same samples, have the same bytes of it."""
        step, kind = key
        seen: dict[Any, tuple[int, bytes]] = {}
        for rank, course in enumerate(courses):
            for name, own in course.values[key].items():
                cuts = [cut.axis for cut in own.part.cuts] if own.part is not None else []
                axes = (*cuts, *(["data"] if own.rows is not None else []))
                place = (name, *(course.position[axis] for axis in axes))
                first, values = seen.setdefault(place, (rank, own.array.tobytes()))
                if values != own.array.tobytes():
                    when = "in evaluation" if step == EVALUATION else f"after step {step + 1}"
                    what = name if kind == "parameter" else f"the {kind} {name}"
                    self._fail(
                        f"{what}: rank {rank} has other bytes than rank {first} {when}; ranks with "
                        "the same part must compute the same, sums in the same order",
                        way,
                    )

    def _compare_bytes(self, courses: Sequence[Course], plain: Sequence[Course], way: Way) -> None:
        """The results do not depend on the order in which ranks arrive."""
        for rank, (course, usual) in enumerate(zip(courses, plain, strict=True)):
            for (step, kind), arrays in course.values.items():
                for name, own in arrays.items():
                    if own.array.tobytes() != usual.values[step, kind][name].array.tobytes():
                        self._fail(
                            f"{name}: the {kind} of rank {rank} in step {step + 1} depends on "
                            "which rank comes first",
                            way,
                        )

    def _fail_step(self, step: int, kind: str, worst: Difference, way: Way) -> NoReturn:
        """Raise the error for a difference, with the layer that is its cause."""
        when = "in evaluation" if step == EVALUATION else f"in step {step + 1}"
        off = f"by {worst.value:.1e} of the largest (tolerance {self.tolerance:g}) {when}"
        found = None if kind == "initial value" else self._first_wrong(step, way)
        if found is None:
            layer, _, _ = worst.name.rpartition(".")
            self._fail(
                f"{layer or worst.name}: the {kind} {worst.name} differs from that of serial "
                f"training {off}, on rank {worst.rank}",
                way,
            )
        if found.what == "gradient":
            self._fail(
                f"{' and '.join(found.readers) or found.node}: the gradient of the input, which is "
                f"the output of {found.node}, is the last that differs from serial training, "
                f"by {found.difference:.1e}; the {kind} {worst.name} differs {off}",
                way,
            )
        self._fail(
            f"{found.node}: the output is the first that differs from serial training, by "
            f"{found.difference:.1e}; the {kind} {worst.name} differs {off}",
            way,
        )

    def _first_wrong(self, step: int, way: Way) -> Wrong | None:
        """Run again, and find the layer whose output, or gradient, is the first to differ."""
        serial = Rank(self.problem, None, fuse=False).run(step).trace
        ranks = [(course.position, course.trace) for course in self._run(way, step)]
        return first_wrong(serial, ranks, self.tolerance)

    def _fail(self, what: str, way: Way | str, error: Exception | None = None) -> NoReturn:
        raise AssertionError(f"{what} [mesh {mesh_name(self.axes)}, {way}]") from error


def _largest(
    expected: Mapping[str, Own], courses: Sequence[Course], key: tuple[int, str]
) -> Difference:
    scale = max(_most(own.array) for own in expected.values()) or 1.0
    worst = Difference(0.0, "", 0)
    for rank, course in enumerate(courses):
        for name, own in course.values[key].items():
            whole = expected[name].array
            value = np.inf
            if own.part is None or own.part.shape == whole.shape:
                part = own.of(whole, course.position)
                value = _most(own.array - part) if part.shape == own.array.shape else np.inf
            if not value / scale <= worst.value:
                worst = Difference(value / scale, name, rank)
    return worst


def _most(array: np.ndarray) -> float:
    worst = float(np.abs(array).max(initial=0))
    return worst if np.isfinite(worst) else np.inf
