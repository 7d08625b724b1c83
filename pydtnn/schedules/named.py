"""Schedules by name, for a training of a known length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydtnn.schedules.curves import (
    Constant,
    Cosine,
    CosineRestarts,
    OneCycle,
    Polynomial,
    Schedule,
    StableDecay,
    Step,
    Triangular,
    WarmUp,
)
from pydtnn.utils.registry import Factory, Registry
from pydtnn.utils.validate import check_float, check_int


@dataclass(frozen=True)
class TrainingLength:
    """Parameters of the training for a named schedule.

    Parameters
    ----------
    lr : float
        The highest learning rate.
    steps, steps_per_epoch : int
        Number of steps of the training and of an epoch.
    warmup_steps : int
        Steps of the initial linear increase.
    """

    lr: float
    steps: int
    steps_per_epoch: int
    warmup_steps: int

    def __post_init__(self) -> None:
        check_float("schedule", "lr (the learning rate)", self.lr, at_least=0)
        check_int("schedule", "total_steps", self.steps, at_least=1)
        check_int("schedule", "steps_per_epoch", self.steps_per_epoch, at_least=1)
        check_int("schedule", "warmup_steps", self.warmup_steps, at_least=0)
        if 0 < self.steps <= self.warmup_steps:
            raise ValueError(
                f"schedule: warmup_steps must be below the total of {self.steps} steps, got "
                f"{self.warmup_steps}; shorten the warm-up or train for more steps"
            )


def _constant(run: TrainingLength) -> Schedule:
    return Constant(run.lr)


def _warmup(run: TrainingLength) -> Schedule:
    """Warm up during a tenth of the training by default."""
    return WarmUp(Constant(run.lr), run.warmup_steps or run.steps // 10)


def _step(
    run: TrainingLength, boundaries: int | Sequence[int] | None = None, gamma: float = 0.1
) -> Schedule:
    """Multiply at half and three quarters of the training, like He et al. 2016, section 4.2."""
    if boundaries is None:
        boundaries = sorted({max(run.steps // 2, 1), max(run.steps * 3 // 4, 1)})
    if isinstance(boundaries, Sequence) and not isinstance(boundaries, str):
        boundaries = tuple(boundaries)
    return Step(run.lr, boundaries, gamma)


def _epochs(run: TrainingLength, epochs: int | None = None, gamma: float = 0.1) -> Schedule:
    """Multiply every `epochs` epochs: by default twice, after each third of the training."""
    if epochs is None:
        epochs = max(-(-run.steps // (3 * run.steps_per_epoch)), 1)
    return Step(
        run.lr, check_int("epochs", "epochs", epochs, at_least=1) * run.steps_per_epoch, gamma
    )


def _polynomial(run: TrainingLength, power: float = 1.0, final: float = 0.0) -> Schedule:
    return Polynomial(run.lr, run.steps, power, final, begin=run.warmup_steps)


def _cosine(run: TrainingLength, final: float = 0.0) -> Schedule:
    return Cosine(run.lr, run.steps, final, begin=run.warmup_steps)


def _cosine_restarts(
    run: TrainingLength, epochs: int | None = None, factor: int = 1, final: float = 0.0
) -> Schedule:
    """Start again after `epochs` epochs: by default twice, after each third of the training."""
    steps = max(-(-(run.steps - run.warmup_steps) // 3), 1)
    if epochs is not None:
        steps = check_int("cosine_restarts", "epochs", epochs, at_least=1) * run.steps_per_epoch
    return CosineRestarts(run.lr, steps, factor, final, begin=run.warmup_steps)


def _wsd(
    run: TrainingLength, decay: float = 0.2, shape: str = "sqrt", final: float = 0.0
) -> Schedule:
    """Warm up during a hundredth of the training by default."""
    stable = StableDecay(run.lr, run.steps, decay, shape, final)
    return WarmUp(stable, run.warmup_steps or run.steps // 100)


def _triangular(run: TrainingLength, rise: float = 0.2) -> Schedule:
    return Triangular(run.lr, run.steps, rise)


def _one_cycle(
    run: TrainingLength, rise: float = 0.3, start: float = 25.0, end: float = 250_000.0
) -> Schedule:
    return OneCycle(run.lr, run.steps, rise, start, end)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": _constant,
    "warmup": _warmup,
    "step": _step,
    "epochs": _epochs,
    "polynomial": _polynomial,
    "cosine": _cosine,
    "cosine_restarts": _cosine_restarts,
    "wsd": _wsd,
    "triangular": _triangular,
    "one_cycle": _one_cycle,
}
"""Schedules by name: functions of a `TrainingLength` and options."""

ALIASES = {
    "warm_up": "warmup",
    "every_n_epochs": "epochs",
    "linear": "polynomial",
    "onecycle": "one_cycle",
    "sgdr": "cosine_restarts",
    "warmup_stable_decay": "wsd",
}
"""Other names of the schedules."""

SCHEDULE: Registry[Schedule] = Registry(
    "schedule", SCHEDULES, Callable, "a function of the step", ALIASES
)


def get_schedule(
    schedule: str | Schedule | Factory[Schedule],
    lr: float,
    total_steps: int,
    steps_per_epoch: int,
    *,
    warmup_steps: int = 0,
    **options: Any,
) -> Schedule:
    """Return the schedule of a name for a training of `total_steps`, or the argument itself.

    Parameters
    ----------
    schedule : str or callable
        A name of `SCHEDULES` or `ALIASES`, or any function of the step that returns the learning
        rate.
    lr : float
        The highest learning rate.
    total_steps, steps_per_epoch : int
        Steps (updates) of the whole training and of an epoch.
    warmup_steps : int
        Length of an initial linear increase, for any schedule. "cosine", "cosine_restarts" and
        "polynomial" decay over the rest; the steps and epochs of the others are counted from the
        beginning of training.
    **options
        By name: "step": `boundaries` (steps, or one number for a fixed interval), `gamma`;
        "epochs": `epochs`, `gamma`; "polynomial": `power`, `final`; "cosine": `final`;
        "cosine_restarts": `epochs` of the first period, `factor`, `final`; "wsd": `decay`,
        `shape`, `final`; "triangular": `rise`; "one_cycle": `rise`, `start`, `end`.

    Returns
    -------
    callable
        ``schedule(step) -> lr``.

    Raises
    ------
    TypeError, ValueError
        If a name or option is unknown (the message contains the nearest ones), or a number is out
        of range.
    """
    run = TrainingLength(lr, total_steps, steps_per_epoch, warmup_steps)
    made = SCHEDULE.find(schedule).make(options, run)
    return WarmUp(made, warmup_steps) if warmup_steps else made
