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
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR, momentum=0.9)


def warm_up(o: Any, n: int) -> Any:
    return torch.optim.lr_scheduler.LinearLR(o, 1 / (n // 3 + 1), 1.0, n // 3)


def warm_up_then_cosine(o: Any, n: int) -> Any:
    rest = torch.optim.lr_scheduler.CosineAnnealingLR(o, n - n // 3, 0.01)
    return torch.optim.lr_scheduler.SequentialLR(o, [warm_up(o, n), rest], [n // 3])


HALVES = (None, None, 0.5, "cos", True, 0.85, 0.95, 10, 100)
PAIRS: list[Callable[[int], tuple[Schedule, str | Callable[..., Any], tuple[Any, ...]]]] = [
    lambda n: (WarmUp(Constant(LR), n // 3), warm_up, (n,)),
    lambda n: (WarmUp(Cosine(LR, n, 0.01, n // 3), n // 3), warm_up_then_cosine, (n,)),
    lambda n: (OneCycle(LR, n), "OneCycleLR", (LR, n)),
    lambda n: (OneCycle(LR, n, 0.5, 10, 1000), "OneCycleLR", (LR, n, *HALVES)),
    lambda n: (Cosine(LR, n, 0.01), "CosineAnnealingLR", (n, 0.01)),
    lambda n: (CosineRestarts(LR, 4, final=0.01), "CosineAnnealingWarmRestarts", (4, 1, 0.01)),
    lambda n: (CosineRestarts(LR, 3, 2), "CosineAnnealingWarmRestarts", (3, 2)),
    lambda n: (Polynomial(LR, n, 2), "PolynomialLR", (n, 2)),
    lambda n: (Polynomial(LR, n, final=0.02), "LinearLR", (1, 0.2, n)),
    lambda n: (Step(LR, 3, 0.5), "StepLR", (3, 0.5)),
    lambda n: (Step(LR, (2, 5), 0.5), "MultiStepLR", ([2, 5], 0.5)),
]
"""Of a number of steps: ours, theirs, and its arguments."""


@each("steps", [3, 7, 10, 100])
@each("pair", PAIRS)
def test_every_step_has_the_rate_of_pytorch(pair, steps):
    own, make, arguments = pair(steps)
    make = getattr(torch.optim.lr_scheduler, make) if isinstance(make, str) else make
    peer, theirs = peer_optimizer(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no optimizer step for the scheduler to follow
        other = make(peer, *arguments)
        for _ in range(steps):
            theirs.append(peer.param_groups[0]["lr"])
            if len(theirs) < steps:
                other.step()
    # PyTorch multiplies from step to step: as many roundings as there are steps
    np.testing.assert_allclose([own(t) for t in range(steps)], theirs, rtol=1e-12, atol=1e-17)


@each("cooldown", [0, 1, 3])
@each("patience", [0, 1, 2, 5])
def test_a_plateau_lowers_the_rate_in_the_same_epochs(patience, cooldown):
    rng = np.random.default_rng(patience)
    values = np.repeat(rng.uniform(size=12), rng.integers(1, 9, 12)).tolist()
    own, peer = ReduceOnPlateau("val_loss", 0.5, patience, cooldown=cooldown), peer_optimizer()
    other = torch.optim.lr_scheduler.ReduceLROnPlateau(
        peer, factor=0.5, patience=patience, cooldown=cooldown, threshold=0, eps=0
    )
    trainer = small_trainer(None, own)
    own.on_fit_start(trainer, len(values), STEPS)
    for value in values:
        trainer.logs = {"val_loss": value}
        own.on_epoch_end(trainer)
        other.step(value)
        assert LR * trainer.optimizer.lr_factor == peer.param_groups[0]["lr"]  # halving is exact
