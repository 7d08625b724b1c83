"""The performance model for a run: the choice of ``--parallel auto``, and its prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Any

from pydtnn.cli.config import TrainConfig, typed
from pydtnn.cli.workload import create_data, describe_data, describe_run
from pydtnn.comm import Communicator
from pydtnn.comm.agree import on_rank_0
from pydtnn.layers.collectives import PIPELINE
from pydtnn.model.recompute_choice import AUTO
from pydtnn.perfmodel.workload import Workload
from pydtnn.training.callback import Callback, Training
from pydtnn.training.checks import DEFAULT_PER_STAGE
from pydtnn.utils import plain_yaml
from pydtnn.utils.machine import recent_peak_memory, resident_memory, restart_peak
from pydtnn.utils.units import parse_size

if TYPE_CHECKING:  # the performance model is imported by runs that it predicts
    from pydtnn.perfmodel.platform import Platform
    from pydtnn.perfmodel.prediction import Prediction

MIN_GAIN = 1.05
"""Time of the best uniform plan over that of one that cuts layers differently, to use the latter:
the error of the model."""


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
    reason : str
        Why there is no prediction; empty if there is one.
    """

    platform: str = ""
    seconds: float = 0.0
    compute: float = 0.0
    update: float = 0.0
    communication: float = 0.0
    data: float = 0.0
    memory: float = 0.0
    reason: str = ""

    @classmethod
    def of(cls, one: Prediction, platform: Platform) -> Predicted:
        """Return the parts of a projection."""
        step = one.step
        return cls(
            platform.name,
            one.seconds,
            compute=step.compute - step.update,
            update=step.update,
            communication=step.exposed + step.idle,
            data=one.loader,
            memory=one.memory.total,
        )


class StepMemory(Callback):
    """Growth of this process in the steps of its first epoch, before evaluations and checkpoints.

    The first step of several does not count: algorithms are chosen, and times are measured, before
    it and within it.

    Attributes
    ----------
    grown : int
        In B, compared with the time when this object was made.
    """

    def __init__(self) -> None:
        self.grown = 0
        self._before, self._steps, self._first = resident_memory(), 0, True

    def on_step_end(self, trainer: Training) -> None:
        """Read the peak; let it begin anew after the first step."""
        if self._first:
            self.grown = max(recent_peak_memory() - self._before, 0)
            self._steps += 1
            if self._steps == 1:
                restart_peak()

    def on_epoch_end(self, trainer: Training) -> None:
        """Stop: evaluations have other arrays."""
        self._first = False


NO_EFFECT: dict[str, tuple[str, ...]] = {
    "what is computed, with as many operations": (
        *("loss", "loss_options", "auxiliary_weights", "label_smoothing", "metrics", "seed"),
        *("lr", "weight_decay", "optimizer_options", "schedule", "schedule_options"),
        *("warmup_epochs", "lr_scaling", "lr_base_batch", "plateau", "plateau_factor"),
        *("load", "load_options"),
    ),
    "samples are prepared by other threads, at the rate of the platform": (
        *("augment", "mixup", "cutmix", "class_balanced", "data_dir", "stage", "download"),
    ),
    "how many steps there are": (
        *("epochs", "steps_per_epoch", "validation_split", "early_stopping", "stop_at", "monitor"),
        *("evaluate_only", "drop_last"),
    ),
    "happens between steps": (
        *("output_dir", "save", "resume", "checkpoint_epochs", "checkpoint_steps", "keep"),
        *("progress", "verbose", "quiet", "check_equal", "tensorboard", "tensorboard_histograms"),
        *("mlflow", "wandb"),
        *("timeout", "straggler_factor", "restore_best"),
    ),
    "observes steps, in less than a percent of their time": (
        *("trace", "trace_steps", "trace_kernels"),
    ),
    "of GPUs, which are not predicted": ("comm", "cuda_aware", "tf32", "graph"),
}
"""Options without effect on the predicted time and memory of a step, and why."""


def no_formula(config: TrainConfig, work: Workload, platform: Platform | None = None) -> str:
    """Return which option of a run the closed formulas do not describe; empty if there is none.

    Other options change the prediction, or are in `NO_EFFECT`.
    """
    from pydtnn.perfmodel.projection import without_formula

    if config.virtual_ranks is not None:
        return "--virtual-ranks"
    name = without_formula(work, platform)
    if name == "threads" and platform is not None:
        return f"--threads {work.threads} where --platform has {platform.compute.threads}"
    return typed(config, name) if name else ""


def find_platform(
    config: TrainConfig, comm: Communicator, threads: int, work: Workload
) -> Platform | None:
    """Return the platform of a run. Collective: all ranks call it.

    That of `--platform`, otherwise the one of this job: measured, or from the user's cache; None
    for devices that are not measured.
    """
    from pydtnn.perfmodel.platform import Platform
    from pydtnn.perfmodel.quick import platform_of

    if config.platform is not None:
        return Platform.load(config.platform)
    if work.device != "cpu":
        return None
    batch = ceil(work.batch / comm.size)
    backend = work.create_backend(threads=threads)
    return platform_of(comm, backend, work.create_net(), work.input_shape, batch)


