"""Losses and metrics of classes at several positions of a sample."""

import numpy as np
import pytest

from pydtnn.kernels import create_backend
from pydtnn.losses import CategoricalCrossEntropy, Hinge
from pydtnn.metrics import Accuracy, CategoricalHinge, Perplexity, TopKAccuracy, get_metric
from pydtnn.tools.testing import check_loss, check_metric
from pydtnn.training.metric_sums import Totals

SAMPLES, POSITIONS, CLASSES = 5, 3, 7

LOSSES = [
    CategoricalCrossEntropy(),
    CategoricalCrossEntropy(label_smoothing=0.1, class_weights=[1, 2, 1, 1, 0.5, 1, 3]),
    Hinge(),
]
METRICS = [Accuracy(), TopKAccuracy(2), Perplexity(), CategoricalHinge()]


@pytest.fixture
def target(rng):
    return rng.integers(CLASSES, size=(SAMPLES, POSITIONS))


@pytest.mark.parametrize("backend", ["cpu", "numpy"])
@pytest.mark.parametrize("loss", LOSSES, ids=["plain", "smoothed and weighted", "hinge"])
def test_losses_of_sequences_keep_the_contract(loss, backend, target):
    check_loss(loss, (POSITIONS, CLASSES), target, backend=backend)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_metrics_of_sequences_keep_the_contract(metric, target):
    check_metric(metric, (POSITIONS, CLASSES), target)


@pytest.mark.parametrize("loss", LOSSES, ids=["plain", "smoothed and weighted", "hinge"])
def test_a_sample_has_the_mean_loss_of_its_positions(loss, target, rng):
    backend = create_backend("cpu", threads=1)
    y = rng.normal(size=(SAMPLES, POSITIONS, CLASSES))
    value, dy = loss(backend, y, target, 0.25)
    parts = [loss(backend, y[:, t].copy(), target[:, t], 0.25) for t in range(POSITIONS)]
    assert value == pytest.approx(np.mean([part for part, _ in parts]), rel=1e-13)
    np.testing.assert_allclose(
        dy, np.stack([part for _, part in parts], axis=1) / POSITIONS, rtol=1e-13, atol=1e-16
    )


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_sample_has_the_mean_metric_of_its_positions(metric, target, rng):
    y = rng.normal(size=(SAMPLES, POSITIONS, CLASSES))
    parts = [metric(np, y[:, t], target[:, t]) for t in range(POSITIONS)]
    assert metric(np, y, target) == pytest.approx(np.mean(parts), rel=1e-13)


def test_perplexity_is_the_exponential_of_the_mean(target, rng):
    y = rng.normal(size=(SAMPLES, POSITIONS, CLASSES))
    backend = create_backend("cpu", threads=1)
    loss, _ = CategoricalCrossEntropy()(backend, y, target, 1.0)
    metric = get_metric("perplexity")
    totals = Totals(["perplexity"], results={"perplexity": metric.result})
    totals.add(2, metric(np, y[:2], target[:2]))
    totals.add(3, metric(np, y[2:], target[2:]))
    assert totals.means()["perplexity"] == pytest.approx(np.exp(loss / SAMPLES), rel=1e-12)
    uniform = metric(np, np.zeros_like(y), target) / SAMPLES
    assert metric.finish(uniform) == pytest.approx(CLASSES)
    assert metric.finish(1e4) == float("inf")


@pytest.mark.parametrize("what", [CategoricalCrossEntropy(), Accuracy()])
def test_wrong_targets_are_refused(what, target):
    wrong = target.copy()
    wrong[3, 2] = CLASSES
    shape = (SAMPLES, POSITIONS, CLASSES)
    with pytest.raises(ValueError, match=r"in 0\.\.6, got 7 at position 2 for sample 3"):
        what.check(shape, wrong)
    with pytest.raises(ValueError, match=r"classes of shape \(5, 3\) or .* got int64"):
        what.check(shape, target[:, :2])
    with pytest.raises(ValueError, match="end the model with Flatten and Linear"):
        what.check(shape, target[:, 0])
