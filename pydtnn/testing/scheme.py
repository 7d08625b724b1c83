"""Checks of the contract of parallel schemes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pydtnn.optimizers import Optimizer
from pydtnn.testing.scheme_case import Case, run_serial
from pydtnn.testing.scheme_rank import (
    BAD_STEP,
    BATCH,
    MIDDLE,
    SAMPLES,
    STEPS,
    Course,
    Plan,
    Scheme,
    problem,
)
from pydtnn.testing.scheme_watch import Injected
from pydtnn.training.nonfinite import LocalNotFiniteError
from pydtnn.utils.errors import RankError, describe


@dataclass(frozen=True)
class SchemeRow:
    """A scheme on one number of ranks.

    Attributes
    ----------
    ranks : int
    difference : float
        The largest from the parameters of serial training at the end, relative to the largest
        parameter.
    must_be_serial : bool
        Whether `difference` was checked.
    always_equal : bool
        Whether all ranks had the same parameters after every step; at the end all do.
    loss : float
        Mean over all samples at the end.
    messages, bytes : float
        Average traffic of rank 0 per step: calls, and B (see `Traffic.bytes`).
    least_bytes : float
        Lower bound of an all-reduce, ``2 (P - 1) / P`` times the gradients, in B.
    waiting : float
        Share of a step's time spent in communication. Ranks are threads of one interpreter, so it
        depends more on the number of calls than on a real network.
    """

    ranks: int
    difference: float
    must_be_serial: bool
    always_equal: bool
    loss: float
    messages: float
    bytes: float
    least_bytes: float
    waiting: float


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
            "ranks  from serial  ranks equal    loss  calls/step  B/step  of all-reduce  waiting",
        ]
        for row in self.rows:
            share = f"{row.bytes / row.least_bytes:.2f}" if row.least_bytes else "-"
            lines.append(
                f"{row.ranks:5}  {row.difference:11.1e}  "
                f"{'always' if row.always_equal else 'at the end':>11}  {row.loss:6.4f}  "
                f"{row.messages:10.1f}  {row.bytes:6.0f}  {share:>13}  {row.waiting:7.0%}"
            )
        return "\n".join(lines)


def measure(case: Case) -> SchemeRow:
    """Collect the numbers of a checked case."""
    first, size = case.plain[0], case.ranks
    return SchemeRow(
        ranks=size,
        difference=case.compare(first.final, case.serial.final)[0],
        must_be_serial=case.must_be_serial,
        always_equal=all(
            values.tobytes() == expected.tobytes()
            for course in case.plain
            for values, expected in zip(course.values, first.values, strict=True)
        ),
        loss=first.last_loss,
        messages=(first.messages - case.quiet.messages) / STEPS,
        bytes=(first.bytes - case.quiet.bytes) / STEPS,
        least_bytes=2 * (size - 1) / size * first.gradient_bytes,
        waiting=first.waited / first.wall,
    )


DELAYS = (1, 2)
"""Seeds of random delays."""

LEAST_GAIN = 0.1
"""Required fraction of the loss reduction of serial training."""


def check_buckets(case: Case) -> None:
    """The result is correct with one bucket per parameter, and with one for all."""
    check_result(case, case.plain, "", case.serial)
    when = "with all parameters in one bucket"
    check_result(case, case.run(Plan(bucket_bytes=1 << 30), when), when, case.serial)


def check_delays(case: Case) -> None:
    """The result does not depend on the order in which ranks arrive, or is correct in any order."""
    hint = (
        "what it computes depends on which rank comes first; set order_dependent=True if it is to"
    )
    for seed in DELAYS:
        when = f"with random delays (seed {seed})"
        check_repeated(case, case.run(Plan(delays=seed), when), when, hint)


def check_resume(case: Case) -> None:
    """Saving a checkpoint changes nothing, and resuming gives the same bytes."""
    with tempfile.TemporaryDirectory() as folder:
        when = f"saved after step {MIDDLE}"
        courses = case.run(Plan(save=Path(folder)), when)
        check_repeated(case, courses, when, "state() must not change the exchange")
        when = f"resumed after step {MIDDLE}"
        courses = case.run(Plan(resume=Path(folder)), when)
        check_repeated(
            case, courses, when, "state() and load() must include all state kept between steps"
        )


def check_abandon(case: Case) -> None:
    """A step with a loss of NaN has no effect, and the following steps work.

    Without sums of losses, the rank with such a loss ends all others.
    """
    if not case.sums_losses and case.ranks > 1:
        error = case.run_failing(Plan(bad_step=True))
        if not isinstance(error, RankError) or not isinstance(error.__cause__, LocalNotFiniteError):
            told = "training continues" if error is None else f"the error is: {describe(error)}"
            case.fail(f"the loss of rank {case.ranks - 1} is NaN, but {told}")
        return
    when = f"with step {BAD_STEP + 1} abandoned"
    courses = case.run(Plan(bad_step=True), when)
    serial = run_serial(case.optimizer, case.data, Plan(bad_step=True))
    check_result(case, courses, when, serial)


def check_failures(case: Case) -> None:
    """An error of one rank terminates all of them and is reported."""
    last = case.ranks - 1
    calls = case.plain[last].calls
    own = [number for number, call in enumerate(calls) if call not in case.quiet.calls]
    places: dict[str, str | int] = {"bucket_ready": "bucket_ready", "update": "update"}
    for number in own[len(own) // 2 :][:1]:
        places[calls[number]] = number
    for where, fails in places.items():
        error = case.run_failing(Plan(fails=fails))
        if not isinstance(error, RankError) or not isinstance(error.__cause__, Injected):
            told = "training continues" if error is None else f"the error is: {describe(error)}"
            case.fail(f"rank {last} raises in {where}, but {told}")


def check_result(case: Case, courses: Sequence[Course], when: str, serial: Course) -> None:
    """No request is pending, ranks are equal as declared, and parameters are correct."""
    first = courses[0]
    for rank, course in enumerate(courses):
        if course.unmatched:
            case.fail(f"the {course.unmatched[0]} of rank {rank} has no counterpart", when)
        if course.pending:
            case.fail(
                f"the {course.pending[0]} of rank {rank} is not complete at the end; wait for "
                "every request, in averaged() at the latest",
                when,
            )
        for step, values, expected in _pairs(course, first):
            if values.tobytes() != expected.tobytes():
                apart, name = case.compare(values, expected)
                what = "parameters" if first.equal else "averaged parameters"
                case.fail(
                    f"{what} of rank {rank} differ from those of rank 0 {step}, in {name} by "
                    f"{apart:.1e} of the largest; they must be equal on all ranks after a step",
                    when,
                )
    if not case.must_be_serial:
        check_gain(case, first, when, serial)
        return
    for step, values, expected in _pairs(first, serial):
        apart, name = case.compare(values, expected)
        if apart > case.tolerance:
            case.fail(
                f"parameters differ from those of serial training {step}, in {name} by "
                f"{apart:.1e} of the largest (tolerance {case.tolerance:g})",
                when,
            )


def check_gain(case: Case, course: Course, when: str, serial: Course) -> None:
    """The loss decreases."""
    gain, usual = (run.first_loss - run.last_loss for run in (course, serial))
    if not gain > LEAST_GAIN * usual:
        case.fail(
            f"{STEPS} steps reduce the loss from {course.first_loss:.4f} to "
            f"{course.last_loss:.4f}, serial training to {serial.last_loss:.4f}; if the learning "
            "rate is too high for the scheme, set optimizer=",
            when,
        )


def check_repeated(case: Case, courses: Sequence[Course], when: str, hint: str) -> None:
    """All parameters of all ranks have the same bytes as in an ordinary run.

    Those of a scheme that depends on the order of messages are correct.
    """
    if case.order_dependent:
        check_result(case, courses, when, case.serial)
        return
    for rank, (course, plain) in enumerate(zip(courses, case.plain, strict=True)):
        first = STEPS - len(course.values)
        for step, (values, expected) in enumerate(
            zip(course.values, plain.values[first:], strict=True), start=first + 1
        ):
            if values.tobytes() != expected.tobytes():
                apart, name = case.compare(values, expected)
                case.fail(
                    f"parameters of rank {rank} differ from those of an ordinary run after step "
                    f"{step}, in {name} by {apart:.1e} of the largest; {hint}",
                    when,
                )


def _pairs(course: Course, other: Course) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield the arrays that must be equal: parameters after each step, or at the end."""
    if course.equal:
        for step, (values, expected) in enumerate(
            zip(course.values, other.values, strict=True), start=1
        ):
            yield f"after step {step}", values, expected
    yield "at the end", course.final, other.final


