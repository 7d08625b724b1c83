"""Groups of ranks that take trials from a study and train them, until none is left."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydtnn.comm import Communicator
from pydtnn.comm.agree import on_rank_0
from pydtnn.comm.monitor.failure import is_lost
from pydtnn.comm.monitor.table import OTHER_GROUPS
from pydtnn.tools.search.dimension import WHO
from pydtnn.tools.search.space import Space
from pydtnn.tools.search.study import SharedStudy, TakenTrial, lock_of
from pydtnn.utils.errors import AgreedError, Interrupted, RankFailure, describe
from pydtnn.utils.launcher import survives
from pydtnn.utils.observer import phase

Objective = Callable[["Trial"], Mapping[str, float] | float]
"""Returns the value of a trial, or those of several objectives by name."""


class Trial:
    """A trial, as the function that trains it receives it. All ranks of its group have one.

    Attributes
    ----------
    number : int
        Counted from 0.
    values : dict
        Values of the dimensions by name.
    comm : Communicator
        The ranks that train it.
    folder : Path
        A folder of its own, which may not exist yet.
    resumed : bool
        Whether it has been interrupted before: it continues from its folder.
    pruned : bool
        Whether `report` has returned True.
    facts : dict
        What is stored with the result.
    """

    def __init__(
        self, taken: TakenTrial, comm: Communicator, folder: Path, shared: SharedStudy | None
    ) -> None:
        self.number, self.values, self.comm = taken.number, taken.values, comm
        self.folder, self.resumed = folder / f"trial-{taken.number:05d}", taken.resumed
        self.pruned = False
        self.facts: dict[str, Any] = {}
        self._shared = shared

    def report(self, value: float, epoch: int, *, last: bool = False) -> bool:
        """Report the value of an epoch; return whether training should end with it.

        Collective: all ranks of the group call it.

        Parameters
        ----------
        value : float
            The value of the objective, on the first rank.
        epoch : int
            Counted from 1.
        last : bool
            Whether it is the last epoch anyway, so that the trial is complete.
        """
        if not self.pruned:
            told = on_rank_0(self.comm, self._report, float(value), epoch)
            self.pruned = self.comm.gather_object(told)[0] and not last
        return self.pruned

    def _report(self, value: float, epoch: int) -> bool:
        assert self._shared is not None
        return self._shared.report(self.number, value, epoch)


class Worker:
    """A group of ranks that trains one trial after the other. All ranks of the group have one.

    Parameters
    ----------
    comm : Communicator
        The group.
    space : Space
    folder : Path
        Folder of the study.
    objective : callable
        Trains a trial.
    show : callable
        Called on the first rank of the group with the number of each trial that has ended.
    facts : mapping
        What the study stores of the group: "host", "job" and "ranks".
    """

    def __init__(
        self,
        comm: Communicator,
        space: Space,
        folder: Path,
        objective: Objective,
        show: Callable[[SharedStudy, int], None],
        facts: Mapping[str, Any],
    ) -> None:
        self.comm, self.space, self.folder = comm, space, folder
        self._objective, self._show = objective, show
        self._shared = on_rank_0(comm, SharedStudy, folder, space)
        self._facts = facts

    def run(self) -> None:
        """Train trials until none is left. Collective: all ranks of the group call it."""
        supervision = self.comm.supervision
        with contextlib.closing(self):
            while True:
                with phase(supervision.activity if supervision else None, OTHER_GROUPS):
                    taken = self.comm.gather_object(on_rank_0(self.comm, self._take))[0]
                if taken is None:
                    return
                self._train(Trial(taken, self.comm, self.folder, self._shared))

    def close(self) -> None:
        """Give up the trial in progress, if ranks of the group have failed."""
        if self._shared is not None:
            self._shared.close()

    def _take(self) -> TakenTrial | None:
        assert self._shared is not None
        try:
            return self._shared.take(self._facts)
        finally:
            while self._shared.given_up:
                self._show(self._shared, self._shared.given_up.pop(0))

    def _train(self, trial: Trial) -> None:
        values, reason = {}, ""
        try:
            values = self._values(self._objective(trial))
        except Interrupted:
            raise
        except AgreedError as error:  # on all ranks
            reason = describe(error)
        except Exception as error:
            reason = describe(error)
            if self.comm.size > 1:  # on this one: the others may wait for it
                if self.comm.lost_ranks():
                    raise RankFailure from error
                if not is_lost(error):
                    text = f"rank {self.comm.rank}: {reason}"
                    lock_of(self.folder, trial.number).write_text(text)
                if survives():  # the group takes the next trial
                    raise RankFailure from error
                raise
        on_rank_0(self.comm, self._store, trial, values, reason)

    def _values(self, result: Mapping[str, float] | float) -> dict[str, float]:
        names = [*self.space.objective]
        values = dict(result) if isinstance(result, Mapping) else {names[0]: result}
        missing = [name for name in names if name not in values]
        if missing:
            raise AgreedError(f"{WHO}: expected a value of {missing[0]}, got {', '.join(values)}")
        return {name: float(values[name]) for name in names}

    def _store(self, trial: Trial, values: Mapping[str, float], reason: str) -> None:
        assert self._shared is not None
        wrong = [name for name, value in values.items() if not math.isfinite(value)]
        if wrong and not trial.pruned:
            reason = f"{wrong[0]} is {values[wrong[0]]}"
        if reason:
            self._shared.fail(trial.number, reason)
        elif trial.pruned:
            self._shared.prune(trial.number, trial.facts)
        else:
            self._shared.tell(trial.number, values, trial.facts)
        self._show(self._shared, trial.number)
