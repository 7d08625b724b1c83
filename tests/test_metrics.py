"""Metrics: values by hand, sums over shards, names, bad input."""

import numpy as np
import pytest

from pydtnn.losses import CategoricalCrossEntropy, get_loss
from pydtnn.metrics import (
    ALIASES,
    AUC,
    F1,
    METRICS,
    R2,
    Accuracy,
    BinaryAccuracy,
    CategoricalHinge,
    ConfusionMatrix,
    IoU,
    Precision,
    Recall,
    RegressionMAE,
    RegressionMSE,
    TopKAccuracy,
    get_metric,
)
from pydtnn.training.metric_sums import Totals
from pydtnn.training.objective import metrics_of
from tests.each import each

NUMBERS = {name for name in METRICS if name != "confusion_matrix"}
SCORES = np.array([[3.0, 1.0, 2.0], [0.0, 2.0, 1.0], [1.0, 5.0, 4.0], [2.0, 1.0, 0.0]])
TARGET = np.array([0, 2, 0, 0])


def test_accuracies_count_classes_among_the_largest_scores_and_ties_never_by_chance():
    assert Accuracy()(np, SCORES, TARGET) == 2
    assert [TopKAccuracy(k)(np, SCORES, TARGET) for k in (1, 2, 3)] == [2, 3, 4]
    for same in (0.0, np.nan):
        assert TopKAccuracy(2)(np, np.full((5, 3), same), np.arange(5) % 3) == 0
    # the strongest wrong class: max(0, 1 + 2 - 3), 1 + 2 - 1, 1 + 5 - 1, max(0, 1 + 1 - 2)
    assert CategoricalHinge()(np, SCORES, TARGET) == 0 + 2 + 5 + 0


def test_accuracy_of_one_output_is_the_sign_of_the_logit():
    y = np.array([[2.0], [-1.0], [0.5], [-3.0]])
    assert Accuracy()(np, y, np.array([1, 1, 0, 0])) == 2
    assert Accuracy()(np, y, np.array([[1.0], [0.0], [1.0], [0.0]])) == 4


def test_probabilities_count_as_their_most_likely_class():
    soft = 0.7 * np.eye(3)[TARGET] + 0.1
    for metric in (Accuracy(), TopKAccuracy(2), CategoricalHinge()):
        assert metric(np, SCORES, soft) == metric(np, SCORES, TARGET)


def test_regression_errors_are_means_over_the_outputs_of_a_sample():
    y, target = np.array([[1.0, 3.0], [0.0, 0.0]]), np.array([[0.0, 1.0], [2.0, 0.0]])
    assert RegressionMSE()(np, y, target) == (1 + 4) / 2 + 4 / 2
    assert RegressionMAE()(np, y, target) == (1 + 2) / 2 + 2 / 2
    assert RegressionMSE()(np, np.eye(3), np.arange(3)) == 0  # classes as one-hot rows
    assert RegressionMAE()(np, np.ones((2, 1)), np.array([1.0, 3.0])) == 2


def test_binary_accuracy_is_the_share_of_the_labels_of_a_sample_that_are_right():
    y, target = np.array([[2.0, -1.0, 0.4], [-3.0, 1.0, 1.0]]), np.array([[1, 0, 0], [0, 1, 0]])
    for labels in (target, target.astype(bool), target * 1.0):
        assert BinaryAccuracy()(np, y, labels) == pytest.approx(4 / 3)
    assert BinaryAccuracy(threshold=0.5)(np, y, target) == pytest.approx(5 / 3)
    assert BinaryAccuracy()(np, y[:, :1], target[:, 0]) == 2
    assert BinaryAccuracy()(np, np.eye(3) - 0.5, np.arange(3)) == 3  # classes as one-hot rows


def in_parts(metric, y, target):
    """The result of samples in parts of different sizes, one of them empty."""
    metric.prepare(y.shape)
    totals = Totals(["m"], results={"m": metric.result}, sizes={"m": metric.size})
    for a, b in ((0, 7), (7, 7), (7, 100), (100, len(y))):
        totals.add(len(y[a:b]), metric(np, y[a:b], target[a:b]))
    return totals.means()["m"]


