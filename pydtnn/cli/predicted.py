"""The time per step of a run as the performance model predicts it, beside the measured one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydtnn.cli.config import TrainConfig
from pydtnn.perfmodel.compute.analytic import AnalyticCosts
from pydtnn.perfmodel.platform import Platform
from pydtnn.perfmodel.projection import Projection, Projector
from pydtnn.perfmodel.strategy import SCHEMES, Strategy
from pydtnn.perfmodel.task import Task
from pydtnn.training.callback import Callback, Training
from pydtnn.utils.machine import recent_peak_memory, resident_memory, restart_peak
from pydtnn.utils.units import parse_size


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
    def of(cls, one: Projection, platform: Platform) -> Predicted:
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
        *("augment", "mixup", "cutmix", "data_dir", "stage", "download"),
    ),
    "how many steps there are": (
        *("epochs", "steps_per_epoch", "validation_split", "early_stopping", "stop_at", "monitor"),
        *("evaluate_only", "drop_last"),
    ),
    "happens between steps": (
        *("output_dir", "save", "resume", "checkpoint_epochs", "checkpoint_steps", "keep"),
        *("progress", "verbose", "quiet", "check_equal", "tensorboard", "tensorboard_histograms"),
        *("timeout", "straggler_factor"),
    ),
    "observes steps, in less than a percent of their time": (
        *("trace", "trace_steps", "trace_kernels"),
    ),
    "of GPUs, which are not predicted": ("comm", "cuda_aware", "tf32", "graph"),
}
"""Options without effect on the predicted time and memory of a step, and why."""


def no_formula(config: TrainConfig) -> str:
    """Return which option of a run the closed formulas do not describe; empty if there is none.

    Other options change the prediction, or are in `NO_EFFECT`.
    """
    checks = {
        f"--device {config.device}": config.device != "cpu",
        f"--scheme {config.scheme}": config.scheme not in SCHEMES,
        f"--allreduce {config.allreduce}": config.allreduce != "rule",
        f"--dtype {config.dtype}": config.dtype not in ("float32", "float64"),
        "--exact": config.exact,
        "--accumulation": config.accumulation > 1,
        "--freeze": bool(config.freeze),
        "--no-overlap": not config.overlap,
        "--scheme-options": config.scheme_options not in ({}, {"overlap": True}),
        "--check-messages": config.check_messages,
        "--no-fusion": not config.fusion,
        "--sync-batch-norm": config.sync_batch_norm,
        "--virtual-ranks": config.virtual_ranks is not None,
    }
    return next((name for name, unknown in checks.items() if unknown), "")


def strategy_of(config: TrainConfig, axes: Mapping[str, int], plan: Any) -> Strategy:
    """Return the strategy of a run on a mesh.

    Raises
    ------
    ValueError
        If the model of a step has no formula for it.
    """
    recompute: str | int | tuple[str, ...] | None = config.recompute
    if config.recompute is not None and config.recompute != "auto":
        names = [name.strip() for name in config.recompute.split(",") if name.strip()]
        recompute = int(config.recompute) if config.recompute.isdecimal() else tuple(names)
    return Strategy(
        axes,
        plan=plan,
        recompute=recompute,
        scheme=config.scheme,
        compress=config.compress,
        compress_options=config.compress_options,
        micro_batches=config.micro_batches or 0,
        schedule=config.pipeline_schedule,
    )


def predict(
    config: TrainConfig, task: Task, axes: Mapping[str, int], platform: Platform | None
) -> Predicted:
    """Predict a run on a mesh; the result has the reason if there is no formula.

    Raises
    ------
    ValueError
        If the strategy is not possible.
    """
    option = no_formula(config)
    if config.tuning == "direct":
        option = option or "--tuning direct"
    if config.platform is not None and platform is not None:
        own, given = platform.compute.threads, config.threads or platform.compute.threads
        option = option or (f"--threads {given} where --platform has {own}" * (given != own))
    if option or platform is None:
        return Predicted(reason=f"the model of a step has no formula for {option}")
    projector, strategy = create_projector(task, platform), strategy_of(config, axes, config.plan)
    found = projector.project(strategy)
    if config.memory_limit is not None:  # as little is computed again as fits
        limit = parse_size("--memory-limit", config.memory_limit)
        whole = projector.project(replace(strategy, recompute=None))
        found = whole if whole.memory.total <= limit else found
    return Predicted.of(found, platform)


def create_projector(task: Task, platform: Platform) -> Projector:
    """Return the projector of a run."""
    return Projector(task, platform, AnalyticCosts(platform, task.dtype))


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
