"""Losses and metrics of classes at several positions of a sample."""

import numpy as np
import pytest

from pydtnn.kernels import create_backend
from pydtnn.losses import CategoricalCrossEntropy, Hinge
from pydtnn.metrics import (
    Accuracy,
    CategoricalHinge,
    Perplexity,
    TopKAccuracy,
    get_metric,
)
from pydtnn.tools.sequences import BLEU, ExactMatch, bleu
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


WHOLE = [ExactMatch(), ExactMatch(ignore_index=6, end=5), BLEU(2), BLEU(3, ignore_index=6, end=5)]


@pytest.mark.parametrize("metric", WHOLE, ids=lambda metric: metric.name)
def test_metrics_of_whole_sequences_keep_the_contract(metric, target):
    check_metric(metric, (POSITIONS, CLASSES), target)


def result(metric, predicted, target, parts):
    """The result for predictions of classes, computed in parts."""
    metric.prepare((1, CLASSES))
    totals = Totals(["m"], results={"m": metric.result}, sizes={"m": metric.size})
    for part in np.array_split(np.arange(len(target)), parts):
        y = np.eye(CLASSES)[predicted[part]]
        totals.add(len(part), metric(np, y, target[part]))
    return totals.means()["m"]


def test_the_scores_of_sequences_by_hand():
    target = np.array([[1, 2, 3, 4], [1, 1, 2, 5], [3, 3, 6, 6]])
    predicted = np.array([[1, 2, 3, 3], [1, 2, 1, 1], [3, 3, 0, 0]])
    assert result(ExactMatch(ignore_index=6), predicted, target, 2) == pytest.approx(1 / 3)
    # 1-grams 3 + 3 + 2 of 12, where 1 matches twice of 3; 2-grams (1 2) (2 3), (1 2) (1 1), (3 3)
    assert result(BLEU(2), predicted, target, 3) == pytest.approx((8 / 12 * 5 / 9) ** 0.5)
    # without class 6: 8 of 10, 5 of 7; what follows class 3 is left out: lengths 2 and 4
    assert result(BLEU(2, 6), predicted, target, 1) == pytest.approx((8 / 10 * 5 / 7) ** 0.5)
    assert result(BLEU(1, end=3), predicted[:1], target[1:2], 1) == pytest.approx(np.exp(1 - 4 / 2))
    assert result(BLEU(), predicted, target, 1) == 0  # no 4-gram is right


def test_bleu_of_several_references_by_hand():
    """The example of Papineni et al. 2002, section 2.1: "the" counts twice of 7."""
    candidate = ["the"] * 7
    references = [
        ["the", "cat", "is", "on", "the", "mat"],
        ["there", "is", "a", "cat", "on", "the", "mat"],
    ]
    assert bleu([candidate], [references], order=1) == pytest.approx(2 / 7, rel=1e-14)
    # a, b and one c of 4 (each reference has one c); ab and bc of 3
    assert bleu(["abcc"], [["abc", "bdcx"]], 2) == pytest.approx((3 / 4 * 2 / 3) ** 0.5, rel=1e-14)
    # of the nearest lengths 1 and 3 the shorter; both 1-grams are right in one of the references
    assert bleu([["a", "b"]], [[["a"], ["b", "c", "d"]]], order=1) == 1
    assert bleu([["a"]], [[["a", "b", "c"]]], order=1) == pytest.approx(np.exp(1 - 3), rel=1e-14)


@pytest.mark.parametrize("end", [None, 4])
def test_bleu_is_the_same_in_any_parts_and_that_of_counted_ngrams(end):
    rng = np.random.default_rng(7)
    target = rng.integers(5, size=(30, 12))
    predicted = np.where(rng.random(target.shape) < 0.7, target, rng.integers(5, size=target.shape))
    target[np.arange(12) >= rng.integers(1, 13, size=(30, 1))] = 6

    def cut(row, kept):
        row = row[kept].tolist()
        return row[: row.index(end)] if end in row else row

    ours = [cut(p, t != 6) for p, t in zip(predicted, target, strict=True)]
    theirs = [[cut(t, t != 6)] for t in target]
    found = {result(BLEU(3, 6, end), predicted, target, parts) for parts in (1, 2, 7)}
    assert len(found) == 1  # integers are added up
    assert found.pop() == pytest.approx(bleu(ours, theirs, 3), rel=1e-14)
