"""The study of a search: a journal in a folder, which groups of any number of jobs share."""

from __future__ import annotations

import fcntl
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pydtnn.search.dimension import RANKS, WHO
from pydtnn.search.journal import FileLock, Journal
from pydtnn.search.population import NAME, exploit, explore
from pydtnn.search.space import Space
from pydtnn.utils.imports import import_optional
from pydtnn.utils.names import unknown

if TYPE_CHECKING:
    import optuna

JOURNAL, LOCKS = "study.journal", "locks"
"""The file of the study, and the folder of files that are locked."""

FIXED = "fixed_params"
"""Attribute in which Optuna stores values of a trial that its sampler does not choose."""

CHOICE = "choice"
"""Locked while a trial is chosen."""

MOST_STARTS = 5
"""Starts of a trial without a further epoch, after which it is not started again."""

SPACE, STARTS, REACHED, REASON = "space", "starts", "reached", "reason"
GROUP, EPOCHS, POINT, PARENT = "group", "epochs", "point", "parent"
"""Attributes of a study, and of its trials."""


def samplers() -> dict[str, Any]:
    """Return the classes of samplers by name."""
    from optuna import samplers as own

    return {
        "grid": own.RandomSampler,  # never asked: trials of a grid are known
        "random": own.RandomSampler,
        "quasi-random": own.QMCSampler,
        "tpe": own.TPESampler,
        "cma-es": own.CmaEsSampler,
        "nsga2": own.NSGAIISampler,
        NAME: own.RandomSampler,  # asked for the first generation
    }


def pruners() -> dict[str, Any]:
    """Return the classes of pruners by name."""
    from optuna import pruners as own

    return {
        "none": own.NopPruner,
        "median": own.MedianPruner,
        "asha": own.SuccessiveHalvingPruner,
        "hyperband": own.HyperbandPruner,
    }


DEFAULTS: dict[str, dict[str, Any]] = {
    "tpe": {"constant_liar": True, "multivariate": False},
    "asha": {"min_resource": 1, "reduction_factor": 3},
    "quasi-random": {"warn_asynchronous_seeding": False, "warn_independent_sampling": False},
    "cma-es": {"warn_independent_sampling": False},
}
"""Options of Optuna's classes that differ from its own defaults."""


