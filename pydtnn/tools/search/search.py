"""A search: ranks in groups, each of which takes trials from one study."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydtnn.comm import Communicator, create_communicator
from pydtnn.comm.agree import on_rank_0, on_remaining, together
from pydtnn.comm.cores import threads_per_rank
from pydtnn.comm.monitor.table import OTHER_GROUPS
from pydtnn.tools.search.dimension import WHO
from pydtnn.tools.search.lines import describe_earlier, describe_search, describe_trial
from pydtnn.tools.search.space import Space, make_space
from pydtnn.tools.search.study import SharedStudy
from pydtnn.tools.search.worker import Objective, Worker
from pydtnn.utils.errors import RankFailure, printable
from pydtnn.utils.observer import phase
from pydtnn.utils.validate import check_int

if TYPE_CHECKING:
    import optuna


def print_line(text: str) -> None:
    """Print a line at once."""
    print(printable(text), flush=True)


def run(
    train: Objective | None,
    space: Space | Mapping[str, Any],
    folder: str | Path = "runs/search",
    *,
    ranks_per_trial: int = 1,
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
        Ranks of a group.
    comm : Communicator, optional
        All ranks; by default those that mpirun has started.
    show : callable, optional
        Receives a line for each trial, on the first rank of its group; None shows nothing. By
        default they are printed.
    **options
        Of `make_space`, if `space` is a mapping.

    Examples
    --------
    >>> from pydtnn.tools.search import run
    >>> space = {"x": {"low": 0.0, "high": 1.0}}
    >>> def parabola(trial):
    ...     return (trial.values["x"] - 0.5) ** 2
    >>> study = run(parabola, space, objective={"minimize": "y"}, trials=8)  # doctest: +SKIP
    """
    comm = comm or create_communicator()
    made = space if isinstance(space, Space) else together(comm, _make, space, options)
    return search(train, made, Path(folder), ranks_per_trial, comm, show)[1]


def search(
    train: Objective | None,
    space: Space,
    folder: Path,
    ranks_per_trial: int,
    comm: Communicator,
    show: Callable[[str], object] | None,
) -> tuple[Communicator, optuna.Study]:
    """Search as `run`; return the ranks that remain, too."""
    together(comm, _check_groups, comm.size, ranks_per_trial)

    def search_on(comm: Communicator) -> optuna.Study:
        _search(train, space, folder, ranks_per_trial, comm, show)
        return SharedStudy(folder, space).study

    return on_remaining(comm, search_on)


def _check_groups(ranks: int, size: int) -> None:
    """Raise ValueError unless ranks can be divided into groups of a size."""
    check_int(WHO, "ranks_per_trial", size, at_least=1)
    if ranks % size:
        raise ValueError(f"{WHO}: --ranks-per-trial must divide the {ranks} ranks, got {size}")


def _search(
    train: Objective | None,
    space: Space,
    folder: Path,
    size: int,
    comm: Communicator,
    show: Callable[[str], object] | None,
) -> None:
    """Train trials on groups of ranks until none is left; the last group may be smaller."""
    threads = together(comm, threads_per_rank, comm)
    own = train
    if own is None:
        from pydtnn.tools.search.training import TrainingObjective

        own = trained = TrainingObjective(space, threads)
        trained.check(comm)
    study = on_rank_0(comm, SharedStudy, folder, space)  # refuses the study of another space
    supervision = comm.supervision
    if supervision is not None and comm.size > 1:
        supervision.last_step.abandon()  # groups have no common last step: a signal ends them
    job = comm.gather_object(os.getpid())[0]
    if study is not None and show is not None:
        groups = [min(size, comm.size - begin) for begin in range(0, comm.size, size)]
        show(describe_search(space, groups, str(folder)))
        if earlier := describe_earlier(space, study.study.get_trials(deepcopy=False)):
            show(earlier)

    def tell(shared: SharedStudy, number: int) -> None:
        if show is not None:
            show(describe_trial(space, shared.study.get_trials(deepcopy=False), number))

    def work(group: Communicator) -> None:
        facts = {"host": socket.gethostname(), "job": job, "ranks": [*group.members]}
        Worker(group, space, folder, own, tell, facts).run()

    group, _ = on_remaining(comm.split(comm.rank // size), work)
    group.free()
    with phase(supervision.activity if supervision else None, OTHER_GROUPS):  # has no deadline
        if not comm.all_remain():
            raise RankFailure  # trials of ranks that have failed may be left


def _make(space: Mapping[str, Any], options: Mapping[str, Any]) -> Space:
    return make_space(space, **options)
