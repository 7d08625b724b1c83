"""The objective of searches over options of `pydtnn.train`: a run of training for each trial."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO, cast

from pydtnn.cli.build import create_optimizer, create_parts
from pydtnn.cli.config import TrainConfig, flags
from pydtnn.cli.parser import Arguments
from pydtnn.cli.parts import find
from pydtnn.cli.run import run
from pydtnn.cli.workload import create_data, describe_data, describe_run
from pydtnn.comm import Communicator
from pydtnn.comm.agree import on_rank_0, together
from pydtnn.comm.serial import Serial
from pydtnn.data import Dataset
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.predicted import predict
from pydtnn.tools.runs.run import read_run
from pydtnn.tools.search.dimension import WHO, named
from pydtnn.tools.search.space import Space, argument
from pydtnn.tools.search.study import GROUP
from pydtnn.tools.search.worker import Trial
from pydtnn.training.callback import Callback, Training
from pydtnn.utils import plain_yaml
from pydtnn.utils.machine import free_memory
from pydtnn.utils.names import unknown
from pydtnn.utils.terminal import Lasting
from pydtnn.utils.units import memory

SET_BY_SEARCH = (
    "output_dir",
    "resume",
    "evaluate_only",
    "progress",
    "verbose",
    "quiet",
    "save",
    "trace",
)
"""Options that a search sets itself, or that trials cannot have."""

OF_DATA = (
    *("dataset", "dataset_options", "data_dir", "image_size", "skip_bad", "exif_rotation"),
    "validation_split",
)
"""Options with which the data sets of trials are equal."""

PLATFORM = "laptop"
"""A platform for predictions of memory, which is the same on all."""

OUTPUT = "output.txt"
"""File of a trial with what its run prints."""


def configure(arguments: Sequence[str]) -> TrainConfig:
    """Return the configuration of arguments of `pydtnn.train`."""
    return Arguments(arguments).configure()


def command_of(trial: Any) -> str:
    """Return the command that trains a trial of a study again."""
    ranks = len(trial.user_attrs[GROUP][-1]["ranks"])
    launcher = f"mpirun -np {ranks} " if ranks > 1 else ""
    return f"{launcher}python -m pydtnn.train {shlex.join(trial.user_attrs['arguments'])}"


def configuration(space: Space, trial: Any) -> str:
    """Return the options of a trial as YAML, for `--config`; of a function its values."""
    if space.function:
        values = named(space.dimensions, trial.params)
    else:
        given = Arguments(trial.user_attrs["arguments"])
        values = {n: v for n, v in asdict(given.configure()).items() if n in given.given}
    return "".join(f"{name}: {plain_yaml.dump(value)}\n" for name, value in values.items())


class Reporter(Callback):
    """Reports the value of each epoch to the study, and ends training if the trial is pruned.

    Parameters
    ----------
    trial : Trial
    name : str
        The value.
    """

    reads_gradients = False

    def __init__(self, trial: Trial, name: str) -> None:
        self.trial, self.name = trial, name

    def on_fit_start(self, trainer: Training, epochs: int, steps: int) -> None:
        """Report epochs that the study does not know, if the trial was interrupted before."""
        self._epochs = epochs
        for epoch, logs in enumerate(trainer.history, 1):
            self._report(trainer, logs, epoch)

    def on_epoch_end(self, trainer: Training) -> None:
        """Report the value."""
        self._report(trainer, trainer.logs, trainer.epoch)

    def _report(self, trainer: Training, logs: Mapping[str, float], epoch: int) -> None:
        if self.trial.report(logs[self.name], epoch, last=epoch == self._epochs):
            trainer.stop = True


def check_memory(config: TrainConfig, train: Dataset, comm: Communicator, free: float) -> None:
    """Raise MemoryError if training needs more memory than a rank may use, as predicted.

    Runs for which the performance model has no formula are not checked.

    Parameters
    ----------
    config : TrainConfig
    train : Dataset
    comm : Communicator
        The ranks that train.
    free : float
        In B.
    """
    work = describe_run(config, {"data": comm.size}, describe_data(config, train, comm.size))
    one = predict(config, replace(work, threads=None), Platform.load(PLATFORM))
    if not one.reason and one.memory > free:
        raise MemoryError(
            f"{WHO}: the trial needs {memory(one.memory)} on each rank, and each may use "
            f"{memory(free)} of its host; start fewer ranks on a host, or set --recompute auto"
        )


class TrainingObjective:
    """Trains a network with the options of a trial.

    Parameters
    ----------
    space : Space
    threads : int
        Threads of each rank, unless the options have their own number.

    Attributes
    ----------
    free : float
        Memory that each rank may use, in B.
    """

    def __init__(self, space: Space, threads: int) -> None:
        self.space, self.threads = space, threads
        self.free = math.inf
        self._data: tuple[str, tuple[Dataset, Dataset]] | None = None

    def arguments(self, values: Mapping[str, Any]) -> list[str]:
        """Return the options of a trial as arguments of `pydtnn.train`."""
        options = {**self.space.fixed, **values}
        return [argument(name, value) for name, value in options.items()]

    def check(self, comm: Communicator) -> None:
        """Check the options, load the data sets of the first trial, and check the objective.

        Every choice and both ends of every range are checked. Collective: all ranks call it.

        Raises
        ------
        ValueError, TypeError, OSError
            If an option is unknown or refused, or if runs have no value of the objective.
        """
        configs = together(comm, self._check_options)
        config = configs[0]
        together(comm, self.data, config)
        self.free = float(min(comm.gather_object(free_memory() / comm.local_size)))
        on_rank_0(comm, self._check_parts, configs)

    def _check_options(self) -> list[TrainConfig]:
        """Return the configurations of the trials to check."""
        configs = [configure(self.arguments(values)) for values in self.space.checks()]
        for config in configs:
            find(config, "dataset")
            find(config, "allreduce")
        for name in SET_BY_SEARCH:
            if any(getattr(one, name) != flags(TrainConfig)[name].default for one in configs):
                raise ValueError(f"{WHO}: trials cannot have the option {name}; remove it")
        return configs

    def _check_parts(self, configs: Sequence[TrainConfig]) -> None:
        """Create what the options name, of trials with other data sets only the data set's name."""
        for values, config in zip(self.space.checks(), configs, strict=True):
            trial = ", ".join(f"{name} {value}" for name, value in values.items())
            try:
                self._check_one(config)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{WHO}: a trial with {trial} is impossible: {error}") from error

    def _check_one(self, config: TrainConfig) -> None:
        if self._data is None or self._key(config) != self._data[0]:
            return
        parts = create_parts(config, self._data[1][0], {"data": 1}, Serial(), 1)
        parts.work.create_net()
        create_optimizer(config, parts.work.batch, parts.steps)
        names = ["loss", *(metric.name for metric in parts.metrics)]
        known = [*(f"val_{name}" for name in names), *names]
        for name in self.space.objective:
            if name not in known:
                raise ValueError(unknown("objective", name, known))

    def _key(self, config: TrainConfig) -> str:
        """Return what is equal if data sets are."""
        return repr([getattr(config, name) for name in (*OF_DATA, "seed")])

    def data(self, config: TrainConfig) -> tuple[Dataset, Dataset]:
        """Return the data sets, which are those of the trial before if its options are the same."""
        key = self._key(config)
        if self._data is None or self._data[0] != key:
            self._data = None  # two at a time would need more memory
            self._data = key, create_data(config)
        return self._data[1]

    def __call__(self, trial: Trial) -> dict[str, float]:
        """Train a trial, or continue it; return the values of its last epoch."""
        comm, arguments = trial.comm, self.arguments(trial.values)
        trial.facts["arguments"] = arguments
        own = [f"--output-dir={trial.folder}", "--quiet"]
        if trial.resumed:
            own.append("--resume")
        if not any(argument.startswith("--threads") for argument in arguments):
            own.append(f"--threads={self.threads}")
        config = together(comm, configure, [*arguments, *own])
        data = together(comm, self.data, config)
        on_rank_0(comm, check_memory, config, data[0], comm, self.free)
        names = [*self.space.objective]
        reporters = [Reporter(trial, names[0])] if len(names) == 1 else []
        on_rank_0(comm, lambda: trial.folder.mkdir(exist_ok=trial.resumed))
        with _output_to(trial.folder / OUTPUT, comm):
            run(config, comm, reporters, data)
        values = comm.gather_object(on_rank_0(comm, self._read, trial))[0]
        return {name: values[name] for name in names}

    def _read(self, trial: Trial) -> dict[str, Any]:
        last = read_run(WHO, trial.folder).history[-1]
        return {name: float("nan") if value is None else value for name, value in last.items()}


@contextlib.contextmanager
def _output_to(file: Path, comm: Communicator) -> Iterator[None]:
    """Context in which what the first rank prints is appended to a file."""
    if comm.rank > 0:
        yield
        return
    stream = cast(TextIO, Lasting(open(file, "a", buffering=1)))  # noqa: SIM115
    with contextlib.closing(stream), contextlib.redirect_stdout(stream):
        yield
