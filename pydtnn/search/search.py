"""A search: ranks in groups, each of which takes trials from one study."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydtnn.comm import Communicator, create_communicator
from pydtnn.comm.agree import agree, together
from pydtnn.comm.cores import threads_per_rank
from pydtnn.comm.monitor.table import OTHER_GROUPS
from pydtnn.search.groups import check_groups, choose_ranks
from pydtnn.search.lines import describe_search, describe_trial
from pydtnn.search.space import Space, make_space
from pydtnn.search.study import SharedStudy
from pydtnn.search.worker import Objective, Worker
from pydtnn.utils.observer import phase

if TYPE_CHECKING:
    import optuna


def print_line(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def run(
    train: Objective | None,
    space: Space | Mapping[str, Any],
    folder: str | Path = "runs/search",
    *,
    ranks_per_trial: int | None = 1,
    comm: Communicator | None = None,
    show: Callable[[str], object] | None = print_line,
    **options: Any,
) -> optuna.Study:
    """Search; return the study of Optuna with all trials. Collective: all ranks call it.

    A study in the folder is continued. Other jobs may search in it at the same time.

    Parameters
    ----------
    train : callable or None
        Called with a `Trial` on each rank of a group; returns its value, or a mapping of the
        objective's names to values. None trains with the options of the trial.
    space : Space or mapping
        As in `make_space`.
    folder : str or Path
        Folder of the study, and of the runs of its trials.
    ranks_per_trial : int
        Ranks of a group, which divides the number of ranks. None: as many as the performance model
        predicts to end the study first, for trials of training.
    comm : Communicator, optional
        All ranks; by default those that mpirun has started.
    show : callable, optional
        Receives a line for each trial, on the first rank of its group; None shows nothing.
    **options
        Of `make_space`, if `space` is a mapping.

    Examples
    --------
    >>> from pydtnn.search import run
    >>> space = {"x": {"low": 0.0, "high": 1.0}}
    >>> def parabola(trial):
    ...     return (trial.values["x"] - 0.5) ** 2
    >>> study = run(parabola, space, objective={"minimize": "y"}, trials=8)  # doctest: +SKIP
    """
    comm = comm or create_communicator()
    made = space if isinstance(space, Space) else together(comm, _make, space, options)
    if ranks_per_trial is not None:
        together(comm, check_groups, comm.size, ranks_per_trial)
    threads = together(comm, threads_per_rank, comm)
    own = train
    if own is None:
        from pydtnn.search.training import TrainingObjective

        own = trained = TrainingObjective(made, threads)
        together(comm, trained.check)
        if ranks_per_trial is None:
            ranks_per_trial, why = choose_ranks(comm, made, trained)
            if comm.rank == 0 and show is not None:
                show(why)
    ranks_per_trial = ranks_per_trial or 1
    place = comm.rank // ranks_per_trial
    ranks = [*range(place * ranks_per_trial, (place + 1) * ranks_per_trial)]
    supervision = comm.supervision
    if supervision is not None and comm.size > 1:
        supervision.last_step.abandon()  # groups have no common last step: a signal ends them
    job = comm.gather_object(os.getpid())[0]

    def tell(shared: SharedStudy, number: int) -> None:
        if show is not None:
            show(describe_trial(made, shared.study.get_trials(deepcopy=False), number))

    with comm.split(place) as group:
        facts = {"host": socket.gethostname(), "job": job, "ranks": ranks}
        worker = Worker(group, made, Path(folder), own, tell, facts)
        if comm.rank == 0 and show is not None:
            show(describe_search(made, comm.size // ranks_per_trial, ranks_per_trial, str(folder)))
        worker.run()
    with phase(supervision.activity if supervision else None, OTHER_GROUPS):  # has no deadline
        agree(comm)  # all groups
    return SharedStudy(Path(folder), made).study


def _make(space: Mapping[str, Any], options: Mapping[str, Any]) -> Space:
    return make_space(space, **options)
