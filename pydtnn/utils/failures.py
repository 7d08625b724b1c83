"""How often a run whose hosts fail should write checkpoints.

References
----------
Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974; Daly, "A
higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006.
"""

from __future__ import annotations

from math import sqrt


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
