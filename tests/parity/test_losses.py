"""Every loss, and its gradient, equals PyTorch's in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import Backend
from pydtnn.losses import get_loss
from tests.each import each
from tests.gpu import to_host

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")
F = torch.nn.functional

WEIGHTS = [0.5, 2.0, 1.0, 0.0, 3.5, 1.0, 0.25]

CASES: dict[str, tuple[Any, Any, str]] = {
    "cross_entropy": ({}, lambda y, t: F.cross_entropy(y, t), "classes"),
    "cross_entropy, smoothed": (
        {"label_smoothing": 0.1},
        lambda y, t: F.cross_entropy(y, t, label_smoothing=0.1),
        "classes",
    ),
    "cross_entropy, weighted": (
        {"class_weights": WEIGHTS},
        lambda y, t: (
            F.cross_entropy(y, t, torch.tensor(WEIGHTS).double(), reduction="sum") / len(y)
        ),
        "classes",
    ),
    "cross_entropy, weighted and smoothed": (
        {"class_weights": WEIGHTS, "label_smoothing": 0.1},
        lambda y, t: (
            F.cross_entropy(
                y, t, torch.tensor(WEIGHTS).double(), reduction="sum", label_smoothing=0.1
            )
            / len(y)
        ),
        "classes",
    ),
    "cross_entropy, soft": ({}, lambda y, t: F.cross_entropy(y, t), "distributions"),
    "cross_entropy, soft and smoothed": (
        {"label_smoothing": 0.1},
        lambda y, t: F.cross_entropy(y, t, label_smoothing=0.1),
        "distributions",
    ),
    "cross_entropy, soft and weighted": (
        {"class_weights": WEIGHTS},
        lambda y, t: F.cross_entropy(y, t, torch.tensor(WEIGHTS).double()),
        "distributions",
    ),
    "cross_entropy, ignoring": (
        {"ignore_index": 3},
        lambda y, t: F.cross_entropy(y, t, ignore_index=3),
        "classes",
    ),
    "cross_entropy, ignoring and smoothed": (
        {"ignore_index": 3, "label_smoothing": 0.1},
        lambda y, t: F.cross_entropy(y, t, ignore_index=3, label_smoothing=0.1),
        "classes",
    ),
    "binary_cross_entropy": (
        {},
        lambda y, t: F.binary_cross_entropy_with_logits(y, t),
        "probabilities",
    ),
    "mse": ({}, lambda y, t: F.mse_loss(y, t), "numbers"),
    "mae": ({}, lambda y, t: F.l1_loss(y, t), "numbers"),
    # PyTorch divides the hinges by the number of classes
    "hinge": ({}, lambda y, t: F.multi_margin_loss(y, t) * y.shape[1], "classes"),
}


@each("whole", [False, True])
@each("case", CASES)
def test_a_loss_equals_pytorch(case: str, whole: bool, backend: Backend) -> None:
    options, peer, kind = CASES[case]
    rng = np.random.default_rng(0)
    y = 3 * rng.normal(size=(17, 7))
    target = {
        "classes": rng.integers(7, size=17),
        "probabilities": rng.uniform(size=(17, 7)),
        "distributions": rng.dirichlet(np.ones(7), size=17),
        "numbers": rng.normal(size=(17, 7)),
    }[kind]
    if whole:  # equal to targets, and margins of 0
        y = np.rint(y)
        target = np.rint(target) if kind in ("probabilities", "numbers") else target
    theirs = torch.from_numpy(y.copy()).requires_grad_()
    loss = peer(theirs, torch.from_numpy(target))
    loss.backward()
    name = case.partition(",")[0]
    loss_of = get_loss(name, **options)
    count = int(loss_of.count(y.shape, target))
    ours, dy = loss_of(backend, backend.asarray(y), backend.asarray(target), 1 / count)
    assert float(ours) / count == pytest.approx(loss.item(), rel=1e-12)
    np.testing.assert_allclose(to_host(dy), theirs.grad.numpy(), rtol=1e-10, atol=1e-15)