def choose_parallel(
    config: TrainConfig, comm: Communicator, threads: int
) -> tuple[TrainConfig, list[str]]:
    """Return the configuration with the chosen strategy, and lines that explain the choice.

    Collective: all ranks call it. The choice is made on rank 0.

    Raises
    ------
    AgreedError
        On all ranks, if the model has no formula for the options, or nothing fits into memory.
    """

    def describe() -> dict[str, Any]:
        return describe_data(config, create_data(config)[0], comm.size)

    work = describe_run(config, {}, comm.gather_object(on_rank_0(comm, describe))[0])
    if option := no_formula(config, work):
        raise ValueError(
            f"train: --parallel auto has no formula for {option}; name the axes, such as "
            "--parallel data=2"
        )
    platform = find_platform(config, comm, threads, work)
    work = replace(work, threads=None)  # the choice is one for ranks like those of the platform
    found = on_rank_0(comm, _choose, config, comm.size, platform, work)
    chosen, lines = comm.gather_object(found)[0]
    return replace(config, **chosen), lines


def _choose(
    config: TrainConfig, ranks: int, platform: Platform, work: Workload
) -> tuple[dict[str, Any], list[str]]:
    """Return the options of the fastest strategy, and why it was chosen."""
    from pydtnn.perfmodel.choice import explain, plan_lines, ranked
    from pydtnn.perfmodel.compute.analytic import AnalyticCosts
    from pydtnn.perfmodel.projection import Projector
    from pydtnn.perfmodel.search import search

    limit = platform.cluster.memory_per_rank
    if config.memory_limit is not None:
        limit = min(limit, parse_size("train: --memory-limit", config.memory_limit))
    whole = work.create_optimizer().per_parameter  # requires whole parameters

    def possible(work: Workload) -> bool:
        if whole and any(axis not in ("spatial", PIPELINE) for axis in work.cut):
            return False
        return work.stages <= work.batch // work.data

    found = search(
        Projector(work, platform, AnalyticCosts.of(work, platform)),
        ranks,
        memory_limit=limit,
        recompute=(None, AUTO) if config.recompute is None else (work.recompute,),
        allowed=possible,
    ).prefer_uniform(MIN_GAIN)
    details = [*ranked(found), *plan_lines(found.best)]
    lines = [f"parallel: {explain(found, limit)}", *(f"  {line}" for line in details)]
    return _options(config, found.best.work, limit), lines


def _options(config: TrainConfig, best: Workload, limit: float) -> dict[str, Any]:
    """Return the options of the command line for the best strategy."""
    chosen: dict[str, Any] = {
        "parallel": best.parallel if best.cut else None,
        "plan": None if best.plan is None else plain_yaml.dump(best.plan),
        "global_batch_size": best.batch,
    }
    if best.stages > 1 and config.micro_batches is None:
        chosen["micro_batches"] = min(DEFAULT_PER_STAGE * best.stages, best.batch // best.data)
    if config.recompute is None and best.recompute is not None:
        chosen["recompute"] = AUTO
        chosen["memory_limit"] = config.memory_limit or f"{int(limit)}B"
    elif config.recompute != AUTO:
        chosen["memory_limit"] = None  # a limit of recomputation
    return chosen


def predict_run(
    config: TrainConfig, work: Workload, comm: Communicator, threads: int
) -> Predicted | None:
    """Predict a run on rank 0. Collective: all ranks call it.

    Runs that report nothing, and virtual ones, are not predicted; neither are those that measure
    nothing, unless `--platform` names the platform. What cannot be predicted is not an error: the
    result has the reason.
    """
    if config.quiet or config.evaluate_only or config.virtual_ranks is not None:
        return None
    platform, option = None, no_formula(config, work)
    if not option:
        if config.platform is None and config.tuning not in (None, "measure"):
            reason = f"--tuning {config.tuning} measures nothing; name a --platform"
            return Predicted(reason=reason)
        platform = find_platform(config, comm, threads, work)
    return predict(config, work, platform) if comm.rank == 0 else None


def predict(config: TrainConfig, work: Workload, platform: Platform | None) -> Predicted:
    """Predict a run on a platform; the result has the reason if that is not possible."""
    from pydtnn.perfmodel.compute.analytic import AnalyticCosts
    from pydtnn.perfmodel.projection import Projector

    option = no_formula(config, work, platform)
    if option or platform is None:
        return Predicted(reason=f"the model of a step has no formula for {option}")
    try:
        projector = Projector(work, platform, AnalyticCosts.of(work, platform))
        return Predicted.of(projector.project(work), platform)
    except Exception as error:  # a prediction must never end training
        return Predicted(reason=f"{type(error).__name__}: {error}")


def rows(predicted: Predicted, measured: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the lines of the report: measured and predicted parts of a step.

    Parameters
    ----------
    predicted : Predicted
    measured : mapping of str to float
        "seconds", "compute" (update included), "communication" and "data" of a step, in s, and
        "memory" of a rank, in B; empty if no step was executed.
    """
    if not measured:
        return []
    if predicted.reason:
        text = f"measured {1e3 * measured['seconds']:.4g} ms; not predicted: {predicted.reason}"
        return [("time per step", text)]
    whole = asdict(predicted)
    whole["compute"] += predicted.update
    found = []
    for name, part in (
        ("time per step", "seconds"),
        ("  in compute", "compute"),
        ("  in communication", "communication"),
        ("  waiting for data", "data"),
    ):
        text, time = f"measured {1e3 * measured[part]:.4g} ms", f"{1e3 * whole[part]:.4g} ms"
        if part == "seconds":
            ratio = whole[part] / measured[part]
            text += f"; predicted {ratio:.2f} of measured, {time} for {predicted.platform}"
        else:
            text += f", predicted {time}"
        if part == "compute":
            text += f", {1e3 * predicted.update:.4g} ms of it for the update"
        found.append((name, text))
    sizes = [f"{size / 1e6:.0f} MB" for size in (measured["memory"], predicted.memory)]
    text = f"measured {sizes[0]}, predicted {sizes[1]}, in addition to interpreter and data"
    return [*found, ("  memory of a rank", text)]
