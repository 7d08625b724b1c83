"""Checks of the contract of parallel schemes."""

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
