"""Checks of the contract of parallel schemes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from pydtnn.comm import Communicator, Serial, run_threads
from pydtnn.data import ArrayDataset, Batch, Loader
from pydtnn.layers import Linear, Sequential, Sigmoid, StepContext
from pydtnn.optimizers import SGD, Optimizer
from pydtnn.parallel.exchange import AllReduce, GradientExchange
from pydtnn.tools.testing.calls import Injected
from pydtnn.tools.testing.trajectory import (
    END,
    NAN_STEP,
    SAVED_STEP,
    Conditions,
    Problem,
    Ranks,
    Scheme,
    Trajectory,
    TrajectoryCase,
    TrajectoryRank,
    changed_bytes,
    different_copies,
    largest_difference,
    train_serially,
)
from pydtnn.training.nonfinite import LocalNotFiniteError
from pydtnn.utils.errors import RankError, describe

SAMPLES = 23

BATCH = 11
"""Global batch size: its parts are uneven, and the last batch of an epoch is a single sample."""

STEPS = 18

PLAIN = Conditions(bucket_bytes=1)
"""One bucket per parameter."""

DELAY_SEEDS = (1, 2)
"""Seeds of random delays."""

MIN_GAIN = 0.1
"""Required fraction of the loss reduction of serial training."""

Steps = Iterable[tuple[Callable[[np.ndarray], np.ndarray], np.ndarray]]
"""For each step, a function of the parameters of all ranks (P, n) that returns the gradients of
the summed losses of their samples (P, n), and their numbers of samples (P,)."""

Reference = Callable[[np.ndarray, Steps], Iterator[np.ndarray]]
"""Yields the parameters of all ranks (P, n) after each step; see `check_scheme`."""

KEYS = [(step, "parameter") for step in (*range(STEPS), END)]
"""Parameters after each step, and at the end."""


@dataclass(frozen=True)
class SchemeRow:
    """A scheme on one number of ranks.

    Attributes
    ----------
    ranks : int
    difference : float
        The largest from the parameters of serial training at the end, relative to the largest
        parameter.
    always_equal : bool
        Whether all ranks had the same parameters after every step; at the end all do.
    loss : float
        Mean over all samples at the end.
    messages, bytes : float
        Average traffic of rank 0 per step: calls, and B (see `Traffic.bytes`).
    least_bytes : float
        Lower bound of an all-reduce, ``2 (P - 1) / P`` times the gradients, in B.
    """

    ranks: int
    difference: float
    always_equal: bool
    loss: float
    messages: float
    bytes: float
    least_bytes: float


@dataclass(frozen=True)
class SchemeReport:
    """Result of `check_scheme`; its string is a table.

    Attributes
    ----------
    scheme : str
    parameters, buckets : int
        Number of parameters and buckets of the model.
    first_loss, serial_loss : float
        Before training, and after serial training.
    rows : tuple of SchemeRow
        One for each number of ranks.
    """

    scheme: str
    parameters: int
    buckets: int
    first_loss: float
    serial_loss: float
    rows: tuple[SchemeRow, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.scheme}: {self.parameters} parameters in {self.buckets} buckets, {STEPS} steps "
            f"of at most {BATCH} of {SAMPLES} samples, float64",
            f"loss {self.first_loss:.4f}, after serial training {self.serial_loss:.4f}",
            "ranks  from serial  ranks equal    loss  calls/step  B/step  of all-reduce",
        ]
        for row in self.rows:
            share = f"{row.bytes / row.least_bytes:.2f}" if row.least_bytes else "-"
            lines.append(
                f"{row.ranks:5}  {row.difference:11.1e}  "
                f"{'always' if row.always_equal else 'at the end':>11}  {row.loss:6.4f}  "
                f"{row.messages:10.1f}  {row.bytes:6.0f}  {share:>13}"
            )
        return "\n".join(lines)


class SchemeCase(TrajectoryCase):
    """A scheme on one number of ranks.

    Parameters
    ----------
    problem : Problem
        With the scheme.
    ranks : Ranks
    optimizer : callable or None
        Creates the rule; by default one for the type of scheme.
    equal_to_serial : bool or None
        Whether it must agree with serial training; None: as declared by the scheme.
    order_dependent : bool
        Whether results may depend on the order in which messages arrive.
    tolerance : float
        Largest difference from serial training, relative to the largest parameter.

    Attributes
    ----------
    serial, quiet : Trajectory
        Serial training, and ranks without communication of the scheme.
    plain : list of Trajectory
        Results of every rank, with one bucket per parameter and no special conditions.
    """

    def __init__(
        self,
        problem: Problem,
        ranks: Ranks,
        *,
        optimizer: Callable[[], Optimizer] | None,
        equal_to_serial: bool | None,
        order_dependent: bool,
        tolerance: float,
    ) -> None:
        super().__init__(problem, ranks)
        self.order_dependent, self.tolerance = order_dependent, tolerance
        self.last = ranks.count - 1
        self.name = getattr(problem.exchange, "__name__", repr(problem.exchange))
        exchange = self._make()
        self.name = type(exchange).__name__
        self.equal, self.sums_losses = exchange.equal, exchange.sums_losses
        declared = exchange.equal and exchange.sums_gradients
        self.must_be_serial = declared if equal_to_serial is None else equal_to_serial
        # separate momenta per rank do not occur in serial training
        rule = partial(SGD, 0.1, momentum=0.9) if exchange.sums_gradients else partial(SGD, 0.5)
        self.problem = replace(problem, optimizer=optimizer or rule)
        self.serial = train_serially(self.problem, PLAIN)
        self.quiet = ranks.train(replace(self.problem, exchange=self._quiet), PLAIN)[0]
        self.plain = self.run()

    def _make(self) -> GradientExchange:
        """Create the exchange once, to read its declarations."""
        try:
            exchange = run_threads(self.ranks.count, self.problem.exchange)[0]
        except Exception as error:
            self.fail(describe(error), "", error)
        if not isinstance(exchange, GradientExchange):
            raise TypeError(
                f"check_scheme: {self.name} must make a GradientExchange, got {exchange!r}; "
                "inherit from it"
            )
        return exchange

    def _quiet(self, comm: Communicator) -> GradientExchange:
        """Return an exchange without messages, whose steps sum losses as those of the scheme."""
        exchange = GradientExchange(comm)
        exchange.sums_losses = self.sums_losses
        return exchange

    def run(self, when: str = "", **special: Any) -> list[Trajectory]:
        """Train under special conditions."""
        return self.train(self.problem, replace(PLAIN, **special), when)

    def check_error(self, expected: type[Exception], cause: str, **special: Any) -> None:
        """Train with a failure on the last rank, which must end all others."""
        problem = "training continues"
        try:
            self.ranks.train(self.problem, replace(PLAIN, **special))
        except Exception as error:
            if isinstance(error, RankError) and isinstance(error.__cause__, expected):
                return
            problem = f"the error is: {describe(error)}"
        self.fail(f"{cause}, but {problem}")

    def fail(self, what: str, when: str = "", error: Exception | None = None) -> NoReturn:
        ranks = f"{self.ranks.count} rank{'s' * (self.last > 0)}"
        raise AssertionError(f"{self.name} on {ranks}{when and ', '}{when}: {what}") from error


def measure(case: SchemeCase) -> SchemeRow:
    """Collect the numbers of a checked case."""
    first, size = case.plain[0], case.ranks.count
    return SchemeRow(
        ranks=size,
        difference=largest_difference([first], case.serial, KEYS[-1]).value,
        always_equal=not any(different_copies(case.plain, KEYS)),
        loss=first.last_loss,
        messages=(first.messages - case.quiet.messages) / STEPS,
        bytes=(first.bytes - case.quiet.bytes) / STEPS,
        least_bytes=2 * (size - 1) / size * first.gradient_bytes,
    )


def check_buckets(case: SchemeCase) -> None:
    """The result is correct with one bucket per parameter, and with one for all."""
    check_result(case, case.plain, "", case.serial)
    when = "with all parameters in one bucket"
    check_result(case, case.run(when, bucket_bytes=1 << 30), when, case.serial)


def check_delays(case: SchemeCase) -> None:
    """The result does not depend on the order in which ranks arrive, or is correct in any order."""
    hint = (
        "what it computes depends on which rank comes first; set order_dependent=True if it is to"
    )
    for seed in DELAY_SEEDS:
        when = f"with random delays (seed {seed})"
        check_repeated(case, case.run(when, delays=seed), when, hint)


def check_resume(case: SchemeCase) -> None:
    """Saving a checkpoint changes nothing, and resuming gives the same bytes."""
    with tempfile.TemporaryDirectory() as folder:
        for option, when, hint in (
            ("save", "saved", "state() must not change the exchange"),
            ("resume", "resumed", "state() and load() must include all state kept between steps"),
        ):
            when = f"{when} after step {SAVED_STEP}"
            check_repeated(case, case.run(when, **{option: Path(folder)}), when, hint)


def check_abandon(case: SchemeCase) -> None:
    """A step with a loss of NaN has no effect, and the following steps work.

    Without sums of losses, the rank with such a loss ends all others.
    """
    if not case.sums_losses and case.last > 0:
        cause = f"the loss of rank {case.last} is NaN"
        case.check_error(LocalNotFiniteError, cause, nan_step=True)
        return
    when = f"with step {NAN_STEP + 1} abandoned"
    serial = train_serially(case.problem, replace(PLAIN, nan_step=True))
    check_result(case, case.run(when, nan_step=True), when, serial)


def check_failures(case: SchemeCase) -> None:
    """An error of one rank terminates all of them and is reported."""
    calls = case.plain[case.last].calls
    own = [number for number, call in enumerate(calls) if call not in case.quiet.calls]
    places: dict[str, str | int] = {"bucket_ready": "bucket_ready", "update": "update"}
    for number in own[len(own) // 2 :][:1]:
        places[calls[number]] = number
    for where, fails in places.items():
        case.check_error(Injected, f"rank {case.last} raises in {where}", fails=fails)


def check_result(
    case: SchemeCase, ranks: Sequence[Trajectory], when: str, serial: Trajectory
) -> None:
    """No request is left, ranks are equal as declared, and parameters are correct."""
    case.check_requests(ranks, when)
    keys = KEYS if case.equal else KEYS[-1:]
    for difference in different_copies(ranks, keys):
        hint = "after a step" if case.equal else "when they are averaged"
        case.fail(f"{difference}; parameters must be equal on all ranks {hint}", when)
    if not case.must_be_serial:
        check_gain(case, ranks[0], when, serial)
        return
    for key in keys:
        worst = largest_difference(ranks[:1], serial, key)
        if not worst.value <= case.tolerance:
            case.fail(f"{worst} (tolerance {case.tolerance:g})", when)


def check_gain(case: SchemeCase, trajectory: Trajectory, when: str, serial: Trajectory) -> None:
    """The loss decreases."""
    gain, usual = (run.first_loss - run.last_loss for run in (trajectory, serial))
    if not gain > MIN_GAIN * usual:
        case.fail(
            f"{STEPS} steps reduce the loss from {trajectory.first_loss:.4f} to "
            f"{trajectory.last_loss:.4f}, serial training to {serial.last_loss:.4f}; if the "
            "learning rate is too high for the scheme, set optimizer=",
            when,
        )


def check_reference(case: SchemeCase, reference: Reference) -> None:
    """Parameters of all ranks after each step are those of a method written in NumPy."""
    serial = TrajectoryRank(Serial(), replace(case.problem, exchange=AllReduce), PLAIN)
    serial._start()
    model = serial.model
    parameters = sorted(model.parameters.items())
    ends = np.cumsum([p.size for _, p in parameters])
    size = case.ranks.count

    def gradient(values: np.ndarray, batch: Batch) -> np.ndarray:
        for (_, p), part in zip(parameters, np.split(values, ends[:-1]), strict=True):
            p.master[...] = part.reshape(p.shape)
        model.refresh()
        model.begin(None)
        y, saved = model.forward(batch.x, StepContext(training=True, samples=batch.samples))
        _, dy = serial.trainer.objective.losses[0](model.backend, y, batch.y, 1.0)
        model.backward(dy, saved)
        return np.concatenate([p.grad.reshape(-1) for _, p in parameters])

    def gradients(batches: Sequence[Batch], w: np.ndarray) -> np.ndarray:
        return np.array(list(map(gradient, w, batches)))

    def steps() -> Steps:
        options: Any = {"global_batch_size": BATCH, "seed": case.problem.seed, "prefetch": 0}
        loaders = [
            Loader(case.problem.data, rank=rank, size=size, dtype="float64", **options)
            for rank in range(size)
        ]
        for step in range(STEPS):
            epoch, index = divmod(step, len(loaders[0]))
            batches = [next(loader.epoch(epoch, start=index)) for loader in loaders]
            yield partial(gradients, batches), np.array([len(batch) for batch in batches])

    start = np.concatenate([p.master.reshape(-1) for _, p in parameters])
    for step, values in enumerate(reference(np.tile(start, (size, 1)), steps())):
        scale = np.abs(values).max()
        for rank, (trajectory, expected) in enumerate(zip(case.plain, values, strict=True)):
            found = trajectory.values[step, "parameter"]
            ours = np.concatenate([found[name].array.reshape(-1) for name, _ in parameters])
            error = np.abs(ours - expected).max() / scale
            if not error <= case.tolerance:
                case.fail(
                    f"the parameters of rank {rank} differ from those of the reference after step "
                    f"{step + 1}, by {error:.1e} of the largest (tolerance {case.tolerance:g})"
                )


def check_repeated(case: SchemeCase, ranks: Sequence[Trajectory], when: str, hint: str) -> None:
    """All parameters of all ranks have the same bytes as in an ordinary run.

    Those of a scheme that depends on the order of messages are correct.
    """
    if case.order_dependent:
        check_result(case, ranks, when, case.serial)
        return
    for difference in changed_bytes(ranks, case.plain, ["parameter"]):
        case.fail(f"{difference}; {hint}", when)


def _data(seed: int) -> ArrayDataset:
    """Create a classification task that a small network learns within a few steps."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(SAMPLES, 5))
    return ArrayDataset(x, (x @ rng.normal(size=(5, 3))).argmax(axis=1))


