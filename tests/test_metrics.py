"""Metrics: values by hand, sums over shards, names, bad input."""

from __future__ import annotations

import re

import numpy as np
import pytest

from pydtnn.metrics import (
    ALIASES,
    METRICS,
    Accuracy,
    CategoricalHinge,
    CategoricalMAE,
    CategoricalMSE,
    Metric,
    RegressionMAE,
    RegressionMSE,
    TopKAccuracy,
    get_metric,
)

SCORES = np.array([[3.0, 1.0, 2.0], [0.0, 2.0, 1.0], [1.0, 5.0, 4.0], [2.0, 1.0, 0.0]])
TARGET = np.array([0, 2, 0, 0])


def test_accuracy_counts_the_samples_whose_class_has_the_largest_score():
    assert Accuracy()(np, SCORES, TARGET) == 2


def test_accuracy_of_one_output_is_the_sign_of_the_logit():
    y = np.array([[2.0], [-1.0], [0.5], [-3.0]])
    assert Accuracy()(np, y, np.array([1, 1, 0, 0])) == 2
    assert Accuracy()(np, y, np.array([[1.0], [0.0], [1.0], [0.0]])) == 4


@pytest.mark.parametrize(("k", "right"), [(1, 2), (2, 3), (3, 4)])
def test_top_k_accuracy_counts_classes_among_the_k_largest(k, right):
    assert TopKAccuracy(k)(np, SCORES, TARGET) == right


def test_equal_scores_and_nan_are_never_among_the_largest_by_chance():
    assert TopKAccuracy(2)(np, np.zeros((5, 3)), np.arange(5) % 3) == 0
    assert TopKAccuracy(2)(np, np.full((5, 3), np.nan), np.arange(5) % 3) == 0


def test_categorical_errors_compare_probabilities_with_one_hot_rows():
    p = np.array([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]])
    target = np.array([0, 1])
    squares = (0.25 + 2 * 0.0625) / 3 + (0.04 + 0.64 + 0.36) / 3
    absolutes = (0.5 + 0.5) / 3 + (0.2 + 0.8 + 0.6) / 3
    logits = np.log(p) + 7  # the softmax does not see a shift
    assert CategoricalMSE()(np, logits, target) == pytest.approx(squares, rel=1e-12)
    assert CategoricalMAE()(np, logits, target) == pytest.approx(absolutes, rel=1e-12)
    assert CategoricalMSE(from_logits=False)(np, p, target) == pytest.approx(squares, rel=1e-12)
    assert CategoricalMAE(from_logits=False)(np, p, target) == pytest.approx(absolutes, rel=1e-12)


def test_categorical_hinge_looks_at_the_strongest_wrong_class():
    # sample by sample: max(0, 1 + 2 - 3), 1 + 2 - 1, 1 + 5 - 1, max(0, 1 + 1 - 2)
    assert CategoricalHinge()(np, SCORES, TARGET) == 0 + 2 + 5 + 0


def test_probabilities_count_as_their_most_likely_class_and_errors_compare_them():
    soft = 0.7 * np.eye(3)[TARGET] + 0.1
    for metric in (Accuracy(), TopKAccuracy(2), CategoricalHinge()):
        assert metric(np, SCORES, soft) == metric(np, SCORES, TARGET)
    p = np.array([[0.5, 0.25, 0.25]])
    target = np.array([[0.4, 0.6, 0.0]])
    assert CategoricalMSE()(np, np.log(p), target) == pytest.approx(
        (0.1**2 + 0.35**2 + 0.25**2) / 3, rel=1e-12
    )
    assert CategoricalMAE()(np, np.log(p), target) == pytest.approx(0.7 / 3, rel=1e-12)


def test_regression_errors_are_means_over_the_outputs_of_a_sample():
    y, target = np.array([[1.0, 3.0], [0.0, 0.0]]), np.array([[0.0, 1.0], [2.0, 0.0]])
    assert RegressionMSE()(np, y, target) == (1 + 4) / 2 + 4 / 2
    assert RegressionMAE()(np, y, target) == (1 + 2) / 2 + 2 / 2
    assert RegressionMSE()(np, np.eye(3), np.arange(3)) == 0  # classes as one-hot rows
    assert RegressionMAE()(np, np.ones((2, 1)), np.array([1.0, 3.0])) == 2


@pytest.mark.parametrize("name", [*METRICS, "top2_accuracy"])
def test_sums_over_shards_add_up_and_an_empty_one_adds_nothing(name):
    metric = get_metric(name, **({"k": 2} if name == "top_k_accuracy" else {}))
    rng = np.random.default_rng(0)
    y, target = rng.normal(size=(7, 4)).astype("float32"), rng.integers(4, size=7)
    parts = [metric(np, y[a:b], target[a:b]) for a, b in ((0, 3), (3, 3), (3, 7))]
    assert parts[1] == 0
    assert sum(parts) == pytest.approx(metric(np, y, target), rel=1e-6)  # float32
    assert all(isinstance(part, float | np.integer) for part in parts)
    assert y.dtype == np.float32


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_says_its_name_and_which_way_is_better(name):
    metric = get_metric(name)
    assert metric.name == name.replace("_k_", "5_")
    assert metric.better == ("max" if "accuracy" in name else "min")


def test_names_give_metrics():
    top = get_metric("top3_accuracy")
    assert isinstance(top, TopKAccuracy)
    assert (top.k, top.name) == (3, "top3_accuracy")
    assert isinstance(get_metric("mse"), RegressionMSE)
    assert get_metric(top) is top
    assert set(ALIASES.values()) <= set(METRICS)


def test_a_metric_of_ones_own_is_one_method():
    class Largest(Metric):
        name = "largest"

        def compute(self, xp, y, target):
            return float(y.max(axis=1).sum())

    assert get_metric(Largest())(np, SCORES, TARGET) == 3 + 2 + 5 + 2


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: Accuracy()(np, SCORES, np.array([0, 1, 3, 0])),
            "Accuracy: classes must be in 0..2, got 3 for sample 2 of the batch",
        ),
        (
            lambda: CategoricalMSE()(np, SCORES, SCORES),
            "CategoricalMSE: probabilities must be at least 0 with a sum of 1, got a sum of 6",
        ),
        (
            lambda: CategoricalMSE()(np, SCORES, TARGET[:3]),
            "CategoricalMSE: the target must be integer classes of shape (4,)",
        ),
        (
            lambda: RegressionMSE()(np, SCORES, SCORES[:2]),
            "RegressionMSE: the target must have the shape (4, 3)",
        ),
        (
            lambda: get_metric("top5_accuracy")(np, SCORES, TARGET),
            "TopKAccuracy: k must be at most the number of classes 3, got 5",
        ),
        (lambda: TopKAccuracy(0), "TopKAccuracy: k must be at least 1, got 0"),
        (
            lambda: get_metric("acuracy"),
            "unknown metric 'acuracy'; did you mean 'accuracy'",
        ),
        (lambda: get_metric("accuracy", k=2), "unknown option of accuracy 'k'"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(call, sentence):
    with pytest.raises(ValueError, match="^" + re.escape(sentence)):
        call()
