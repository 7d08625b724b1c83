"""Learning rates equal those of `torch.optim.lr_scheduler` at every step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn.callbacks import ReduceOnPlateau
from pydtnn.schedules import (
    Constant,
    Cosine,
    CosineRestarts,
    OneCycle,
    Polynomial,
    Schedule,
    Step,
    WarmUp,
)
from tests.each import each
from tests.small_training import STEPS, small_trainer

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")

LR = 0.1


def peer_optimizer() -> Any:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)


scheduler = torch.optim.lr_scheduler


def warm_up(o: Any, n: int) -> Any:
    return scheduler.LinearLR(o, 1 / (n // 3 + 1), 1.0, n // 3)


def warm_up_then_cosine(o: Any, n: int) -> Any:
    rest = scheduler.CosineAnnealingLR(o, n - n // 3, 0.01)
    return scheduler.SequentialLR(o, [warm_up(o, n), rest], [n // 3])


PAIRS: dict[str, tuple[Callable[[int], Schedule], Callable[[Any, int], Any]]] = {
    "warm-up": (lambda n: WarmUp(Constant(LR), n // 3), warm_up),
    "warm-up, then cosine": (
        lambda n: WarmUp(Cosine(LR, n, 0.01, begin=n // 3), n // 3),
        warm_up_then_cosine,
    ),
    "one_cycle": (
        lambda n: OneCycle(LR, n),
        lambda o, n: scheduler.OneCycleLR(o, LR, n, cycle_momentum=False),
    ),
    "one_cycle, half and half": (
        lambda n: OneCycle(LR, n, 0.5, 10, 1000),
        lambda o, n: scheduler.OneCycleLR(
            *(o, LR, n), pct_start=0.5, cycle_momentum=False, div_factor=10, final_div_factor=100
        ),
    ),
    "cosine": (
        lambda n: Cosine(LR, n, 0.01),
        lambda o, n: scheduler.CosineAnnealingLR(o, n, 0.01),
    ),
    "restarts": (
        lambda n: CosineRestarts(LR, 4, final=0.01),
        lambda o, n: scheduler.CosineAnnealingWarmRestarts(o, 4, eta_min=0.01),
    ),
    "restarts of twice the length": (
        lambda n: CosineRestarts(LR, 3, 2),
        lambda o, n: scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    ),
    "polynomial": (
        lambda n: Polynomial(LR, n, 2),
        lambda o, n: scheduler.PolynomialLR(o, n, 2),
    ),
    "linear": (
        lambda n: Polynomial(LR, n, final=0.02),
        lambda o, n: scheduler.LinearLR(o, 1, 0.2, n),
    ),
    "step": (
        lambda n: Step(LR, 3, 0.5),
        lambda o, n: scheduler.StepLR(o, 3, 0.5),
    ),
    "boundaries": (
        lambda n: Step(LR, (2, 5), 0.5),
        lambda o, n: scheduler.MultiStepLR(o, [2, 5], 0.5),
    ),
}


@each("steps", [3, 7, 10, 100])
@each("name", PAIRS)
def test_every_step_has_the_rate_of_pytorch(name: str, steps: int) -> None:
    own, peer = PAIRS[name][0](steps), peer_optimizer()
    theirs = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no optimizer step for the scheduler to follow
        other = PAIRS[name][1](peer, steps)
        for _ in range(steps):
            theirs.append(peer.param_groups[0]["lr"])
            if len(theirs) < steps:
                other.step()
    # PyTorch multiplies from step to step: as many roundings as there are steps
    np.testing.assert_allclose([own(t) for t in range(steps)], theirs, rtol=1e-12, atol=1e-17)


@each("cooldown", [0, 1, 3])
@each("patience", [0, 1, 2, 5])
def test_a_plateau_lowers_the_rate_in_the_same_epochs(patience: int, cooldown: int) -> None:
    rng = np.random.default_rng(patience)
    values = np.repeat(rng.uniform(size=12), rng.integers(1, 9, 12)).tolist()
    own, peer = ReduceOnPlateau("val_loss", 0.5, patience, cooldown=cooldown), peer_optimizer()
    other = scheduler.ReduceLROnPlateau(
        peer, factor=0.5, patience=patience, cooldown=cooldown, threshold=0, eps=0
    )
    trainer = small_trainer(None, own)
    own.on_fit_start(trainer, len(values), STEPS)
    for value in values:
        trainer.logs = {"val_loss": value}
        own.on_epoch_end(trainer)
        other.step(value)
        assert LR * trainer.optimizer.lr_factor == peer.param_groups[0]["lr"]  # halving is exact
