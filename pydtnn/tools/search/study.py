"""The study of a search: a journal in a folder, which groups of any number of jobs share."""

from __future__ import annotations

import copy
import fcntl
import os
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pydtnn.tools.search.asha import NAME as ASHA
from pydtnn.tools.search.asha import Halving
from pydtnn.tools.search.dimension import RANKS, WHO
from pydtnn.tools.search.journal import LOCKED, FileLock, Journal
from pydtnn.tools.search.population import NAME as PBT
from pydtnn.tools.search.population import exploit, explore
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

MOST_STARTS = 5
"""Starts of a trial without a further epoch, after which it is not started again."""

SPACE, STARTS, REACHED, REASON = "space", "starts", "reached", "reason"
GROUP, EPOCHS, POINT, PARENT = "group", "epochs", "point", "parent"
"""Attributes of a study, and of its trials."""

_NUMBER = int | float

SPAN = {"begin": _NUMBER, "end": _NUMBER | None, "ranks": list, "job": int, "host": str}
"""Types of the entries of a span of time in which a group of ranks has trained a trial."""

KINDS = dict.fromkeys((STARTS, REACHED, EPOCHS, POINT, PARENT), int)
"""Types of attributes of a trial."""

UNTIL = "until"
"""Entry of a span: epoch after which the trial is paused; None for a trial that fills a gap."""


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
        PBT: own.RandomSampler,  # asked for the first generation
    }


def pruners() -> dict[str, Any]:
    """Return the classes of pruners by name."""
    from optuna import pruners as own

    return {
        "none": own.NopPruner,
        "median": own.MedianPruner,
        ASHA: own.NopPruner,  # never asked: trials are paused
        "hyperband": own.HyperbandPruner,
    }


DEFAULTS: dict[str, dict[str, Any]] = {
    "tpe": {"constant_liar": True, "multivariate": False},
    "quasi-random": {"warn_asynchronous_seeding": False, "warn_independent_sampling": False},
    "cma-es": {"warn_independent_sampling": False},
}
"""Options of Optuna's classes that differ from its own defaults."""


def _make(what: str, classes: Mapping[str, Any], given: Mapping[str, Any], **more: Any) -> Any:
    options = dict(given)
    name = options.pop("name")
    if name in (PBT, ASHA):
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


def _check(trial: optuna.trial.FrozenTrial, values: int) -> None:
    """Raise an error if attributes or values of a trial are not those of a search."""
    given = trial.user_attrs
    wrong = [name for name, kind in KINDS.items() if not isinstance(given.get(name, 0), kind)]
    for span in given.get(GROUP, []):
        wrong += [n for n, kind in SPAN.items() if not isinstance(span[n], kind) or span[n] == []]
    if wrong or len(trial.values or [0] * values) != values:
        raise TypeError(f"trial {trial.number} has wrong {', '.join(wrong) or 'values'}")


def _continues(trial: optuna.trial.FrozenTrial) -> bool:
    """Return whether a trial is complete, or in progress and does not only fill a gap."""
    if trial.state.name != "RUNNING":
        return trial.state.name == "COMPLETE"
    spans = trial.user_attrs.get(GROUP, [])
    return bool(spans) and not is_paused(trial) and spans[-1][UNTIL] is not None


def is_paused(trial: optuna.trial.FrozenTrial) -> bool:
    """Return whether a trial has neither ended, nor is in progress, nor was interrupted."""
    spans = trial.user_attrs.get(GROUP, [])
    return trial.state.name == "RUNNING" and bool(spans) and spans[-1]["end"] is not None


def _is_awaited(trial: optuna.trial.FrozenTrial) -> bool:
    """Return whether others may be promoted when a trial pauses or ends: it does not fill a gap."""
    spans = trial.user_attrs.get(GROUP, [])
    running = trial.state.name == "RUNNING" and not is_paused(trial)
    return running and bool(spans) and spans[-1].get(UNTIL) is not None