CHECKS = (check_buckets, check_delays, check_resume, check_abandon, check_failures)


def check_scheme(
    scheme: Scheme,
    *,
    ranks: Sequence[int] = (1, 2, 3, 4),
    equal_to_serial: bool | None = None,
    reference: Reference | None = None,
    order_dependent: bool = False,
    optimizer: Callable[[], Optimizer] | None = None,
    tolerance: float = 1e-10,
    seed: int = 0,
    timeout: float = 20.0,
) -> SchemeReport:
    """Check the contract of a parallel scheme, on several numbers of ranks.

    The ranks are threads that train a small network in float64. Batches are divided unevenly, and
    the last of each epoch has samples on one rank only. The scheme must

    - agree with serial training, or at least reduce the loss, with one bucket or many;
    - give each rank the parameters of the `reference` after each step, if there is one;
    - keep parameters equal on all ranks after every step if it is `equal`, and at the end;
    - compute the same bytes with random delays before and after every call, and not access arrays
      of pending requests;
    - receive every message;
    - compute the same bytes when saved, and when resumed in the middle of an epoch;
    - complete pending requests when a step is abandoned, and continue; a scheme that does not sum
      losses (`GradientExchange.sums_losses`) is ended by the rank whose loss is not finite;
    - terminate all ranks after an error of one.

    Parameters
    ----------
    scheme : type or callable
        A subclass of `GradientExchange`, or a function that creates one from a communicator:
        ``lambda comm: LocalSGD(comm, period=2)``.
    ranks : sequence of int
        At most 11, the samples of a batch.
    equal_to_serial : bool, optional
        Whether it must agree with serial training. By default this is required of schemes that are
        `equal` and `sums_gradients`; set it to False for inexact or delayed gradients.
    reference : callable, optional
        The method of the scheme and the `optimizer` in plain NumPy, for all ranks at once: a
        generator ``reference(w, steps)`` of `w`, the parameters of all ranks (P, n), that yields
        them after each step. `steps` yields ``(gradients, samples)``: ``gradients(w)`` returns the
        gradients of the summed losses of the samples of each rank (P, n), `samples` are their
        numbers (P,).
    order_dependent : bool
        Whether results may depend on the order in which messages arrive, as those of asynchronous
        schemes do (`Communicator.irecv` from any rank). Runs with delays, saved and resumed runs
        must then be correct like the first one, but need not have its bytes.
    optimizer : callable, optional
        Creates the rule. By default SGD with momentum for schemes that sum gradients, and without
        for others: separate momenta per rank do not occur in serial training.
    tolerance : float
        Largest difference from serial training or `reference`, relative to the largest parameter.
    seed : int
        Seed of the data.
    timeout : float
        Maximum duration of one run, in s; each takes about 50 ms.

    Returns
    -------
    SchemeReport
        Differences, messages and bytes; `str` of it is a table.

    Raises
    ------
    AssertionError
        With the scheme, the number of ranks, the quantity that is wrong, and the difference.

    Examples
    --------
    >>> from pydtnn.parallel.exchange import AllReduce
    >>> report = check_scheme(AllReduce, ranks=[3])
    >>> report.rows[0].difference < 1e-12, report.rows[0].messages
    (True, 4.0)
    """
    if not ranks or not all(1 <= size <= BATCH for size in ranks):
        raise ValueError(
            f"check_scheme: ranks must be numbers from 1 to {BATCH}, got {list(ranks)}"
        )
    data, rows = _data(seed), []
    problem = Problem(
        lambda: Sequential(Linear(6, name="first"), Sigmoid(), Linear(3, name="second")),
        data.input_shape,
        data,
        BATCH,
        STEPS,
        exchange=scheme,
    )
    for size in ranks:
        case = SchemeCase(
            problem,
            Ranks(size, timeout=timeout),
            optimizer=optimizer,
            equal_to_serial=equal_to_serial,
            order_dependent=order_dependent,
            tolerance=tolerance,
        )
        if reference is not None:
            check_reference(case, reference)
        for check in CHECKS:
            check(case)
        rows.append(measure(case))
    first = case.plain[0]
    return SchemeReport(
        scheme=case.name,
        parameters=first.parameters,
        buckets=first.buckets,
        first_loss=case.serial.first_loss,
        serial_loss=case.serial.last_loss,
        rows=tuple(rows),
    )