def _make(what: str, classes: Mapping[str, Any], given: Mapping[str, Any], **more: Any) -> Any:
    options = dict(given)
    name = options.pop("name")
    if name == NAME:
        options = {}
    if name not in classes:
        raise ValueError(f"{WHO}: {unknown(what, name, classes)}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna's interfaces may change
            return classes[name](**{**DEFAULTS.get(name, {}), **options, **more})
    except (TypeError, ValueError) as error:
        text = str(error).rpartition("__init__() ")[2]
        raise ValueError(f"{WHO}: {what} {name}: {text}; see the class of Optuna") from error


def lock_of(folder: Path, number: int) -> Path:
    """Return the file that a trial locks; it contains the error that ends its job, if any."""
    return folder / LOCKS / f"{number:05d}"


@dataclass(frozen=True)
class Taken:
    """A trial that a group of ranks trains.

    Attributes
    ----------
    number : int
        Counted from 0.
    values : dict
        Values of the dimensions by name.
    resumed : bool
        Whether it has been interrupted before.
    parent : int or None
        The trial of a population from whose checkpoint it continues.
    part : float
        Share of the epochs after which it ends.
    """

    number: int
    values: dict[str, Any]
    resumed: bool = False
    parent: int | None = None
    part: float = 1.0


class Later(Exception):
    """The next trial depends on results of trials that are in progress."""


class SharedStudy:
    """The study in a folder: gives out trials, and stores their results.

    Any number of processes have one at the same time; the study is locked while a trial is chosen.
    A trial is continued if the process that had it has ended, and chosen with a random generator
    that depends on its number, so that interruptions do not change the trials of one worker.

    Parameters
    ----------
    folder : Path
        Created if it does not exist.
    space : Space

    Attributes
    ----------
    study : optuna.Study
    given_up : list of int
        Interrupted trials that `take` has not continued.

    Raises
    ------
    ValueError
        If the folder contains a study of another space.
    ImportError
        If Optuna is not installed, with the command that installs it.
    """

    def __init__(self, folder: Path, space: Space) -> None:
        import_optional("optuna", "optuna", "search")
        import optuna
        from optuna.study import StudyDirection

        self.folder, self.space = folder, space
        self._held: dict[int, int] = {}
        self._trials: dict[int, optuna.Trial] = {}
        self.given_up: list[int] = []
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        _make("sampler", samplers(), space.sampler)
        pruner = _make("pruner", pruners(), space.pruner)
        (folder / LOCKS).mkdir(parents=True, exist_ok=True)
        self._journal = Journal(folder / JOURNAL, FileLock(folder / LOCKS / JOURNAL))
        storage = optuna.storages.JournalStorage(cast("Any", self._journal))
        with FileLock(self.folder / LOCKS / CHOICE):
            self.study = optuna.create_study(
                storage=storage,
                study_name=WHO,
                directions=[StudyDirection[one.upper()] for one in space.objective.values()],
                pruner=pruner,
                load_if_exists=True,
            )
            before = self.study.user_attrs.setdefault(SPACE, space.identity())
            if before != space.identity():
                raise ValueError(
                    f"{WHO}: {folder} contains a study of another space; restore the file, or "
                    "choose another folder with --study"
                )
            if not self.study.get_trials(deepcopy=False):
                self.study.set_user_attr(SPACE, before)
        self._end = time.monotonic() + space.after

    def _claim(self, number: int) -> bool:
        """Lock a trial; return False if another process has it."""
        file = os.open(lock_of(self.folder, number), os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # also where locks are not supported: it may be in progress
            os.close(file)
            return False
        self._held[number] = file
        return True

    def close(self) -> None:
        """Give up the trials in progress, which any process may then continue."""
        for number in [*self._held]:
            self._release(number)

    def _release(self, number: int) -> None:
        if number in self._held:
            os.close(self._held.pop(number))

    def take(self, group: Mapping[str, Any]) -> Taken | None:
        """Return a trial that was interrupted or a new one; None if there is none left.

        Parameters
        ----------
        group : mapping
            Facts about the ranks, which the study stores.

        Raises
        ------
        Later
            If the next trial depends on trials that are in progress.
        """
        import optuna

        study, state = self.study, optuna.trial.TrialState
        size = len(group["ranks"])
        with self._journal.stored(), FileLock(self.folder / LOCKS / CHOICE):
            for one in study.get_trials(deepcopy=False, states=(state.RUNNING,)):
                if not self._suits(one, size) or not self._claim(one.number):
                    continue
                if study.get_trials(deepcopy=False)[one.number].state.is_finished():
                    self._release(one.number)  # its process has ended it since
                    continue
                self._seed(one.number)
                trial = optuna.Trial(study, one._trial_id)
                if reason := self._reason(one):
                    self._store(trial, {REASON: reason}, "FAIL")
                    self.given_up.append(one.number)
                elif not self.ended():
                    return self._begin(trial, group)
                self._release(one.number)
            trials = study.get_trials(deepcopy=False)
            enqueued = [one for one in trials if one.state == state.WAITING]  # by tools of Optuna
            number = len(trials) - len(enqueued)
            if number >= self.space.trials or self.ended():
                return None
            self._seed(number)
            if enqueued:
                trial = study.ask()
            elif (given := self._next(trials, size)) is not None:
                trial = self._create(*given)
            else:
                return None
            self._claim(trial.number)
            return self._begin(trial, group)

    def _suits(self, trial: optuna.trial.FrozenTrial, size: int) -> bool:
        """Return whether a trial that was begun is one for so many ranks."""
        known = {**trial.system_attrs.get(FIXED, {}), **trial.params}
        return known.get(RANKS, size) == size

    def _next(
        self, trials: Sequence[optuna.trial.FrozenTrial], size: int
    ) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return values of a new trial that the sampler does not choose, and its attributes.

        None if there is no trial for so many ranks.

        Raises
        ------
        Later
            If it depends on trials that are in progress.
        """
        space, number = self.space, len(trials)
        if space.sizes and size not in space.sizes:
            return None
        if space.sampler["name"] == "grid":
            tried = {one.user_attrs.get(POINT, one.number) for one in trials}
            for point, values in enumerate(space.grid()):
                if point not in tried and values.get(RANKS, size) == size:
                    return space.stored(values), {POINT: point}
            return None
        fixed: dict[str, Any] = {RANKS: size} if space.sizes else {}
        population = space.population
        if population is None or not (before := population.before(number)):
            return fixed, {}
        if number >= population.trials:
            return None
        members = [trials[one] for one in before]
        if not all(one.state.is_finished() for one in members):
            raise Later
        generator = np.random.default_rng([space.seed, number])
        sign = -1 if "maximize" in space.objective.values() else 1
        costs = [None if one.values is None else sign * one.values[0] for one in members]
        own = number % population.population
        parent = exploit(costs, own, population.quantile, generator)
        if parent is None:
            return None
        values = dict(members[parent].params)
        if parent != own:
            values = explore(space.dimensions, values, population.resample, generator)
        return values | fixed, {PARENT: members[parent].number}

    def _create(self, values: Mapping[str, Any], attributes: Mapping[str, Any]) -> optuna.Trial:
        """Begin a trial with some values at once: if this process is killed, none has a part."""
        import optuna

        study = self.study
        template = optuna.trial.create_trial(
            state=optuna.trial.TrialState.RUNNING,
            system_attrs={FIXED: dict(values)},
            user_attrs=dict(attributes),
        )
        return optuna.Trial(study, study._storage.create_new_trial(study._study_id, template))

    def _seed(self, number: int) -> None:
        """Let the values of a trial depend on its number only, and on the trials before it."""
        seed = int(np.random.SeedSequence([self.space.seed, number]).generate_state(1)[0])
        self.study.sampler = _make("sampler", samplers(), self.space.sampler, seed=seed)

    def _begin(self, trial: optuna.Trial, group: Mapping[str, Any]) -> Taken:
        before = self.study.get_trials(deepcopy=False)[trial.number]
        values, attributes = self.space.suggest(trial), before.user_attrs
        reached = len(before.intermediate_values)
        starts = attributes.get(STARTS, 0) if attributes.get(REACHED) == reached else 0
        trial.set_user_attr(STARTS, starts + 1)
        trial.set_user_attr(REACHED, reached)
        spans = [*attributes.get(GROUP, []), {**group, "begin": time.time(), "end": None}]
        trial.set_user_attr(GROUP, spans)
        self._trials[trial.number] = trial
        population = self.space.population
        return Taken(
            trial.number,
            values,
            resumed=len(spans) > 1,
            parent=attributes.get(PARENT),
            part=1.0 if population is None else population.part(trial.number),
        )

    def _reason(self, trial: optuna.trial.FrozenTrial) -> str:
        """Return why a trial that was interrupted is not continued; empty if it is."""
        reason = lock_of(self.folder, trial.number).read_text(errors="replace")
        if not reason and trial.user_attrs.get(STARTS, 0) >= MOST_STARTS:
            reason = f"its job has ended {MOST_STARTS} times without a further epoch"
        return reason

    def ended(self) -> bool:
        """Return whether the study has reached its goal or its time."""
        stop, directions = self.space.stop, self.space.objective
        if time.monotonic() > self._end:
            return True
        if not stop:
            return False
        from optuna.trial import TrialState

        return any(
            all(
                name not in stop
                or (value >= stop[name] if directions[name] == "maximize" else value <= stop[name])
                for name, value in zip(directions, one.values or (), strict=True)
            )
            for one in self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        )

    def report(self, number: int, value: float, epoch: int) -> bool:
        """Store the value of an epoch, counted from 1; return whether the trial is to be pruned."""
        trial = self._trials[number]
        with self._journal.stored():
            if epoch not in self.study.get_trials(deepcopy=False)[number].intermediate_values:
                trial.report(value, epoch)
            return bool(trial.should_prune())

    def tell(self, number: int, values: Mapping[str, float], facts: Mapping[str, Any]) -> None:
        """Store the results of a trial that is complete."""
        self._end_trial(number, facts, "COMPLETE", [values[name] for name in self.space.objective])

    def prune(self, number: int, facts: Mapping[str, Any]) -> None:
        """Store that a trial was ended early."""
        self._end_trial(number, facts, "PRUNED")

    def fail(self, number: int, reason: str) -> None:
        """Store why a trial has failed."""
        self._end_trial(number, {REASON: reason}, "FAIL")

    def _end_trial(
        self, number: int, facts: Mapping[str, Any], state: str, values: list[float] | None = None
    ) -> None:
        """Store the end of a trial; it is locked until then, or another process would take it."""
        trial = self._trials.pop(number)
        spans = trial.user_attrs[GROUP]
        spans[-1]["end"] = time.time()
        with self._journal.stored():
            self._store(trial, {**facts, GROUP: spans}, state, values)
        self._release(number)

    def _store(
        self, trial: Any, facts: Mapping[str, Any], state: str, values: list[float] | None = None
    ) -> None:
        from optuna.trial import TrialState

        for name, value in facts.items():
            trial.set_user_attr(name, value)
        self.study.tell(trial, values, state=TrialState[state])
