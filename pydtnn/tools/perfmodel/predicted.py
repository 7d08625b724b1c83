"""The performance model for a run: the choice of ``--parallel auto``, and its prediction."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pydtnn.cli.config import TrainConfig, typed
from pydtnn.cli.parallel import axes_over
from pydtnn.cli.step_meter import AWAY, BUSY, MAX_SPREAD, StepMeter
from pydtnn.cli.workload import create_data, describe_data, describe_run
from pydtnn.comm import Communicator
from pydtnn.comm.agree import on_rank_0
from pydtnn.model.recompute_choice import AUTO
from pydtnn.training.workload import Workload
from pydtnn.utils import plain_yaml
from pydtnn.utils.errors import AgreedError
from pydtnn.utils.units import parse_quantity

if TYPE_CHECKING:  # the performance model is imported by runs that it predicts
    from pydtnn.tools.perfmodel.platform import Platform
    from pydtnn.tools.perfmodel.prediction import Prediction
    from pydtnn.tools.perfmodel.search import SearchResult

MIN_GAIN = 1.05
"""Time of the best uniform plan over that of one that cuts layers differently, to use the latter:
the error of the model."""

MAX_RATIO, MAX_CANDIDATES, CANDIDATE_STEPS = 1.6, 5, 6
"""Strategies whose time by formulas is up to this multiple of the shortest one, and so many of
them, are measured in so many steps."""


MIN_STEPS = 100
"""Steps of a run from which on it is measured beforehand, which takes as long as some tens of
them."""

WARM_STEPS = 10
"""Steps of a shorter run, after its first one, that predict the others."""


PARTS = {"compute": "compute", "communication": "communication", "data": "waiting for data"}
"""Parts of a step that are compared, and their names."""


@dataclass(frozen=True)
class Predicted:
    """Prediction of a run.

    Attributes
    ----------
    platform : str
        Name of the platform; empty without a prediction.
    seconds : float
        Of a step, which is the sum of the following parts.
    compute : float
        Forward and backward, loss, and Python between them.
    update : float
    communication : float
        Exposed: not overlapped with computation; waits of a pipeline included.
    data : float
        Waiting for the loader.
    memory : float
        Of a rank, in B.
    low, high : float
        First and last decile of `seconds`.
    reason : str
        Why there is no prediction; empty if there is one.
    warm : int
        Steps of the run after its first one that predict the others; 0 if it is predicted before.
    """

    platform: str = ""
    seconds: float = 0.0
    compute: float = 0.0
    update: float = 0.0
    communication: float = 0.0
    data: float = 0.0
    memory: float = 0.0
    low: float = 0.0
    high: float = 0.0
    reason: str = ""
    warm: int = 0

    @classmethod
    def of(cls, one: Prediction) -> Predicted:
        """Return the parts of a prediction."""
        step = one.step
        return cls(
            one.platform.name,
            one.seconds,
            compute=step.compute - step.update,
            update=step.update,
            communication=step.exposed + step.idle,
            data=one.loader,
            memory=one.memory.total,
            low=one.seconds * one.deciles[0],
            high=one.seconds * one.deciles[1],
        )

    def by_steps(self, warm: Mapping[str, float], others: Mapping[str, float]) -> Predicted:
        """Return the prediction of a short run, as soon as it has steps.

        Parameters
        ----------
        warm, others : mapping of str to float
            `StepMeter.times` of the `warm` steps, and of those after them; empty without any.
        """
        if not warm:
            return self
        spread, away = (max(warm[name], others[name]) for name in ("spread", "away"))
        if max(spread, away) > MAX_SPREAD:
            reason = AWAY.format(away) if away > MAX_SPREAD else BUSY.format(spread)
            return replace(self, reason=reason)
        names = ("seconds", "compute", "communication", "data", "low", "high")
        values: dict[str, Any] = {name: warm[name] for name in names}
        platform = f"this job, from {self.warm} of its first steps"
        return replace(self, platform=platform, reason="", **values)

    def rows(self, measured: Mapping[str, float]) -> list[tuple[str, str]]:
        """Return the lines of the report: measured and predicted parts of a step.

        Parameters
        ----------
        measured : mapping of str to float
            `StepMeter.times`, over all ranks.
        """
        if not measured:
            return []
        times = {name: f"{1e3 * value:.4g}" for name, value in measured.items()}
        text = f"measured {times['seconds']} ms"
        if self.reason:
            return [("time per step", f"{text}; not predicted: {self.reason}")]
        whole = asdict(self)
        whole["compute"] += self.update
        error = abs(self.seconds / measured["seconds"] - 1)
        off = max(PARTS, key=lambda name: abs(whole[name] - measured[name]))
        interval = f" ({1e3 * self.low:.4g} to {1e3 * self.high:.4g})"
        update = f", {1e3 * self.update:.4g} ms of it for the update" if self.update else ""
        memory = f", predicted {self.memory / 1e6:.0f} MB" if self.memory else ""

        def part(name: str) -> str:
            return f"measured {times[name]} ms, predicted {1e3 * whole[name]:.4g} ms"

        return [
            (
                "time per step",
                f"{text} ({times['low']} to {times['high']}), predicted {1e3 * self.seconds:.4g} "
                f"ms{interval if self.high > self.low else ''}",
            ),
            (
                "  prediction",
                f"for {self.platform}, accuracy {max(1 - error, 0):.0%}, largest difference in "
                f"{PARTS[off]}",
            ),
            ("  in compute", part("compute") + update),
            ("  in communication", part("communication")),
            ("  waiting for data", part("data")),
            (
                "  first step",
                f"measured {times['first']} ms, with the choice of algorithms; not in the times "
                "above",
            ),
            (
                "  memory of a rank",
                f"measured {measured['memory'] / 1e6:.0f} MB{memory}, in addition to interpreter "
                "and data",
            ),
        ]


def no_formula(config: TrainConfig, work: Workload, platform: Platform | None = None) -> str:
    """Return which option of a run the closed formulas do not describe; empty if there is none.

    Other options change the prediction, or have no effect on the time and memory of a step.
    """
    from pydtnn.tools.perfmodel.projection import without_formula

    without = {
        "--teacher": config.teacher,
        "--virtual-ranks": config.virtual_ranks,
        "--parallel exact": config.exact_mesh,
    }
    if found := [option for option, given in without.items() if given]:
        return found[0]
    name = without_formula(work, platform)
    if name == "threads" and platform is not None:
        return f"--threads {work.threads} where --platform has {platform.compute.threads}"
    return typed(config, name) if name else ""


def find_platform(
    config: TrainConfig, comm: Communicator, threads: int, work: Workload, *, rates: bool
) -> Platform | None:
    """Return the platform of a run, with the rates of layers if needed. Collective.

    That of `--platform`, otherwise the one of this job: measured, or from the user's cache; None
    for devices that are not measured.
    """
    from pydtnn.tools.perfmodel.job import platform_of
    from pydtnn.tools.perfmodel.platform import Platform

    if config.platform is not None:
        return Platform.load(config.platform)
    if work.device != "cpu":
        return None
    return platform_of(comm, work.create_backend(threads=threads), work, rates=rates)


def choose_parallel(
    config: TrainConfig, comm: Communicator, threads: int
) -> tuple[TrainConfig, list[str]]:
    """Return the configuration with the chosen strategy, and lines that explain the choice.

    `--parallel auto` chooses among all strategies, `schedule=auto` among the schedules
    of pipelines. Collective: all ranks call it. The choice is made on rank 0.

    Raises
    ------
    AgreedError
        On all ranks, if the model has no formula for the options, or nothing fits into memory.
    """

    def describe() -> dict[str, Any]:
        return describe_data(config, create_data(config)[0], comm.launched)

    auto = config.parallel == AUTO
    choice = "--parallel auto" if auto else "--parallel schedule=auto"
    instead = "the axes, such as --parallel data=2" if auto else "a schedule"
    axes = axes_over(config.parallel, comm)
    work = describe_run(config, axes, comm.gather_object(on_rank_0(comm, describe))[0])
    if option := no_formula(config, work):
        raise ValueError(f"train: {choice} has no formula for {option}; name {instead}")
    platform = find_platform(config, comm, threads, work, rates=True)
    if platform is None:
        raise ValueError(
            f"train: {choice} measures CPUs only, got --device {work.device}; name {instead}, or a "
            "--platform"
        )
    limit = platform.cluster.memory_per_rank
    if config.memory_limit is not None:
        limit = min(limit, parse_quantity("train: --memory-limit", config.memory_limit, "B"))
    # the choice is one for ranks like those of the platform
    found = on_rank_0(
        comm, _search, config, comm.size, platform, replace(work, threads=None), limit
    )
    if config.platform is None:
        found = _measured(comm, found, platform, threads, limit)
    chosen, lines = comm.gather_object(on_rank_0(comm, _explain, config, found, limit))[0]
    return replace(config, **chosen), lines


def _search(
    config: TrainConfig, ranks: int, platform: Platform, work: Workload, limit: float
) -> SearchResult:
    """Return the strategies of a job by formulas, the fastest first."""
    from pydtnn.tools.perfmodel.compute.analytic import AnalyticCosts
    from pydtnn.tools.perfmodel.projection import Projector
    from pydtnn.tools.perfmodel.search import SCHEDULES, search

    projector = Projector(work, platform, AnalyticCosts.of(work, platform))
    recompute = (None, AUTO) if config.recompute is None else (work.recompute,)
    schedules = SCHEDULES if config.pipeline_schedule == AUTO else SCHEDULES[:1]
    works = None if config.parallel == AUTO else [work]
    return search(
        projector, ranks, works, memory_limit=limit, recompute=recompute, schedules=schedules
    )


def _measured(
    comm: Communicator,
    found: SearchResult | None,
    platform: Platform,
    threads: int,
    limit: float,
) -> SearchResult | None:
    """Predict the fastest strategies again, with the compute of all ranks. Collective.

    The formulas take the rates of the whole network's layers for all parts of them.
    """
    from pydtnn.tools.perfmodel.job import measurable, predict_job

    works: list[Workload] = []
    if found is not None:
        slowest = MAX_RATIO * found.best.seconds
        near = [one for one in found.tried if one.memory.total <= limit and one.seconds <= slowest]
        works = [one.work for one in near[:MAX_CANDIDATES]] if len(near) > 1 else []
    ones = []
    for work in comm.gather_object(works)[0]:
        if measurable(comm, work):
            work = replace(work, threads=threads).in_micro_batches()
            with contextlib.suppress(ValueError, AgreedError):  # then that of the formulas counts
                ones.append(predict_job(comm, work, platform, CANDIDATE_STEPS))
    again = [one for one in ones if one is not None and one.memory.total <= limit]
    return None if found is None else found.with_predictions(again)


def _explain(
    config: TrainConfig, found: SearchResult, limit: float
) -> tuple[dict[str, Any], list[str]]:
    """Return the options of the fastest strategy, and why it was chosen."""
    from pydtnn.tools.perfmodel.choice import explain

    found = found.prefer_uniform(MIN_GAIN)
    what = "parallel" if config.parallel == AUTO else "pipeline schedule"
    line, *details = explain(found, limit)
    best = found.best.work
    chosen: dict[str, Any] = {
        "pipeline_schedule": best.pipeline_schedule,
        "scheme": best.scheme,
        "global_batch_size": best.batch,
    }
    if config.parallel == AUTO:
        chosen["parallel"] = best.parallel if best.cut else None
        chosen["plan"] = None if best.plan is None else plain_yaml.dump(best.plan)
    if best.stages > 1 and config.micro_batches is None:
        chosen["micro_batches"] = best.in_micro_batches().micro_batches
    if config.recompute is None and best.recompute is not None:
        chosen["recompute"] = AUTO
        chosen["memory_limit"] = config.memory_limit or f"{int(limit)}B"
    elif config.recompute != AUTO:
        chosen["memory_limit"] = None  # a limit of recomputation
    return chosen, [f"{what}: {line}", *(f"  {one}" for one in details)]


def predict_run(
    config: TrainConfig,
    work: Workload,
    comm: Communicator,
    threads: int,
    steps: int,
    meter: StepMeter | None,
) -> Predicted | None:
    """Predict a run of so many steps on rank 0. Collective: all ranks call it.

    Runs that report nothing, and virtual ones, are not predicted; neither are those that measure
    nothing, unless `--platform` names the platform. Short ones are by their first steps. What
    cannot be predicted is not an error: the result has the reason.
    """
    if config.quiet or config.evaluate_only or config.virtual_ranks is not None:
        return None
    if config.platform is None and config.tuning not in (None, "measure"):
        return Predicted(reason=f"--tuning {config.tuning} measures nothing; name a --platform")
    if config.platform is None and steps < MIN_STEPS and work.device == "cpu":
        least = f"runs of less than {2 + WARM_STEPS} steps are not; name a --platform"
        return Predicted(reason=least, warm=WARM_STEPS)
    if meter is not None:
        meter.without_growth(partial(import_module, "pydtnn.tools.perfmodel.job"))
    if option := no_formula(config, work):
        return Predicted(reason=f"the model of a step has no formula for {option}")
    from pydtnn.tools.perfmodel.job import measurable, predict_job

    measured = config.platform is None and measurable(comm, work)
    platform = find_platform(config, comm, threads, work, rates=not measured)
    if platform is None:
        return Predicted(reason=f"devices {work.device!r} are not measured")
    if measured:
        try:
            one = predict_job(comm, replace(work, threads=threads), platform)
        except (AgreedError, ValueError) as error:  # a prediction must never end training
            return Predicted(reason=str(error))
        return None if one is None else Predicted.of(one)
    return predict(config, work, platform) if comm.rank == 0 else None


def predict(config: TrainConfig, work: Workload, platform: Platform) -> Predicted:
    """Predict a run on a platform by formulas; the result has the reason if that fails."""
    from pydtnn.tools.perfmodel.compute.analytic import AnalyticCosts
    from pydtnn.tools.perfmodel.projection import Projector

    if option := no_formula(config, work, platform):
        return Predicted(reason=f"the model of a step has no formula for {option}")
    try:
        projector = Projector(work, platform, AnalyticCosts.of(work, platform))
        return Predicted.of(projector.project(work))
    except Exception as error:  # a prediction must never end training
        return Predicted(reason=f"{type(error).__name__}: {error}")