def seen_by_sampler(study: optuna.Study) -> optuna.Study:
    """Return a study in which trials that are paused are pruned."""
    import optuna

    class Seen(optuna.Study):
        def _get_trials(
            self, deepcopy: bool = True, states: Any = None, use_cache: bool = False
        ) -> list[optuna.trial.FrozenTrial]:
            found = []
            for one in super()._get_trials(deepcopy):
                if is_paused(one):
                    one = copy.copy(one)
                    one.state = optuna.trial.TrialState.PRUNED
                if states is None or one.state in states:
                    found.append(one)
            return found

    return Seen(study.study_name, study._storage, study.sampler, study.pruner)


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
        Whether it has been interrupted or paused before.
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
    """There may be a trial when those that are in progress have further results."""


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
        self._sign = -1 if "maximize" in space.objective.values() else 1

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

    def _is_held(self, number: int) -> bool:
        """Return whether a trial is in progress."""
        if not self._claim(number):
            return True
        self._release(number)
        return False

    def _release(self, number: int) -> None:
        if number in self._held:
            os.close(self._held.pop(number))

    def take(self, group: Mapping[str, Any]) -> Taken | None:
        """Return a trial that was interrupted or paused, or a new one; None if none is left.

        Parameters
        ----------
        group : mapping
            Facts about the ranks, which the study stores.

        Raises
        ------
        Later
            If the next trial depends on trials that are in progress.
        """
        size = len(group["ranks"])
        with self._journal.stored(), FileLock(self.folder / LOCKS / CHOICE):
            trial = self._interrupted(size)
            if trial is None and not self.ended():
                promoted = self._paused(one for one, good in self._ranked(size) if good)
                trial = promoted or self._new(size)
            if trial is not None:
                return self._begin(trial, group)
            return self._left(group) if self.space.halving else None

    def _all(self) -> list[optuna.trial.FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def _interrupted(self, size: int) -> optuna.Trial | None:
        """Return a trial whose process has ended; give up those that are not to be continued."""
        import optuna

        for one in self.study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
            if is_paused(one) or not self._suits(one, size) or not self._claim(one.number):
                continue
            now = self._all()[one.number]
            if now.state.is_finished() or is_paused(now):
                self._release(one.number)  # its process has ended it since
                continue
            self._seed(one.number)
            trial = optuna.Trial(self._seen(), one._trial_id)
            if reason := self._reason(one):
                self._store(trial, {REASON: reason}, "FAIL")
                self.given_up.append(one.number)
            elif not self.ended():
                return trial
            self._release(one.number)
        return None

    def _paused(self, ranked: Iterable[optuna.trial.FrozenTrial]) -> optuna.Trial | None:
        """Return the first of these trials, or the next one if its process has yet to leave it."""
        import optuna

        for one in ranked:
            if self._claim(one.number):
                return optuna.Trial(self.study, one._trial_id)
        return None

    def _ranked(
        self, size: int | None = None, own: int | None = None
    ) -> list[tuple[optuna.trial.FrozenTrial, bool]]:
        """Return paused trials as `Halving.ranked` does; of one size, and with one in progress."""
        if self.space.halving is None:
            return []
        trials = self._all()
        costs = {
            one.number: {e: self._sign * v for e, v in one.intermediate_values.items()}
            for one in trials
            if one.state.name != "FAIL"
        }
        chosen = None  # when all trials have begun, all good ones continue
        if len(trials) < self.space.trials:
            chosen = {n for n in costs if n != own and _continues(trials[n])}
        return [
            (trials[number], good)
            for number, good in self.space.halving.ranked(costs, chosen)
            if number == own or is_paused(trials[number])
            if size is None or self._suits(trials[number], size)
        ]

    def _new(self, size: int) -> optuna.Trial | None:
        """Return a new trial; None if there is none for so many ranks."""
        trials = self._all()
        enqueued = [one for one in trials if one.state.name == "WAITING"]  # by tools of Optuna
        number = len(trials) - len(enqueued)
        if number >= self.space.trials:
            return None
        self._seed(number)
        if enqueued:
            trial = self.study.ask()
        elif (given := self._next(trials, size)) is not None:
            trial = self._create(*given)
        else:
            return None
        self._claim(trial.number)
        return trial

    def _left(self, group: Mapping[str, Any]) -> Taken | None:
        """Return a paused trial that is not good enough, if all others have been begun.

        While trials in progress may have results with which others are promoted, the best one
        fills the gap. Then one is continued if none is complete, and the others are pruned.
        """
        from optuna.trial import TrialState

        trials, size = self._all(), len(group["ranks"])
        running = [one for one in trials if one.state.name == "RUNNING" and not is_paused(one)]
        busy = [one for one in running if self._is_held(one.number)]
        awaited = not self.ended() and any(map(_is_awaited, busy))
        if busy and not awaited:
            return None  # the last of these groups ends the search
        none_complete = not any(one.state.name == "COMPLETE" for one in trials)
        if awaited or none_complete:
            trial = self._paused(one for one, _ in self._ranked(size))
            if trial is not None:
                return self._begin(trial, group, gap=awaited)
            if awaited:
                raise Later
        ranked = self._ranked()
        if ranked and (none_complete or (not self.ended() and any(good for _, good in ranked))):
            return None  # another group continues them
        for one, _ in ranked:
            self.study.tell(one.number, state=TrialState.PRUNED)
            self.given_up.append(one.number)
        return None

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
        costs = [None if one.values is None else self._sign * one.values[0] for one in members]
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
        number = study._storage.create_new_trial(study._study_id, template)
        return optuna.Trial(self._seen(), number)

    def _seen(self) -> optuna.Study:
        """Return the study as its sampler sees it."""
        return seen_by_sampler(self.study) if self.space.halving else self.study

    def _seed(self, number: int) -> None:
        """Let the values of a trial depend on its number only, and on the trials before it."""
        seed = int(np.random.SeedSequence([self.space.seed, number]).generate_state(1)[0])
        self.study.sampler = _make("sampler", samplers(), self.space.sampler, seed=seed)

    def _begin(self, trial: optuna.Trial, group: Mapping[str, Any], *, gap: bool = False) -> Taken:
        before, halving = self._all()[trial.number], self.space.halving
        values, attributes = self.space.suggest(trial), before.user_attrs
        reached = len(before.intermediate_values)
        starts = attributes.get(STARTS, 0) if attributes.get(REACHED) == reached else 0
        trial.set_user_attr(STARTS, starts + 1)
        trial.set_user_attr(REACHED, reached)
        spans = [*attributes.get(GROUP, []), {**group, "begin": time.time(), "end": None}]
        if halving:
            interrupted = len(spans) > 1 and not is_paused(before)
            until = spans[-2].get(UNTIL) if interrupted else None
            until = until or halving.after(max(before.intermediate_values, default=0))
            spans[-1][UNTIL] = None if gap else until
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
        file = lock_of(self.folder, trial.number)
        reason = read_file(WHO, file, MAX_TEXT_B, folder=file.parent).decode(errors="replace")
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
        """Store the value of an epoch, counted from 1; return whether the trial ends or pauses."""
        trial = self._trials[number]
        with self._journal.stored():
            if epoch not in self._all()[number].intermediate_values:
                trial.report(value, epoch)
            if self.space.halving is None:
                return bool(trial.should_prune())
            return self._pauses(trial, epoch, self.space.halving)

    def _pauses(self, trial: optuna.Trial, epoch: int, halving: Halving) -> bool:
        spans = trial.user_attrs[GROUP]
        until, size = spans[-1][UNTIL], len(spans[-1]["ranks"])
        if until is not None and epoch < until:
            return False
        good = [one.number for one, good in self._ranked(size, trial.number) if good]
        if until is None:  # it fills a gap, as long as there is one
            others = [one for one in self._all() if one.number != trial.number]
            return (
                self.ended()
                or any(n != trial.number for n in good)
                or not any(map(_is_awaited, others))
            )
        if self.ended() or good[:1] != [trial.number]:
            return True
        spans[-1][UNTIL] = halving.after(epoch)  # it would be the next one
        trial.set_user_attr(GROUP, spans)
        return False

    def tell(self, number: int, values: Mapping[str, float], facts: Mapping[str, Any]) -> None:
        """Store the results of a trial that is complete."""
        self._end_trial(number, facts, "COMPLETE", [values[name] for name in self.space.objective])

    def prune(self, number: int, facts: Mapping[str, Any]) -> None:
        """Store that a trial was ended early, or is paused."""
        self._end_trial(number, facts, None if self.space.halving else "PRUNED")

    def fail(self, number: int, reason: str) -> None:
        """Store why a trial has failed."""
        self._end_trial(number, {REASON: reason}, "FAIL")

    def _end_trial(
        self,
        number: int,
        facts: Mapping[str, Any],
        state: str | None,
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
        state: str | None,
        values: list[float] | None = None,
    ) -> None:
        """Store facts and the state of a trial; None if it is paused."""
        from optuna.trial import TrialState

        for name, value in facts.items():
            trial.set_user_attr(name, value)
        if state is not None:
            self.study.tell(trial, values, state=TrialState[state])
