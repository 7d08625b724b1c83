"""A scheme on one number of ranks, for all checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np

from pydtnn.comm import Communicator, create_communicator, run_threads
from pydtnn.data import ArrayDataset
from pydtnn.optimizers import SGD, Optimizer
from pydtnn.parallel.exchange import AllReduce, GradientExchange
from pydtnn.testing.ranks import run_within
from pydtnn.testing.scheme_rank import Course, Plan, Rank, Scheme
from pydtnn.testing.scheme_watch import Ledger
from pydtnn.training.nonfinite import NotFiniteError
from pydtnn.utils.errors import describe


def run_serial(optimizer: Callable[[], Optimizer], data: ArrayDataset, plan: Plan) -> Course:
    """Train on one rank without a scheme."""
    comm = create_communicator("serial")
    return Rank(comm, Ledger(), AllReduce, optimizer, data, plan).run()


def run_ranks(
    ranks: int,
    scheme: Scheme,
    optimizer: Callable[[], Optimizer],
    data: ArrayDataset,
    plan: Plan,
    *,
    timeout: float,
) -> list[Course]:
    """Train on a number of ranks, with two ranks per host.

    Raises
    ------
    TimeoutError
        If it takes longer than `timeout` seconds, with the current call of each rank.
    Exception
        Errors of `run_threads`.
    """
    ledgers = [Ledger() for _ in range(ranks)]

    def rank(comm: Communicator) -> Course:
        return Rank(comm, ledgers[comm.rank], scheme, optimizer, data, plan).run()

    def where(rank: int) -> str:
        return ledgers[rank].where()

    hosts = [rank // 2 for rank in range(ranks)]
    return run_within(ranks, rank, where, timeout=timeout, hosts=hosts)


class Case:
    """A scheme on one number of ranks.

    Parameters
    ----------
    scheme : callable
        Creates the exchange from a communicator.
    ranks : int
    data : ArrayDataset
    optimizer : callable, optional
        Creates the rule; by default one for the type of scheme.
    equal_to_serial : bool or None
        Whether it must agree with serial training; None: as declared by the scheme.
    order_dependent : bool
        Whether results may depend on the order in which messages arrive.
    tolerance : float
        Largest difference from serial training, relative to the largest parameter.
    timeout : float
        Time limit of one run, in s.

    Attributes
    ----------
    serial, quiet : Course
        Serial training, and ranks without communication of the scheme.
    plain : list of Course
        Results of every rank, with one bucket per parameter and no special conditions.
    must_be_serial : bool
        Whether the scheme must agree with serial training.
    sums_losses : bool
        Whether all ranks sum the losses of every step.
    """

    def __init__(
        self,
        scheme: Scheme,
        ranks: int,
        data: ArrayDataset,
        *,
        optimizer: Callable[[], Optimizer] | None,
        equal_to_serial: bool | None,
        order_dependent: bool,
        tolerance: float,
        timeout: float,
    ) -> None:
        self.order_dependent = order_dependent
        self.scheme, self.ranks, self.data = scheme, ranks, data
        self.tolerance, self.timeout = tolerance, timeout
        self.name = getattr(scheme, "__name__", repr(scheme))
        exchange = self._make()
        self.name = type(exchange).__name__
        promised = exchange.equal and exchange.sums_gradients
        self.must_be_serial = promised if equal_to_serial is None else equal_to_serial
        self.optimizer = optimizer or (_with_momentum if exchange.sums_gradients else _without)
        self.serial = run_serial(self.optimizer, data, Plan())
        self.sums_losses = exchange.sums_losses
        self.quiet = self._run(self._quiet, Plan())[0]
        self.plain = self.run(Plan())

    def _make(self) -> GradientExchange:
        """Create the exchange once, to read its declarations."""
        try:
            exchange = run_threads(self.ranks, self.scheme)[0]
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

    def run(self, plan: Plan, when: str = "") -> list[Course]:
        """Run without expected errors."""
        try:
            return self._run(self.scheme, plan)
        except NotFiniteError as error:
            told = f"{describe(error)}; here arrays hold NaN until their request is complete"
            self.fail(told, when, error)
        except Exception as error:
            self.fail(describe(error), when, error)

    def run_failing(self, plan: Plan) -> Exception | None:
        """Run with an injected error on one rank, and return the raised error."""
        try:
            self._run(self.scheme, plan)
        except Exception as error:
            return error
        return None

    def _run(self, scheme: Scheme, plan: Plan) -> list[Course]:
        return run_ranks(self.ranks, scheme, self.optimizer, self.data, plan, timeout=self.timeout)

    def compare(self, values: np.ndarray, expected: np.ndarray) -> tuple[float, str]:
        """Return the largest difference, relative to the largest value, and its parameter."""
        apart = np.abs(values - expected)
        apart[np.isnan(apart)] = np.inf
        worst = int(apart.argmax())
        return float(apart[worst] / np.abs(expected).max()), self.serial.names[worst]

    def fail(self, what: str, when: str = "", error: Exception | None = None) -> NoReturn:
        """Raise the error of a failed check."""
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        raise AssertionError(f"{self.name} on {ranks}{when and ', '}{when}: {what}") from error


def _with_momentum() -> Optimizer:
    return SGD(0.1, momentum=0.9)


def _without() -> Optimizer:
    """Return SGD without momentum, for ranks that update independently."""
    return SGD(0.5)
