"""Check that a parallel scheme keeps its contract: for the library's and for one's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pydtnn.optimizers import Optimizer
from pydtnn.testing.scheme_case import Case
from pydtnn.testing.scheme_checks import CHECKS
from pydtnn.testing.scheme_course import BATCH, problem
from pydtnn.testing.scheme_rank import Scheme
from pydtnn.testing.scheme_report import SchemeReport, measure


def check_scheme(
    scheme: Scheme,
    *,
    ranks: Sequence[int] = (1, 2, 3, 4),
    equal_to_serial: bool | None = None,
    optimizer: Callable[[], Optimizer] | None = None,
    tolerance: float = 1e-10,
    seed: int = 0,
    timeout: float = 20.0,
) -> SchemeReport:
    """Check that a parallel scheme keeps its contract, on several numbers of ranks.

    The ranks are threads that train a small network in float64. Batches leave ranks with uneven
    parts, and the last of each epoch leaves all ranks but one with none. The scheme must

    - compute what serial training does, or at least lower the loss, with one bucket or many;
    - keep parameters equal on all ranks after every step if its `equal` says so, and in the end;
    - compute the same bytes with random delays before and after every call, and touch no array
      that belongs to a request under way;
    - leave no message that is not received;
    - compute the same bytes when it is saved, and when it is resumed in the middle of an epoch;
    - complete what is under way when a step is abandoned, and go on;
    - let the error of one rank end all of them.

    Parameters
    ----------
    scheme : type or callable
        A subclass of `GradientExchange`, or whatever makes one of a communicator:
        ``lambda comm: LocalSGD(comm, period=2)``.
    ranks : sequence of int
        At most 11, the samples of a batch.
    equal_to_serial : bool, optional
        Whether it must compute what serial training does. By default schemes must that are `equal`
        and `sums_gradients`, which those that compress or are late do not.
    optimizer : callable, optional
        Makes the rule. By default SGD with momentum for schemes that sum gradients, and without
        for others: a rank's own momentum is no part of serial training.
    tolerance : float
        Largest difference from serial training, relative to the largest parameter.
    seed : int
        Of the data.
    timeout : float
        Longest time that one run may take, in s; each takes some 50 ms.

    Returns
    -------
    SchemeReport
        Differences, messages and bytes; `str` of it is a table.

    Raises
    ------
    AssertionError
        In one sentence: the scheme, on how many ranks, what is wrong and by how much.

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