@each("thresholds", [2, 10, 200])
@each("kind", ["binary", "labels", "classes"])
@each("labels", [None, 4])
def test_the_area_is_that_of_scikit_learn_for_scores_in_intervals(thresholds, kind, labels):
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(3)
    y = rng.normal(size=(300, 1 if kind == "binary" else 4), scale=2)
    target = rng.integers(0, 4, 300)
    rows = np.eye(4)[target] if kind == "classes" else (rng.random(y.shape) < 1 / (1 + np.exp(-y)))
    p = np.exp(y) / np.exp(y).sum(1, keepdims=True) if kind == "classes" else 1 / (1 + np.exp(-y))
    labels = labels and y.shape[1]
    targets = target if kind == "classes" else rows
    average = "micro" if labels is None else "macro"
    expected = metrics.roc_auc_score(rows, np.ceil(p * (thresholds - 1)), average=average)
    found = in_parts(AUC(thresholds, labels=labels), y, targets)
    assert found == pytest.approx(expected, abs=1e-12)  # sums in another order
    if thresholds == 200:  # the scores themselves
        exact = metrics.roc_auc_score(rows, p, average=average)
        assert found == pytest.approx(exact, abs=2e-3)
    same = AUC(thresholds, labels=labels, from_logits=False)
    assert in_parts(same, p, targets) == pytest.approx(expected, abs=1e-12)


def test_the_area_of_equal_targets_is_no_number_and_that_of_ends_is_exact():
    y, metric = np.array([[-800.0], [800.0], [-800.0], [0.0]]), AUC()
    assert np.isnan(in_parts(metric, y, np.ones(4)))
    assert in_parts(metric, y, np.array([0, 1, 0, 1])) == 1
    assert in_parts(metric, y, np.array([1, 0, 1, 0])) == 0
    assert in_parts(metric, np.full((4, 1), np.nan), np.array([1, 0, 1, 0])) == 0.5
    two = AUC(labels=2)  # the first output has equal targets
    assert in_parts(two, np.array([[1.0, 2.0], [3.0, 1.0]]), np.array([[1, 1], [1, 0]])) == 1


QUOTIENTS = {
    Precision: "precision_score",
    Recall: "recall_score",
    F1: "f1_score",
    IoU: "jaccard_score",
}


@each("kind", QUOTIENTS)
@each("average", ["macro", "micro", "weighted", "none"])
def test_quotients_of_classes_are_those_of_scikit_learn(kind, average):
    """Class 3 is never predicted, and class 4 neither predicted nor a target: it is left out."""
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(5)
    y, target = rng.normal(size=(300, 5)), rng.integers(0, 4, 300)
    y[:, 3:] = -9
    score = getattr(metrics, QUOTIENTS[kind])
    options = {"average": None if average == "none" else average, "zero_division": 0}
    expected = score(target, y.argmax(axis=1), **options)
    missing = [np.nan] * (average == "none")
    # means of counts, divided in another order
    given = in_parts(kind(average), y, target)
    np.testing.assert_allclose(given, np.r_[expected, missing].squeeze(), rtol=1e-12)
    maps = y.reshape(100, 3, 1, 5), target.reshape(100, 3, 1)
    np.testing.assert_allclose(in_parts(kind(average), *maps), given, rtol=1e-12)
    ignored = np.where(rng.random(300) < 0.3, 255, target)
    expected = score(ignored[ignored < 255], y.argmax(axis=1)[ignored < 255], **options)
    given = in_parts(kind(average, ignore_index=255), y, ignored)
    np.testing.assert_allclose(given, np.r_[expected, missing].squeeze(), rtol=1e-12)


