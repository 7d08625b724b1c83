"""Every loss, and its gradient, equals PyTorch's in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import create_backend
from pydtnn.losses import get_loss
from tests.each import each
from tests.gpu import to_host

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")
F = torch.nn.functional

WEIGHTS = [0.5, 2.0, 1.0, 0.0, 3.5, 1.0, 0.25]


W = torch.tensor(WEIGHTS).double()
SMOOTH: dict[str, Any] = {"label_smoothing": 0.1}
IGNORED: dict[str, Any] = {"ignore_index": 3, **SMOOTH}
WEIGHTED: dict[str, Any] = {"class_weights": WEIGHTS}


def summed(y: Any, t: Any, **options: Any) -> Any:
    """Cross-entropy whose sum is divided by samples, not by their weights."""
    return F.cross_entropy(y, t, W, reduction="sum", **options) / len(y)


def divergence(y: Any, q: Any, t: float = 1.0) -> Any:
    return t**2 * F.kl_div(F.log_softmax(y / t, dim=1), q, reduction="batchmean")


LOGITS: dict[str, Any] = {"temperature": 3.0, "from_logits": True}

CASES: list[tuple[str, dict[str, Any], Any, str]] = [
    ("cross_entropy", {}, F.cross_entropy, "classes"),
    ("cross_entropy", SMOOTH, partial(F.cross_entropy, **SMOOTH), "classes"),
    ("cross_entropy", SMOOTH, partial(F.cross_entropy, **SMOOTH), "distributions"),
    ("cross_entropy", IGNORED, partial(F.cross_entropy, **IGNORED), "classes"),
    ("cross_entropy", WEIGHTED, summed, "classes"),
    ("cross_entropy", WEIGHTED | SMOOTH, partial(summed, **SMOOTH), "classes"),
    ("cross_entropy", WEIGHTED, partial(F.cross_entropy, weight=W), "distributions"),
    ("kl_divergence", {}, divergence, "distributions"),
    ("kl_divergence", LOGITS, lambda y, t: divergence(y, F.softmax(t / 3, 1), 3.0), "numbers"),
    ("binary_cross_entropy", {}, F.binary_cross_entropy_with_logits, "probabilities"),
    ("mse", {}, F.mse_loss, "numbers"),
    ("mae", {}, F.l1_loss, "numbers"),
    # PyTorch divides the hinges by the number of classes
    ("hinge", {}, lambda y, t: F.multi_margin_loss(y, t) * y.shape[1], "classes"),
]


@each("whole", [False, True])
@each(("name", "options", "peer", "kind"), CASES)
def test_a_loss_equals_pytorch(name, options, peer, kind, whole, backend):
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
    loss_of = get_loss(name, **options)
    count = int(loss_of.count(y.shape, target))
    ours, dy = loss_of(backend, backend.asarray(y), backend.asarray(target), 1 / count)
    assert float(ours) / count == pytest.approx(loss.item(), rel=1e-12)
    np.testing.assert_allclose(to_host(dy), theirs.grad.numpy(), rtol=1e-10, atol=1e-15)


@pytest.mark.tools
def test_ctc_equals_pytorch():
    rng, backend = np.random.default_rng(0), create_backend("numpy")
    y, labels = 3 * rng.normal(size=(40, 12, 6)), rng.integers(1, 6, size=(40, 4))
    counts, lengths = rng.integers(5, size=40), rng.integers(8, 13, size=40)
    labels[np.arange(4) >= counts[:, None]] = 0
    theirs, *numbers = map(torch.from_numpy, (y.copy(), labels, lengths, counts))
    log_p = theirs.requires_grad_().log_softmax(2).transpose(0, 1)
    loss = F.ctc_loss(log_p, *numbers, reduction="sum")
    loss.backward()
    ours, dy = get_loss("ctc")(backend, y, np.column_stack([lengths, labels]), 1.0)
    assert ours == pytest.approx(loss.item(), rel=1e-12)
    np.testing.assert_allclose(dy, theirs.grad.numpy(), rtol=0, atol=1e-12)
