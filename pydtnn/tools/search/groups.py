"""Groups of ranks, each of which trains a trial at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING

from pydtnn.cli.workload import describe_data, describe_run
from pydtnn.comm import Communicator
from pydtnn.comm.agree import on_rank_0, together
from pydtnn.tools.perfmodel.predicted import find_platform, predict
from pydtnn.tools.search.dimension import RANKS, WHO
from pydtnn.tools.search.space import Space
from pydtnn.utils.units import duration

if TYPE_CHECKING:
    from pydtnn.tools.search.training import TrainingObjective


AUTO = "auto"
"""The number of ranks per trial that the performance model chooses."""


def check_groups(ranks: int, sizes: Sequence[int], space: Space) -> None:
    """Raise ValueError unless ranks can be divided into groups of these sizes, repeated."""
    if min(sizes) < 1 or ranks % sum(sizes):
        given = ",".join(map(str, sizes))
        what = f"must divide the {ranks} ranks"
        if len(sizes) > 1:
            what = f"must have a sum that divides the {ranks} ranks"
        raise ValueError(f"{WHO}: --ranks-per-trial {what}, got {given}")
    alone = [size for size in space.sizes if size not in sizes]
    if alone:
        raise ValueError(
            f"{WHO}: {RANKS} {alone[0]} requires a group of so many ranks; add it to "
            "--ranks-per-trial"
        )


def divide(ranks: int, sizes: Sequence[int]) -> list[range]:
    """Return the ranks of each group; the sizes are repeated, and the last group may be smaller.

    >>> divide(4, [2]), divide(7, [1, 2])
    ([range(0, 2), range(2, 4)], [range(0, 1), range(1, 3), range(3, 4), range(4, 6), range(6, 7)])
    """
    groups: list[range] = []
    for size in cycle(sizes):
        begin = groups[-1].stop if groups else 0
        if begin == ranks:
            return groups
        groups.append(range(begin, min(begin + size, ranks)))
    raise AssertionError  # never: cycles do not end


def choose_ranks(comm: Communicator, space: Space, objective: TrainingObjective) -> tuple[int, str]:
    """Return the number of ranks per trial with which a study ends first, and why.

    Collective: all ranks call it. Steps are predicted by closed formulas for the platform of this
    job, with the first options that are checked.

    Raises
    ------
    AgreedError
        On all ranks, if the performance model has no formula for the options.
    """
    config = objective.first()
    data = together(comm, objective.data, config)[0]

    whole = describe_run(config, {"data": 1}, describe_data(config, data, 1))
    platform = find_platform(config, comm, objective.threads, whole, rates=True)
    if platform is None:
        raise ValueError(f"{WHO}: --ranks-per-trial auto predicts CPUs only; set a number")

    def choose() -> tuple[int, str]:
        trials: dict[int, float] = {}
        for ranks in (one for one in range(1, comm.size + 1) if comm.size % one == 0):
            work = describe_run(config, {"data": ranks}, describe_data(config, data, ranks))
            one = predict(config, replace(work, threads=objective.threads), platform)
            if one.reason:
                raise ValueError(f"{WHO}: --ranks-per-trial auto: {one.reason}; set a number")
            steps = config.steps_per_epoch or math.ceil(work.samples / work.batch)
            trials[ranks] = config.epochs * steps * one.seconds
        return explain(trials, comm.size, space.trials)

    return comm.gather_object(on_rank_0(comm, choose))[0]


def explain(seconds: Mapping[int, float], ranks: int, trials: int) -> tuple[int, str]:
    """Return the best number of ranks per trial by the times of a trial, and why.

    Parameters
    ----------
    seconds : mapping of int to float
        Time of a trial in s, by its number of ranks.
    ranks : int
        Of the job.
    trials : int
        Of the study.

    Examples
    --------
    >>> explain({1: 10.0, 2: 6.0, 4: 5.0}, 4, 8)[0], explain({1: 10.0, 2: 6.0, 4: 5.0}, 4, 1)[0]
    (1, 4)
    """
    whole = {n: math.ceil(trials / (ranks // n)) * one for n, one in seconds.items()}
    best = min(whole, key=lambda n: (whole[n], n))
    parts = [
        f"{duration(whole[n])} with {n}"
        + (f" (a trial is {seconds[1] / one:.2f} times as fast)" if n > 1 else "")
        for n, one in seconds.items()
    ]
    return best, f"ranks per trial: {best}; predicted time of the study: {', '.join(parts)}"
