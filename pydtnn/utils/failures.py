"""How long a run takes if hosts fail, and how often it should write checkpoints.

All times are in s.

References
----------
Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974; Daly, "A
higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, expm1, log, sqrt
from typing import NamedTuple

BISECTIONS = 60
"""As many as the digits of a number."""


class NoHostError(ValueError):
    """Fewer than two hosts remain before a run has ended."""


class Expected(NamedTuple):
    """The expected time of a run in s, and the expected number of failures."""

    seconds: float
    failures: float


def optimal_interval(cost: float, mtbf: float) -> float:
    """Return the time of computation between two checkpoints that wastes least, in s.

    Parameters
    ----------
    cost : float
        Time by which a checkpoint delays training, in s.
    mtbf : float
        Mean time between two failures, in s.

    References
    ----------
    Daly, equation 37.

    Examples
    --------
    >>> round(optimal_interval(10, 86400))  # Young: the square root of 2 x 10 x 86400, 1315
    1308
    """
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return sqrt(2 * cost * mtbf) * (1 + sqrt(ratio) / 3 + ratio / 9) - cost


def restarted(work: float, interval: float, cost: float, restart: float, mtbf: float) -> Expected:
    """Return the time of a run that ends with each failure, and is started again.

    Parameters
    ----------
    work : float
        Time of the computation without failures.
    interval, cost : float
        Time of computation between two checkpoints, and time by which one delays training.
    restart : float
        Time from a failure until training continues, without the work that is repeated.
    mtbf : float
        Mean time between two failures of the run.

    References
    ----------
    Daly, equation 20.
    """
    number = work / interval
    seconds = number * mtbf * exp(restart / mtbf) * expm1((interval + cost) / mtbf)
    return Expected(seconds, seconds / mtbf)


def continued(
    work: float, hosts: int, mtbf: float, lost: float, speed: Callable[[int], float]
) -> Expected:
    """Return the time of a run that continues without the hosts that fail.

    ``hosts * exp(-t / mtbf)`` of them remain after a time t, and the speed is linear between whole
    numbers of hosts.

    Parameters
    ----------
    work : float
        Time of the computation on all hosts, without failures.
    hosts : int
    mtbf : float
        Mean time between two failures of one host.
    lost : float
        Time that a failure costs: until the others continue, and for the work that is repeated.
    speed : callable
        Returns the speed of training with a number of hosts, relative to that with all of them.

    Raises
    ------
    NoHostError
        If no two hosts remain before the work is done.

    Examples
    --------
    >>> run = continued(1e4, hosts=10, mtbf=1e6, lost=10.0, speed=lambda hosts: hosts / 10)
    >>> round(run.seconds), round(run.failures, 3)
    (10051, 0.1)
    """
    for more in range(hosts, 1, -1):
        speeds = speed(more), speed(more - 1)
        done = mtbf * _progress(more, more - 1, speeds, lost / mtbf)
        if done >= work:
            low, high = more - 1.0, float(more)
            for _ in range(BISECTIONS):
                middle = (low + high) / 2
                enough = mtbf * _progress(more, middle, speeds, lost / mtbf) >= work
                low, high = (middle, high) if enough else (low, middle)
            return Expected(mtbf * log(hosts / low), hosts - low)
        work -= done
    raise NoHostError(f"fewer than two of {hosts} hosts remain until the end")


def _progress(more: int, left: float, speeds: tuple[float, float], lost: float) -> float:
    """Return the computation until `left` of `more` hosts remain, `mtbf` and `lost` divided by it.

    That is the integral of ``speed(h) * (1 - lost * h) / h`` over the hosts h.
    """
    slope = speeds[0] - speeds[1]
    level = speeds[0] - slope * more
    linear = (slope - level * lost) * (more - left)
    return level * log(more / left) + linear - slope * lost * (more**2 - left**2) / 2