@each("kind", QUOTIENTS)
@each("average", ["macro", "micro", "weighted", "none"])
def test_quotients_of_several_labels_are_those_of_scikit_learn(kind, average):
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(6)
    y, target = rng.normal(size=(300, 4)), rng.random((300, 4)) < 0.3
    score = getattr(metrics, QUOTIENTS[kind])
    for threshold in (0.0, 0.5):
        expected = score(target, y > threshold, average=None if average == "none" else average)
        given = in_parts(kind(average, threshold=threshold), y, target)
        np.testing.assert_allclose(given, expected, rtol=1e-12)
    nothing, options = np.zeros_like(target), {"average": None if average == "none" else average}
    expected = score(nothing, y > 0, **options, zero_division=0)  # no sample has a label
    np.testing.assert_array_equal(in_parts(kind(average, threshold=0.0), y, nothing), expected)
    one = in_parts(kind(average), y[:, :1], target[:, 0])
    np.testing.assert_allclose(one, score(target[:, 0], y[:, 0] > 0), rtol=1e-12)
    hidden = rng.random((300, 4)) < 0.3
    options = {"average": "none", "threshold": 0.0, "ignore_index": -1}
    given = in_parts(kind(**options), y, np.where(hidden, -1, target))
    pairs = ((target[~off, i], y[~off, i] > 0) for i, off in enumerate(hidden.T))
    np.testing.assert_allclose(given, [score(*pair) for pair in pairs], rtol=1e-12)
    same = kind(threshold=0.0, ignore_index=1)  # of labels, which classes do not have
    classes = target.argmax(axis=1)
    assert in_parts(same, y, classes) == in_parts(kind(threshold=0.0), y, classes)
    third = in_parts(kind(label=2, threshold=0.0), y, target)
    assert third == pytest.approx(score(target[:, 2], y[:, 2] > 0), rel=1e-12)


def test_the_confusion_matrix_is_that_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(7)
    y, target = rng.normal(size=(300, 4)), rng.integers(0, 4, 300)
    given = in_parts(ConfusionMatrix(), y, target)
    np.testing.assert_array_equal(given, metrics.confusion_matrix(target, y.argmax(axis=1)))
    kept = target != 1
    given = in_parts(ConfusionMatrix(ignore_index=1), y, target)
    expected = metrics.confusion_matrix(target[kept], y[kept].argmax(axis=1), labels=range(4))
    np.testing.assert_array_equal(given, expected)
    given = in_parts(ConfusionMatrix(), y[:, :1], target > 1)
    np.testing.assert_array_equal(given, metrics.confusion_matrix(target > 1, y[:, 0] > 0))
    given = in_parts(ConfusionMatrix(), y.reshape(150, 2, 4), target.reshape(150, 2))
    np.testing.assert_array_equal(given, metrics.confusion_matrix(target, y.argmax(axis=1)))


@each("mean", [0.0, 1e7])
def test_the_coefficient_of_determination_is_that_of_scikit_learn(mean):
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(8)
    target = mean + rng.normal(size=(300, 3))
    y = target + 0.5 * rng.normal(size=(300, 3))
    # scikit-learn's own two passes lose mean * 1e-16
    assert in_parts(R2(), y, target) == pytest.approx(metrics.r2_score(target, y), rel=1e-8)
    assert in_parts(R2(), y[:, :1], target[:, 0]) == pytest.approx(
        metrics.r2_score(target[:, 0], y[:, 0]), rel=1e-8
    )
    target[:, 1], target[:, 2] = mean + 0.5, y[:, 2]  # all equal, and predicted exactly
    assert in_parts(R2(), y, target) == pytest.approx(metrics.r2_score(target, y), rel=1e-8)
    y[:, 1] = target[:, 1]
    maps = (array.reshape(150, 2, 3) for array in (y, target))
    assert in_parts(R2(), *maps) == pytest.approx(metrics.r2_score(target, y), rel=1e-8)


@each("metric", ["accuracy", "perplexity", TopKAccuracy(2)])
def test_a_metric_without_an_ignored_class_is_the_mean_over_all_other_positions(metric):
    rng = np.random.default_rng(4)
    y, target = rng.normal(size=(4, 5, 3)), rng.integers(0, 3, (4, 5))
    kept = rng.random((4, 5)) < 0.6
    kept[1] = False
    (metric,) = metrics_of(CategoricalCrossEntropy(ignore_index=255), [metric])
    metric.ignore_index = 255
    given = np.where(kept, target, 255)
    totals = Totals(["m"], results={"m": metric.result}, sizes={"m": metric.size})
    for part in (slice(0, 1), slice(1, 2), slice(2, 4)):
        totals.add(len(y[part]), metric(np, y[part], given[part]))
    mean, metric.ignore_index = totals.means()["m"], None
    expected = metric.finish(metric(np, y[kept], target[kept]) / kept.sum())
    assert mean == pytest.approx(expected, rel=1e-12)


