"""Random optimizers do what those of PyTorch do, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import create_backend
from tests.random_optimizers import STEPS, Training, assert_same_course, random_training

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")

RULES = ("sgd", "rmsprop", "adagrad", "adam", "adamw", "nadam")


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
def test_twenty_steps_are_those_of_pytorch(cases):
    backends = [create_backend("numpy"), create_backend("cpu", threads=1)]
    for case in cases:
        training = random_training(case.rng, RULES[case.number % len(RULES)])
        expected = run_peer(training)
        for backend in backends:
            # twenty steps, whose rounding a small epsilon enlarges
            case.compare(assert_same_course, training.run(backend), expected, 1e-9)
