"""The report of `check_scheme`."""

from __future__ import annotations

from dataclasses import dataclass

from pydtnn.testing.scheme_case import Case
from pydtnn.testing.scheme_course import BATCH, SAMPLES, STEPS


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
