"""The number of ranks that train a trial together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pydtnn.cli.predicted import find_platform, predict
from pydtnn.cli.workload import describe_data, describe_run
from pydtnn.comm import Communicator
from pydtnn.comm.agree import on_rank_0, together
from pydtnn.search.space import WHO, Space
from pydtnn.utils.units import duration

if TYPE_CHECKING:
    from pydtnn.search.training import TrainingObjective


def check_groups(ranks: int, ranks_per_trial: int) -> None:
    """Raise ValueError unless ranks can be divided into groups."""
    if ranks_per_trial < 1 or ranks % ranks_per_trial:
        raise ValueError(
            f"{WHO}: --ranks-per-trial must divide the {ranks} ranks, got {ranks_per_trial}"
        )


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