def test_accuracy_of_one_output_has_an_ignored_class_too():
    y, target = np.array([[1.0], [-1.0], [2.0]]), np.array([1, 1, -1])
    np.testing.assert_array_equal(Accuracy(ignore_index=-1)(np, y, target), [1, 2])
    assert Accuracy(ignore_index=-1).finish(np.array([0.25, 0.5])) == 0.5


@each("name", [*METRICS, "top2_accuracy"])
def test_sums_over_shards_add_up_and_an_empty_one_adds_nothing(name):
    metric = get_metric(name, **({"k": 2} if name == "top_k_accuracy" else {}))
    rng = np.random.default_rng(0)
    y, target = rng.normal(size=(7, 4)).astype("float32"), rng.integers(4, size=7)
    parts = [metric(np, y[a:b], target[a:b]) for a, b in ((0, 3), (3, 3), (3, 7))]
    assert not np.any(parts[1])
    np.testing.assert_allclose(sum(parts), metric(np, y, target), rtol=1e-6)  # float32
    assert all(np.size(part) == metric.size for part in parts)
    assert metric.size > 1 or all(isinstance(part, float | np.integer) for part in parts)
    assert y.dtype == np.float32


@each("name", METRICS)
def test_every_metric_says_its_name_and_which_way_is_better(name):
    metric = get_metric(name)
    assert metric.name == name.replace("_k_", "5_")
    errors = ("categorical", "regression", "perplexity")
    assert metric.better == ("min" if name.startswith(errors) else "max" * (name in NUMBERS))


def test_names_give_metrics_and_results_have_the_name_that_was_given():
    top = get_metric("top3_accuracy")
    assert (type(top), top.k, top.name) == (TopKAccuracy, 3, "top3_accuracy")
    assert isinstance(get_metric("mse"), RegressionMSE)
    assert set(ALIASES.values()) <= set(METRICS)
    given = ["mae", "regression_mae", "MSE", "acc", "r2_score", "micro_f1", "per_label_iou"]
    assert [get_metric(name).name for name in given] == [name.lower() for name in given]
    assert RegressionMSE.name == "regression_mse"
    assert get_metric("per_label_iou").better == ""
    assert get_metric("macro_recall").name == "recall"
    assert Precision("none", label=3).name == "precision_3"
    assert Precision("none", label=3).better == "max"
    (metric,) = metrics_of(get_loss("bce"), ["f1"])
    assert metric.threshold == 0.0


@each(
    ("call", "words"),
    [
        (lambda: Accuracy()(np, SCORES, np.array([0, 1, 3, 0])), "got 3 for sample 2 of the batch"),
        (lambda: Accuracy()(np, SCORES, SCORES), "Accuracy: probabilities .* sum of 6"),
        (lambda: Accuracy()(np, SCORES, TARGET[:3]), r"integer classes of shape \(4,\)"),
        (lambda: RegressionMSE()(np, SCORES, SCORES[:2]), r"must have the shape \(4, 3\)"),
        (lambda: get_metric("top5_accuracy")(np, SCORES, TARGET), "number of classes 3, got 5"),
        (lambda: TopKAccuracy(0), "TopKAccuracy: k must be at least 1, got 0"),
        (lambda: get_metric("acuracy"), "unknown metric 'acuracy'; did you mean 'accuracy'"),
        (lambda: AUC(labels=2)(np, SCORES, TARGET), "AUC: labels must be the 3 outputs .* got 2"),
        (lambda: F1("mean"), "F1: average must be one of macro, micro, weighted, none, got 'mean'"),
        (lambda: F1(label=3)(np, SCORES, TARGET), "F1: label must be in 0..2, .* got 3"),
        (lambda: F1()(np, SCORES, np.array([0, 1, 3, 0])), "F1: classes must be in 0..2, got 3"),
        (lambda: AUC(1), "AUC: thresholds must be at least 2, got 1"),
        (lambda: AUC(1 + (1 << 20)), "AUC: thresholds must be at most 1048576"),
        (lambda: get_metric("accuracy", k=2), "unknown option of accuracy 'k'"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(call, words):
    with pytest.raises(ValueError, match=words):
        call()
