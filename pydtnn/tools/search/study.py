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

from pydtnn.tools.search.dimension import WHO
from pydtnn.tools.search.journal import LOCKED, FileLock, Journal
from pydtnn.tools.search.space import Space
from pydtnn.utils.files import MAX_TEXT_B, path_inside, read_file
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

MAX_STARTS = 5
"""Starts of a trial without a further epoch, after which it is not started again."""

SPACE, STARTS, REACHED, REASON = "space", "starts", "reached", "reason"
GROUP, POINT = "group", "point"
"""Attributes of a study, and of its trials."""

_NUMBER = int | float

SPAN = {"begin": _NUMBER, "end": _NUMBER | None, "ranks": list, "job": int, "host": str}
"""Types of the entries of a span of time in which a group of ranks has trained a trial."""

KINDS = dict.fromkeys((STARTS, REACHED, POINT), int)
"""Types of attributes of a trial."""


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
    "quasi-random": {"warn_asynchronous_seeding": False, "warn_independent_sampling": False},
    "cma-es": {"warn_independent_sampling": False},
    "asha": {"min_resource": 3, "reduction_factor": 3},
}
"""Options of Optuna's classes that differ from its own defaults."""


def _make(what: str, classes: Mapping[str, Any], given: Mapping[str, Any], **more: Any) -> Any:
    options = dict(given)
    name = options.pop("name")
    if name not in classes:
        raise ValueError(f"{WHO}: {unknown(what, name, classes)}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna's interfaces may change
            return classes[name](**{**DEFAULTS.get(name, {}), **options, **more})
    except (TypeError, ValueError) as error:
        text = str(error).rpartition("__init__() ")[2]
        raise ValueError(f"{WHO}: {what} {name}: {text}; see the class of Optuna") from error


def _check(trial: optuna.trial.FrozenTrial, values: int) -> None:
    """Raise an error if attributes or values of a trial are not those of a search."""
    given = trial.user_attrs
    wrong = [name for name, kind in KINDS.items() if not isinstance(given.get(name, 0), kind)]
    for span in given.get(GROUP, []):
        wrong += [n for n, kind in SPAN.items() if not isinstance(span[n], kind) or span[n] == []]
    if wrong or len(trial.values or [0] * values) != values:
        raise TypeError(f"trial {trial.number} has wrong {', '.join(wrong) or 'values'}")


def lock_of(folder: Path, number: int) -> Path:
    """Return the file that a trial locks; it contains the error that ends its job, if any."""
    return folder / LOCKS / f"{number:05d}"


@dataclass(frozen=True)
class TakenTrial:
    """A trial that a group of ranks trains.

    Attributes
    ----------
    number : int
        Counted from 0.
    values : dict
        Values of the dimensions by name.
    resumed : bool
        Whether it has been interrupted before.
    """

    number: int
    values: dict[str, Any]
    resumed: bool = False


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
        Trials that `take` has ended, and not continued.

    Raises
    ------
    ValueError
        If the folder contains a study of another space, or its journal is damaged.
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
        path_inside(WHO, folder, LOCKS).mkdir(parents=True, exist_ok=True)
        self._journal = Journal(folder / JOURNAL, FileLock(folder / LOCKS / JOURNAL))
        try:
            storage = optuna.storages.JournalStorage(cast("Any", self._journal))
            for study in storage.get_all_studies():
                for one in storage.get_all_trials(study._study_id, deepcopy=False):
                    _check(one, len(space.objective))
        except Exception as error:  # of any type: Optuna does not check lines
            raise ValueError(
                f"{WHO}: {folder / JOURNAL} is damaged ({type(error).__name__}: {error!s:.200}); "
                "restore it, or choose another folder with --study"
            ) from error
        with FileLock(self.folder / LOCKS / CHOICE):
            try:  # without an entry in the journal, as the space may be refused
                self.study = optuna.load_study(storage=storage, study_name=WHO, pruner=pruner)
            except KeyError:
                self.study = optuna.create_study(
                    storage=storage,
                    study_name=WHO,
                    directions=[StudyDirection[one.upper()] for one in space.objective.values()],
                    pruner=pruner,
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
        file = os.open(lock_of(self.folder, number), LOCKED, 0o666)
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

    def take(self, group: Mapping[str, Any]) -> TakenTrial | None:
        """Return a trial that was interrupted, or a new one; None if none is left.

        Parameters
        ----------
        group : mapping
            Facts about the ranks, which the study stores.
        """
        with self._journal.stored(), FileLock(self.folder / LOCKS / CHOICE):
            trial = self._interrupted()
            if trial is None and not self.ended():
                trial = self._new()
            return None if trial is None else self._begin(trial, group)

    def _all(self) -> list[optuna.trial.FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def _interrupted(self) -> optuna.Trial | None:
        """Return a trial whose process has ended; give up those that are not to be continued."""
        import optuna

        for one in self.study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
            if not self._claim(one.number):
                continue
            now = self._all()[one.number]
            if now.state.is_finished():
                self._release(one.number)  # its process has ended it since
                continue
            self._seed(one.number)
            trial = optuna.Trial(self.study, one._trial_id)
            if reason := self._reason(one):
                self._store(trial, {REASON: reason}, "FAIL")
                self.given_up.append(one.number)
            elif not self.ended():
                return trial
            self._release(one.number)
        return None

    def _new(self) -> optuna.Trial | None:
        """Return a new trial; None if none is left."""
        trials = self._all()
        enqueued = [one for one in trials if one.state.name == "WAITING"]  # by tools of Optuna
        number = len(trials) - len(enqueued)
        if number >= self.space.trials:
            return None
        self._seed(number)
        if enqueued:
            trial = self.study.ask()
        elif (given := self._next(trials)) is not None:
            trial = self._create(*given)
        else:
            return None
        self._claim(trial.number)
        return trial

    def _next(
        self, trials: Sequence[optuna.trial.FrozenTrial]
    ) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return values of a new trial that the sampler does not choose, and its attributes.

        None if all of a grid have been begun.
        """
        if self.space.sampler["name"] != "grid":
            return {}, {}
        tried = {one.user_attrs.get(POINT, one.number) for one in trials}
        for point, values in enumerate(self.space.grid()):
            if point not in tried:
                return self.space.stored(values), {POINT: point}
        return None

    def _create(self, values: Mapping[str, Any], attributes: Mapping[str, Any]) -> optuna.Trial:
        """Begin a trial with some values at once: if this process is killed, none has a part."""
        import optuna

        study = self.study
        template = optuna.trial.create_trial(
            state=optuna.trial.TrialState.RUNNING,
            system_attrs={FIXED: dict(values)},
            user_attrs=dict(attributes),
        )
        number = study._storage.create_new_trial(study._study_id, template)
        return optuna.Trial(self.study, number)

    def _seed(self, number: int) -> None:
        """Let the values of a trial depend on its number only, and on the trials before it."""
        seed = int(np.random.SeedSequence([self.space.seed, number]).generate_state(1)[0])
        self.study.sampler = _make("sampler", samplers(), self.space.sampler, seed=seed)

    def _begin(self, trial: optuna.Trial, group: Mapping[str, Any]) -> TakenTrial:
        before = self._all()[trial.number]
        values, attributes = self.space.suggest(trial), before.user_attrs
        reached = len(before.intermediate_values)
        starts = attributes.get(STARTS, 0) if attributes.get(REACHED) == reached else 0
        trial.set_user_attr(STARTS, starts + 1)
        trial.set_user_attr(REACHED, reached)
        spans = [*attributes.get(GROUP, []), {**group, "begin": time.time(), "end": None}]
        trial.set_user_attr(GROUP, spans)
        self._trials[trial.number] = trial
        return TakenTrial(trial.number, values, resumed=len(spans) > 1)

    def _reason(self, trial: optuna.trial.FrozenTrial) -> str:
        """Return why a trial that was interrupted is not continued; empty if it is."""
        file = lock_of(self.folder, trial.number)
        reason = read_file(WHO, file, MAX_TEXT_B, folder=file.parent).decode(errors="replace")
        if not reason and trial.user_attrs.get(STARTS, 0) >= MAX_STARTS:
            reason = f"its job has ended {MAX_STARTS} times without a further epoch"
        return reason

    def ended(self) -> bool:
        """Return whether the study has reached its goal or its time."""
        stop, directions = self.space.stop, self.space.objective
        if time.monotonic() > self._end:
            return True
        if not stop:
            return False
        return any(
            all(
                name not in stop
                or (value >= stop[name] if directions[name] == "maximize" else value <= stop[name])
                for name, value in zip(directions, one.values or (), strict=True)
            )
            for one in self._all()
            if one.state.name == "COMPLETE"
        )

    def report(self, number: int, value: float, epoch: int) -> bool:
        """Store the value of an epoch, counted from 1; return whether the trial ends early."""
        trial = self._trials[number]
        with self._journal.stored():
            if epoch not in self._all()[number].intermediate_values:
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
        self,
        number: int,
        facts: Mapping[str, Any],
        state: str,
        values: list[float] | None = None,
    ) -> None:
        """Store the end of a trial; it is locked until then, or another process would take it."""
        trial = self._trials.pop(number)
        spans = trial.user_attrs[GROUP]
        spans[-1]["end"] = time.time()
        with self._journal.stored():
            self._store(trial, {**facts, GROUP: spans}, state, values)
        self._release(number)

    def _store(
        self,
        trial: Any,
        facts: Mapping[str, Any],
        state: str,
        values: list[float] | None = None,
    ) -> None:
        """Store facts and the state of a trial."""
        from optuna.trial import TrialState

        for name, value in facts.items():
            trial.set_user_attr(name, value)
        self.study.tell(trial, values, state=TrialState[state])