CHECKS = (check_buckets, check_delays, check_resume, check_abandon, check_failures)


def check_scheme(
    scheme: Scheme,
    *,
    ranks: Sequence[int] = (1, 2, 3, 4),
    equal_to_serial: bool | None = None,
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
    order_dependent : bool
        Whether results may depend on the order in which messages arrive, as those of asynchronous
        schemes do (`Communicator.irecv` from any rank). Runs with delays, saved and resumed runs
        must then be correct like the first one, but need not have its bytes.
    optimizer : callable, optional
        Creates the rule. By default SGD with momentum for schemes that sum gradients, and without
        for others: separate momenta per rank do not occur in serial training.
    tolerance : float
        Largest difference from serial training, relative to the largest parameter.
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
    data, rows = problem(seed), []
    for size in ranks:
        case = Case(
            scheme,
            size,
            data,
            optimizer=optimizer,
            equal_to_serial=equal_to_serial,
            order_dependent=order_dependent,
            tolerance=tolerance,
            timeout=timeout,
        )
        for check in CHECKS:
            check(case)
        rows.append(measure(case))
    first = case.plain[0]
    return SchemeReport(
        scheme=case.name,
        parameters=len(first.names),
        buckets=first.buckets,
        first_loss=case.serial.first_loss,
        serial_loss=case.serial.last_loss,
        rows=tuple(rows),
    )
