"""Requirements of a scheme for any number of ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pydtnn.testing.scheme_case import Case
from pydtnn.testing.scheme_course import BAD_STEP, MIDDLE, STEPS, Course, Plan
from pydtnn.testing.scheme_group import run_serial
from pydtnn.testing.scheme_watch import Injected
from pydtnn.training.nonfinite import LocalNotFiniteError
from pydtnn.utils.errors import RankError, describe

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
