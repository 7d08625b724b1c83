"""Learning-rate schedules: functions of the step.

A schedule is any callable ``schedule(step) -> lr`` with steps (updates) counted from 0. All
schedules count steps from the beginning of training, including the warm-up: "divide at step 1000"
means step 1000 with or without a warm-up. After their last step they are constant;
`CosineRestarts` has none.

A training of n steps makes its updates at steps 0 to n - 1. `Polynomial`, `Cosine`, `StableDecay`
and `Triangular` reach their final rate at step n, after the last update, like ``PolynomialLR`` and
``CosineAnnealingLR`` of PyTorch: with a final rate of 0, the last update would otherwise have no
effect. `OneCycle` reaches it at step n - 1, like ``OneCycleLR``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydtnn.utils.names import SuggestsNames
from pydtnn.utils.option import option
from pydtnn.utils.validate import check_float, check_int

Schedule = Callable[[int], float]
"""``schedule(step)`` returns the learning rate of update number `step`, counted from 0."""


@dataclass(frozen=True)
class _Rate(SuggestsNames):
    """Base class of schedules with a highest learning rate."""

    lr: float

    def __post_init__(self) -> None:
        check_float(type(self).__name__, "lr (the learning rate)", self.lr, at_least=0)


@dataclass(frozen=True)
class _Planned(_Rate):
    """Base class of schedules for a number of steps."""

    steps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int(type(self).__name__, "steps", self.steps, at_least=1)


@dataclass(frozen=True)
class Constant(_Rate):
    """The same learning rate at every step.

    Parameters
    ----------
    lr : float
    """

    def __call__(self, step: int) -> float:
        return self.lr


@dataclass(frozen=True)
class WarmUp(SuggestsNames):
    """A linear increase from near 0, followed by another schedule.

    ``lr(t) = (t + 1) / (steps + 1) * then(steps)`` for ``t < steps``, ``then(t)`` afterwards: the
    first update has a learning rate above 0.

    Parameters
    ----------
    then : Schedule
        The following schedule; it counts steps from the beginning of training, not from the end of
        the warm-up.
    steps : int
        Length of the warm-up.

    References
    ----------
    Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017, section 2.2.
    """

    then: Schedule
    steps: int

    def __post_init__(self) -> None:
        check_int("WarmUp", "steps", self.steps, at_least=0)

    def __call__(self, step: int) -> float:
        if step < self.steps:
            return (step + 1) / (self.steps + 1) * self.then(self.steps)
        return self.then(step)


@dataclass(frozen=True)
class Step(_Rate):
    """A learning rate multiplied by `gamma` at given steps or at a fixed interval.

    Parameters
    ----------
    lr : float
    boundaries : int or tuple of int
        Increasing steps from which one more `gamma` applies; one number n means n, 2n, 3n and so
        on.
    gamma : float
    """

    boundaries: int | Sequence[int]
    gamma: float = option(0.1, above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.boundaries, Sequence) or isinstance(self.boundaries, str):
            check_int("Step", "boundaries", self.boundaries, at_least=1)
            return
        for boundary in self.boundaries:
            check_int("Step", "each of boundaries", boundary, at_least=0)
        if list(self.boundaries) != sorted(set(self.boundaries)):
            raise ValueError(f"Step: boundaries must increase, got {self.boundaries}; sort them")

    def __call__(self, step: int) -> float:
        if not isinstance(self.boundaries, Sequence):
            passed = step // self.boundaries
        else:
            passed = bisect_right(self.boundaries, step)
        return self.lr * self.gamma**passed


@dataclass(frozen=True)
class Polynomial(_Planned):
    """Decay as ``(1 - p)^power`` with ``p`` from 0 at step `begin` to 1 at step `steps`.

    Parameters
    ----------
    lr : float
        Before `begin` and at it.
    steps : int
        Steps of the whole training.
    power : float
        1 is a straight line.
    final : float
        Learning rate at step `steps`, after the last update.
    begin : int
        Step at which the decay begins.
    """

    power: float = option(1.0, above=0)
    final: float = option(0.0, at_least=0)
    begin: int = option(0, at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_span(self, self.begin, self.steps)

    def __call__(self, step: int) -> float:
        left = 1 - _progress(step, self.begin, self.steps)
        return self.final + (self.lr - self.final) * left**self.power


@dataclass(frozen=True)
class Cosine(_Planned):
    """Cosine decay from step `begin` to step `steps`.

    ``lr(t) = final + (lr - final) (1 + cos(pi p)) / 2``, where ``p`` runs from 0 at `begin` to 1 at
    `steps`.

    Parameters
    ----------
    lr : float
        Before `begin` and at it.
    steps : int
        Steps of the whole training.
    final : float
        Learning rate at step `steps`, after the last update.
    begin : int
        Step at which the decay begins.

    References
    ----------
    Loshchilov and Hutter, "SGDR: stochastic gradient descent with warm restarts", ICLR 2017,
    equation 5 (without restarts).
    """

    final: float = option(0.0, at_least=0)
    begin: int = option(0, at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_span(self, self.begin, self.steps)

    def __call__(self, step: int) -> float:
        return _between(self.lr, self.final, _progress(step, self.begin, self.steps))


@dataclass(frozen=True)
class CosineRestarts(_Planned):
    """Cosine decay that starts again whenever it is complete (SGDR).

    The rate of period i, of length ``steps * factor^i``, is that of `Cosine`: `lr` at its first
    step, and `final` would be reached at the first step of the next one. There is no last period.

    Parameters
    ----------
    lr : float
        Before `begin`, and at the first step of each period.
    steps : int
        Length of the first period.
    factor : int
        Ratio of the lengths of successive periods.
    final : float
        Learning rate at which each period ends.
    begin : int
        Step at which the first period begins.

    References
    ----------
    Loshchilov and Hutter, "SGDR: stochastic gradient descent with warm restarts", ICLR 2017,
    section 3; as in PyTorch's ``CosineAnnealingWarmRestarts``.
    """

    factor: int = option(1, at_least=1)
    final: float = option(0.0, at_least=0)
    begin: int = option(0, at_least=0)

    def __call__(self, step: int) -> float:
        passed, length = max(step - self.begin, 0), self.steps
        if self.factor == 1:
            passed %= length
        while passed >= length:
            passed, length = passed - length, length * self.factor
        return _between(self.lr, self.final, passed / length)


SHAPES: dict[str, Callable[[float], float]] = {
    "sqrt": lambda p: 1 - math.sqrt(p),
    "linear": lambda p: 1 - p,
    "exponential": lambda p: (0.001**p - 0.001) / 0.999,
}
"""Shapes of the decay of `StableDecay`, from 1 at 0 to 0 at 1."""


@dataclass(frozen=True)
class StableDecay(_Planned):
    """A constant learning rate that decays in the last part of the training.

    After `WarmUp` this is warm-up-stable-decay (WSD): a training can be prolonged from a checkpoint
    of the constant part, as that does not depend on the number of steps. With ``p`` from 0 at step
    ``round((1 - decay) steps)`` to 1 at step `steps`, ``lr(t) = final + (lr - final) f(p)``, and
    ``f(p)`` is ``1 - sqrt(p)``, ``1 - p``, or exponential: ``(0.001^p - 0.001) / 0.999``.

    Parameters
    ----------
    lr : float
        Before the decay.
    steps : int
        Steps of the whole training.
    decay : float
        Share of the steps in which it decays, in (0, 1].
    shape : {"sqrt", "linear", "exponential"}
        The function f.
    final : float
        Learning rate at step `steps`, after the last update.

    References
    ----------
    Hu et al., "MiniCPM: unveiling the potential of small language models with scalable training
    strategies", 2024, section 4. Hägele et al., "Scaling laws and compute-optimal training beyond
    fixed training durations", NeurIPS 2024, equation 1, with the shapes sqrt and linear.
    """

    decay: float = option(0.2, above=0, at_most=1)
    shape: str = option("sqrt", among=SHAPES)
    final: float = option(0.0, at_least=0)

    def __call__(self, step: int) -> float:
        begin = min(round((1 - self.decay) * self.steps), self.steps - 1)
        left = SHAPES[self.shape](_progress(step, begin, self.steps))
        return self.final + (self.lr - self.final) * left


@dataclass(frozen=True)
class Triangular(_Planned):
    """A linear increase from near 0 to `lr`, then a linear decrease to 0.

    With the peak at step ``p = round(rise * steps)``: ``lr (t + 1) / (p + 1)`` before it, ``lr
    (steps - t) / (steps - p)`` from it on. All updates have a learning rate above 0: the first has
    ``lr / (p + 1)``, the last ``lr / (steps - p)``.

    Parameters
    ----------
    lr : float
        At the peak.
    steps : int
        Steps of the whole training.
    rise : float
        Share of the steps before the peak, in [0, 1).

    References
    ----------
    Smith, "Cyclical learning rates for training neural networks", WACV 2017, section 3.2: one cycle
    of it.
    """

    rise: float = option(0.2, at_least=0, below=1)

    def __call__(self, step: int) -> float:
        peak = _peak(self.rise, self.steps)
        if step < peak:
            return self.lr * (step + 1) / (peak + 1)
        return self.lr * (1 - _progress(step, peak, self.steps))


@dataclass(frozen=True)
class OneCycle(_Planned):
    """Cosine increase from ``lr / start`` to `lr`, then cosine decrease to ``lr / end``.

    The increase ends at step ``rise * steps - 1``, which may be fractional, and the decrease at the
    last step of the training, ``steps - 1``: the rates are those of PyTorch's ``OneCycleLR`` with
    its defaults. The momentum is not changed.

    Parameters
    ----------
    lr : float
        At the peak.
    steps : int
        Steps of the whole training.
    rise : float
        Share of the steps up to the peak, in [0, 1).
    start, end : float
        Ratios of `lr` to the first and the final learning rate.

    References
    ----------
    Smith and Topin, "Super-convergence: very fast training of neural networks using large learning
    rates", 2018, section 3.
    """

    rise: float = option(0.3, at_least=0, below=1)
    start: float = option(25.0, at_least=1)
    end: float = option(250_000.0, at_least=1)

    def __call__(self, step: int) -> float:
        peak = self.rise * self.steps - 1
        if step < peak:
            return _between(self.lr / self.start, self.lr, step / peak)
        return _between(self.lr, self.lr / self.end, _progress(step, peak, self.steps - 1))


def _check_span(schedule: object, begin: int, steps: int) -> None:
    who = type(schedule).__name__
    if begin >= steps:
        raise ValueError(f"{who}: begin must be below steps={steps}, got {begin}; train longer")


def _peak(rise: float, steps: int) -> int:
    """Step of the peak; at least one step follows it."""
    return min(round(rise * steps), steps - 1)


def _progress(step: int, begin: float, end: int) -> float:
    """Position of `step` between `begin` (0) and `end` (1)."""
    return min(max((step - begin) / (end - begin), 0.0), 1.0)


def _between(first: float, last: float, progress: float) -> float:
    """Half a cosine from `first` to `last`."""
    return last + (first - last) * (1 + math.cos(math.pi * progress)) / 2
