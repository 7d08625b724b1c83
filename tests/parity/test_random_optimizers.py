"""Random optimizers and schedules do what those of PyTorch do, in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import create_backend
from pydtnn.schedules import Cosine, OneCycle, Polynomial, Schedule, Step, WarmUp
from pydtnn.schedules.curves import Constant
from tests.random_cases import Cases
from tests.random_optimizers import STEPS, Training, assert_same_course, random_training

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")

RULES = ("sgd", "rmsprop", "adagrad", "adam", "adamw", "nadam")
SCHEDULES = ("step", "steps", "polynomial", "cosine", "warm-up", "warm-up, then cosine")


def peer(training: Training, groups: list[dict[str, Any]]) -> Any:
    """The optimizer of `torch.optim` with the same options."""
    o = training.options
    betas = (o.get("beta1"), o.get("beta2"))
    makers: dict[str, Callable[[], Any]] = {
        "sgd": lambda: torch.optim.SGD(
            groups, 1.0, momentum=o.get("momentum", 0.0), nesterov=o.get("nesterov", False)
        ),
        "rmsprop": lambda: torch.optim.RMSprop(groups, 1.0, alpha=o["rho"], eps=o["epsilon"]),
        "adagrad": lambda: torch.optim.Adagrad(
            groups, 1.0, initial_accumulator_value=o["initial"], eps=o["epsilon"]
        ),
        "adam": lambda: torch.optim.Adam(groups, 1.0, betas, o["epsilon"]),
        "adamw": lambda: torch.optim.AdamW(groups, 1.0, betas, o["epsilon"]),
        "nadam": lambda: torch.optim.NAdam(
            groups, 1.0, betas, o["epsilon"], momentum_decay=o["momentum_decay"]
        ),
    }
    return makers[training.name]()


def run_peer(training: Training) -> list[dict[str, np.ndarray]]:
    tensors = {k: torch.nn.Parameter(torch.from_numpy(v)) for k, v in training.values().items()}
    groups = [
        {"params": [tensor], "weight_decay": training.decay_of(name)}
        for name, tensor in tensors.items()
    ]
    optimizer, history = peer(training, groups), []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = float(training.lrs[step])
        for name, gradient in training.clipped(step).items():
            tensors[name].grad = torch.from_numpy(gradient)
        optimizer.step()
        history.append({name: t.detach().numpy().copy() for name, t in tensors.items()})
    return history


@pytest.mark.fuzz("optimizers")
def test_twenty_steps_are_those_of_pytorch(cases: Cases) -> None:
    backends = [create_backend("numpy"), create_backend("cpu", threads=1)]
    for case in cases:
        training = random_training(case.rng, RULES[case.number % len(RULES)])
        expected = run_peer(training)
        for backend in backends:
            # twenty steps, whose rounding a small epsilon enlarges
            case.compare(assert_same_course, training.run(backend), expected, 1e-9)


def draw_schedule(rng: np.random.Generator, name: str) -> tuple[Schedule, Any, int]:
    """A schedule of ours, what makes its peer for an optimizer, and how many steps to compare."""
    lr, total = float(10 ** rng.uniform(-4, 1)), int(rng.integers(2, 60))
    gamma, final = float(rng.uniform(0.05, 0.95)), float(rng.choice([0.0, lr * rng.uniform(0, 1)]))
    power, rise = float(rng.uniform(0.3, 3)), int(rng.integers(1, total))
    scheduler = torch.optim.lr_scheduler
    if name == "step":
        return Step(lr, rise, gamma), lambda o: scheduler.StepLR(o, rise, gamma), total
    if name == "steps":
        ends = sorted({int(n) for n in rng.integers(1, total + 1, size=3)})
        return Step(lr, tuple(ends), gamma), lambda o: scheduler.MultiStepLR(o, ends, gamma), total
    if name == "polynomial":
        make = lambda o: scheduler.PolynomialLR(o, total, power)  # noqa: E731
        return Polynomial(lr, total, power), make, total + 5
    if name == "cosine":
        make = lambda o: scheduler.CosineAnnealingLR(o, total, final)  # noqa: E731
        return Cosine(lr, total, final), make, total + 1
    linear = lambda o: scheduler.LinearLR(o, 1 / (rise + 1), 1.0, rise)  # noqa: E731
    if name == "warm-up":
        return WarmUp(Constant(lr), rise), linear, total + 5
    make = lambda o: scheduler.SequentialLR(  # noqa: E731
        o, [linear(o), scheduler.CosineAnnealingLR(o, total - rise, final)], [rise]
    )
    return WarmUp(Cosine(lr, total, final, begin=rise), rise), make, total + 1


def rates_of(make: Callable[[Any], Any], lr: float, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR warns of its own way of stepping
        schedule = make(optimizer)
        for _ in range(steps):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
    return rates


@pytest.mark.fuzz("optimizers")
def test_schedules_are_those_of_pytorch(cases: Cases) -> None:
    for case in cases:
        ours, make, steps = draw_schedule(case.rng, SCHEDULES[case.number % len(SCHEDULES)])
        lr = getattr(ours, "lr", None) or ours.then.lr  # type: ignore[attr-defined]
        expected = rates_of(make, lr, steps)
        given = [ours(step) for step in range(steps)]
        # PyTorch multiplies from step to step, which adds up rounding: in units of the highest
        case.compare(np.testing.assert_allclose, given, expected, rtol=1e-9, atol=1e-12 * lr)


@pytest.mark.fuzz("optimizers")
def test_one_cycle_begins_peaks_and_ends_where_that_of_pytorch_does(cases: Cases) -> None:
    for case in cases:
        rng, lr = case.rng, float(10 ** case.rng.uniform(-4, 1))
        total, rise = int(rng.integers(5, 80)), float(rng.uniform(0.2, 0.8))
        start, end = float(rng.uniform(1, 50)), float(10 ** rng.uniform(0, 5))
        ours = OneCycle(lr, total, rise, start, start * end)
        expected = rates_of(
            lambda o, lr=lr, total=total, rise=rise, start=start, end=end: (
                torch.optim.lr_scheduler.OneCycleLR(
                    o, lr, total, pct_start=rise, div_factor=start, final_div_factor=end
                )
            ),
            lr,
            total - 1,
        )
        given = [ours(step) for step in range(total + 1)]
        case.compare(np.testing.assert_allclose, given[0], expected[0], rtol=1e-12)
        # the peak may lie between two steps
        case.compare(np.testing.assert_allclose, max(given), max(expected), rtol=1e-9)
        case.compare(np.testing.assert_allclose, given[-1], lr / (start * end), rtol=1e-9)
