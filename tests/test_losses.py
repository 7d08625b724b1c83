"""Losses: values by hand, gradients by finite differences, targets, bad input."""

from __future__ import annotations

import re

import numpy as np
import pytest

from pydtnn.losses import (
    ALIASES,
    LOSSES,
    BinaryCrossEntropy,
    CategoricalCrossEntropy,
    Hinge,
    Loss,
    MeanAbsoluteError,
    MeanSquaredError,
    get_loss,
)
from pydtnn.testing import check_loss
from tests.each import each
from tests.gpu import to_host

CLASSES = np.array([2, 0, 3, 1, 2])
WEIGHTS = [0.5, 2.0, 1.25, 0.0]


def cases():
    rng = np.random.default_rng(0)
    numbers, shares = rng.normal(size=(5, 4)), rng.uniform(size=(5, 4))
    images = rng.normal(size=(5, 2, 3))
    soft = rng.dirichlet(np.ones(4), size=5)
    soft[0] = [0, 1, 0, 0]
    return {
        "cross-entropy": (CategoricalCrossEntropy(), (5, 4), CLASSES),
        "smoothed": (CategoricalCrossEntropy(0.1), (5, 4), CLASSES),
        "weighted": (CategoricalCrossEntropy(class_weights=WEIGHTS), (5, 4), CLASSES),
        "weighted, smoothed": (CategoricalCrossEntropy(0.1, WEIGHTS), (5, 4), CLASSES),
        "soft": (CategoricalCrossEntropy(), (5, 4), soft),
        "soft, smoothed": (CategoricalCrossEntropy(0.1), (5, 4), soft),
        "soft, weighted": (CategoricalCrossEntropy(class_weights=WEIGHTS), (5, 4), soft),
        "soft, weighted, smoothed": (CategoricalCrossEntropy(0.1, WEIGHTS), (5, 4), soft),
        "hinge": (Hinge(), (5, 4), CLASSES),
        "bce": (BinaryCrossEntropy(), (5, 4), shares),
        "bce of classes": (BinaryCrossEntropy(), (5, 4), CLASSES),
        "bce of one output": (BinaryCrossEntropy(), (5, 1), np.array([0, 1, 1, 0, 1])),
        "mse": (MeanSquaredError(), (5, 4), numbers),
        "mse of images": (MeanSquaredError(), (5, 2, 3), images),
        "mse of classes": (MeanSquaredError(), (5, 4), CLASSES),
        "mse of one output": (MeanSquaredError(), (5, 1), numbers[:, 0]),
        "mae": (MeanAbsoluteError(), (5, 4), numbers),
        "mae of classes": (MeanAbsoluteError(), (5, 4), CLASSES),
    }


def run(loss, backend, y, target, scale=1.0):
    """The loss as a number and the gradient on the host, wherever they are computed."""
    value, dy = loss(backend, backend.asarray(y), backend.asarray(target), scale)
    return float(value), to_host(dy)


@each("case", cases())
def test_a_gradient_is_the_slope_of_its_loss_times_the_scale(backend, case):
    loss, shape, target = cases()[case]
    rng = np.random.default_rng(1)
    y, direction = 2 * rng.normal(size=shape), rng.normal(size=shape)
    _, dy = run(loss, backend, y, target, 0.25)
    h = 1e-6
    ahead, _ = run(loss, backend, y + h * direction, target)
    behind, _ = run(loss, backend, y - h * direction, target)
    # central differences in float64: errors of h^2 and of 1e-16 / h; no kink is as near as h
    assert (dy * direction).sum() == pytest.approx(0.25 * (ahead - behind) / (2 * h), rel=1e-7)


@each("case", cases())
def test_shards_of_any_size_add_up(backend, case):
    loss, shape, target = cases()[case]
    y = np.random.default_rng(2).normal(size=shape)
    whole, dy = run(loss, backend, y, target, 0.2)
    parts = [run(loss, backend, y[a:b], target[a:b], 0.2) for a, b in ((0, 1), (1, 1), (1, 5))]
    assert sum(value for value, _ in parts) == pytest.approx(whole, rel=1e-12)
    np.testing.assert_allclose(np.concatenate([d for _, d in parts]), dy, rtol=1e-12)


def test_values_by_hand(backend):
    y = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]))
    target = np.array([0, 2])
    loss, dy = run(CategoricalCrossEntropy(), backend, y, target, 1.0)
    assert loss == pytest.approx(-np.log(0.5) - np.log(0.8), rel=1e-12)
    np.testing.assert_allclose(dy, [[-0.5, 0.25, 0.25], [0.1, 0.1, -0.2]], rtol=1e-12)

    scores = np.array([[1.0, 0.5, -2.0]])
    loss, dy = run(Hinge(), backend, scores, np.array([0]), 2.0)
    assert loss == 0.5
    np.testing.assert_array_equal(dy, [[-2.0, 2.0, 0.0]])

    loss, dy = run(MeanSquaredError(), backend, np.array([[1.0, 3.0]]), np.array([[0.0, 1.0]]), 1.0)
    assert loss == 2.5
    np.testing.assert_array_equal(dy, [[1.0, 2.0]])

    loss, dy = run(
        MeanAbsoluteError(), backend, np.array([[1.0, 1.0]]), np.array([[3.0, 1.0]]), 1.0
    )
    assert loss == 1.0
    np.testing.assert_array_equal(dy, [[-0.5, 0.0]])


def test_label_smoothing_mixes_the_classes_with_a_uniform_distribution(backend):
    y = np.random.default_rng(3).normal(size=(1, 4))
    smoothed, _ = run(CategoricalCrossEntropy(0.2), backend, y, np.array([1]), 1.0)
    each = [run(CategoricalCrossEntropy(), backend, y, np.array([k]), 1.0)[0] for k in range(4)]
    assert smoothed == pytest.approx(0.8 * each[1] + 0.2 * np.mean(each), rel=1e-12)


@each("weights", [None, WEIGHTS])
@each("smoothing", [0.0, 0.1])
def test_one_hot_probabilities_are_classes(backend, smoothing, weights):
    y, loss = (
        np.random.default_rng(8).normal(size=(5, 4)),
        CategoricalCrossEntropy(smoothing, weights),
    )
    hard, dy = run(loss, backend, y, CLASSES, 0.5)
    soft, gradient = run(loss, backend, y, np.eye(4)[CLASSES], 0.5)
    assert soft == pytest.approx(hard, rel=1e-12)
    np.testing.assert_allclose(gradient, dy, rtol=1e-12, atol=1e-16)


def test_the_loss_of_mixed_labels_is_the_mixture_of_the_losses(backend):
    y = np.random.default_rng(9).normal(size=(1, 4))
    each = [run(CategoricalCrossEntropy(), backend, y, np.array([k])) for k in (1, 3)]
    mixed, dy = run(CategoricalCrossEntropy(), backend, y, np.array([[0, 0.3, 0, 0.7]]))
    assert mixed == pytest.approx(0.3 * each[0][0] + 0.7 * each[1][0], rel=1e-12)
    np.testing.assert_allclose(dy, 0.3 * each[0][1] + 0.7 * each[1][1], rtol=1e-12, atol=1e-16)


def test_a_logit_of_minus_infinity_excludes_a_class_of_probability_0(backend):
    y, target = np.array([[0.0, -np.inf, 0.0]]), np.array([[0.5, 0.0, 0.5]])
    loss, dy = run(CategoricalCrossEntropy(), backend, y, target)
    assert loss == pytest.approx(np.log(2), rel=1e-12)
    np.testing.assert_allclose(dy, 0, atol=1e-16)


def test_a_class_weight_multiplies_the_losses_and_gradients_of_its_samples(backend):
    y = np.random.default_rng(5).normal(size=(5, 4))
    weighted, dy = run(CategoricalCrossEntropy(class_weights=WEIGHTS), backend, y, CLASSES, 0.5)
    each = [
        run(CategoricalCrossEntropy(), backend, y[i : i + 1], CLASSES[i : i + 1], 0.5)
        for i in range(5)
    ]
    factors = [WEIGHTS[k] for k in CLASSES]
    expected = sum(w * loss for w, (loss, _) in zip(factors, each, strict=True))
    assert weighted == pytest.approx(expected, rel=1e-12)
    scaled = [w * row for w, (_, row) in zip(factors, each, strict=True)]
    np.testing.assert_allclose(dy, np.concatenate(scaled), rtol=1e-12, atol=1e-16)


@each("smoothing", [0.0, 0.1])
def test_equal_weights_change_nothing_and_all_forms_of_weights_agree(backend, smoothing):
    y = np.random.default_rng(6).normal(size=(5, 4))
    plain, dy = run(CategoricalCrossEntropy(smoothing), backend, y, CLASSES)
    for weights in ([1, 1, 1, 1], {}, np.ones(4), {2: 1.0}):
        loss, gradient = run(CategoricalCrossEntropy(smoothing, weights), backend, y, CLASSES)
        assert loss == pytest.approx(plain, rel=1e-12)
        np.testing.assert_allclose(gradient, dy, rtol=1e-12, atol=1e-16)
    first, *others = (
        run(CategoricalCrossEntropy(smoothing, weights), backend, y, CLASSES)[0]
        for weights in ([1, 1, 3, 1], {2: 3}, {"2": 3.0}, np.array([1, 1, 3.0, 1]))
    )
    assert others == [first] * 3
    assert first > plain


def test_weights_of_one_loss_serve_models_of_several_types(backend):
    loss = CategoricalCrossEntropy(class_weights=WEIGHTS)
    y = np.random.default_rng(7).normal(size=(5, 4))
    values = [run(loss, backend, y.astype(dtype), CLASSES)[0] for dtype in ("float32", "float64")]
    assert values[0] == pytest.approx(values[1], rel=1e-6)  # float32


@each(
    ("weights", "error", "words"),
    [
        ([1, -1], ValueError, "class_weights of class 1 must be at least 0, got -1"),
        ([1, np.nan], ValueError, "class_weights of class 1 must be at least 0, got nan"),
        ({0: "a"}, TypeError, "class_weights of class 0 must be a number, got 'a'"),
        ({-1: 1.0}, ValueError, "a class of class_weights must be at least 0, got -1"),
        ({"a": 1.0}, TypeError, "a class of class_weights must be a whole number, got 'a'"),
        ([0, 0], ValueError, r"must have at least one number above 0, got \[0.0, 0.0\]"),
        ([], ValueError, "must have at least one number above 0"),
        ("balanced", TypeError, "must be a list with one number per class, or .* got 'balanced'"),
        (3, TypeError, "must be a list with one number per class"),
    ],
)
def test_class_weights_that_are_none_are_refused(weights, error, words):
    with pytest.raises(error, match=f"^CategoricalCrossEntropy: .*{words}"):
        CategoricalCrossEntropy(class_weights=weights)


@each(
    ("weights", "words"),
    [
        ([1, 2, 3], "class_weights must be 4 numbers, one for each output of the model, got 3"),
        ({4: 2.0}, "class_weights must have classes in 0..3, got 4"),
    ],
)
def test_class_weights_of_another_number_of_classes_are_refused(backend, weights, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        run(CategoricalCrossEntropy(class_weights=weights), backend, np.zeros((5, 4)), CLASSES)


def test_large_logits_do_not_overflow(backend):
    y = np.array([[1000.0, 0.0], [-1000.0, 0.0]], "float32")
    loss, dy = run(CategoricalCrossEntropy(), backend, y, np.array([0, 0]), 1.0)
    assert loss == 1000.0
    assert np.isfinite(dy).all()
    loss, dy = run(BinaryCrossEntropy(), backend, y, np.array([[1.0, 1.0], [1.0, 0.0]]), 1.0)
    assert loss == pytest.approx(500 + np.log(2), rel=1e-6)  # float32
    assert np.isfinite(dy).all()


@each("dtype", ["float32", "float64"])
def test_the_gradient_has_the_dtype_of_the_predictions_and_goes_where_it_is_told(backend, dtype):
    y = np.random.default_rng(4).normal(size=(5, 4)).astype(dtype)
    y, classes = backend.asarray(y), backend.asarray(CLASSES.astype("int32"))
    for loss in map(get_loss, LOSSES):
        out = backend.asarray(np.full(y.shape, np.nan, dtype))
        value, dy = loss(backend, y, classes, 1.0, out)
        assert dy is out
        assert isinstance(value, float) or (value.shape, value.dtype) == ((), "float64")
        assert run(loss, backend, y, CLASSES)[1].dtype == dtype
        assert np.isfinite(to_host(out)).all()


def test_a_loss_of_ones_own_is_one_method(backend):
    class Linear(Loss):
        def compute(self, backend, y, target, scale, out):
            out[...] = scale * target
            return (y * target).sum()

    loss, dy = run(Linear(), backend, np.array([[2.0]]), np.array([[3.0]]), 0.5)
    assert (loss, dy[0, 0]) == (6.0, 1.5)
    mine = Linear()
    assert get_loss(mine) is mine


def test_losses_have_short_and_long_names():
    assert get_loss("cross_entropy", label_smoothing=0.1).label_smoothing == 0.1
    assert isinstance(get_loss("mean-squared error"), MeanSquaredError)
    assert set(ALIASES.values()) <= set(LOSSES)


@each(
    ("loss", "shape", "target", "sentence"),
    [
        (
            "cross_entropy",
            (3, 4),
            np.array([0, 4, 1]),
            "CategoricalCrossEntropy: classes must be in 0..3, got 4 for sample 1",
        ),
        (
            "hinge",
            (3, 4),
            np.array([0, 1, -1]),
            "Hinge: classes must be in 0..3, got -1 for sample 2",
        ),
        ("mse", (3, 4), np.array([0, 1, 9]), "MeanSquaredError: classes must be in 0..3"),
        (
            "cross_entropy",
            (3, 4),
            np.zeros(3),
            "CategoricalCrossEntropy: the target must be integer classes of shape (3,) or "
            "probabilities (one-hot rows) of shape (3, 4), got float64 of shape (3,)",
        ),
        (
            "cross_entropy",
            (3, 4),
            np.zeros(2, "int64"),
            "CategoricalCrossEntropy: the target must be integer classes of shape (3,)",
        ),
        (
            "cross_entropy",
            (3, 2, 2, 4),
            np.zeros(3, "int64"),
            "CategoricalCrossEntropy: predictions must have shape (samples, classes), "
            "got (3, 2, 2, 4)",
        ),
        (
            "mae",
            (3, 4),
            np.zeros((3, 5)),
            "MeanAbsoluteError: the target must have the shape (3, 4) of the predictions",
        ),
        (
            "cross_entropy",
            (2, 3),
            np.array([[0.5, 0.5, 0], [0.5, 0.5, 0.5]]),
            "CategoricalCrossEntropy: probabilities must be at least 0 with a sum of 1, got a sum "
            "of 1.5 and a minimum of 0.5 for sample 1 of the batch",
        ),
        (
            "cross_entropy",
            (1, 2),
            np.array([[-0.5, 1.5]]),
            "CategoricalCrossEntropy: probabilities must be at least 0 with a sum of 1, got a sum "
            "of 1 and a minimum of -0.5 for sample 0",
        ),
        (
            "cross_entropy",
            (2, 3),
            np.full((2, 2), 0.5),
            "CategoricalCrossEntropy: probabilities must have the shape (2, 3) of the predictions, "
            "got (2, 2)",
        ),
        (
            "hinge",
            (2, 2),
            np.full((2, 2), 0.5),
            "Hinge: the target must be integer classes of shape (2,), got float64 of shape (2, 2)",
        ),
        ("mse", (3, 4), np.zeros(3), "MeanSquaredError: the target must have the shape (3, 4)"),
        (
            "binary_cross_entropy",
            (3, 2),
            np.array([[0, 1], [0.5, 1], [1, 1.5]]),
            "BinaryCrossEntropy: targets must be in [0, 1], got 1.5 for sample 2 of the batch",
        ),
        (
            "binary_cross_entropy",
            (2, 1),
            np.array([np.nan, 1]),
            "BinaryCrossEntropy: targets must be in [0, 1], got nan for sample 0 of the batch",
        ),
    ],
)
def test_targets_that_do_not_fit_are_refused_before_any_work(
    backend, loss, shape, target, sentence
):
    out = np.full(shape, 7.0)
    with pytest.raises(ValueError, match="^" + re.escape(sentence)):
        get_loss(loss)(backend, np.zeros(shape), target, 1.0, out)
    assert (out == 7).all()


def test_labels_that_start_at_1_are_told_so(backend):
    with pytest.raises(ValueError, match="got 3 for sample 2 .*; labels start at 0: subtract 1"):
        get_loss("cross_entropy").check((3, 3), np.array([1, 2, 3]))
    with pytest.raises(ValueError, match="got 3 for sample 2 .*; use one output of the model per"):
        get_loss("cross_entropy").check((3, 3), np.array([0, 2, 3]))


@each("shape", [(6,), (6, 4), (6, 2, 3)])
@each("dtype", [bool, "int64", "uint8", "float32", "float64"])
def test_one_hot_rows_of_any_type_and_masks_are_classes(backend, shape, dtype):
    rng = np.random.default_rng(1)
    y, target = rng.normal(size=(*shape, 3)), rng.integers(0, 3, shape)

    def compute(loss, y, target):
        value, dy = get_loss(loss)(backend, backend.asarray(y), backend.asarray(target), 0.5)
        return float(value), to_host(dy)

    value, expected = compute("cross_entropy", y, target)
    again, dy = compute("cross_entropy", y, np.eye(3)[target].astype(dtype))
    assert again == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(dy, expected, atol=1e-15)
    one, binary = np.ascontiguousarray(y[..., :1]), target > 0
    value, expected = compute("bce", one, binary[..., None] * 1.0)
    for labels in (binary, binary.astype("int8")):
        again, dy = compute("bce", one, labels)
        assert again == value
        np.testing.assert_array_equal(dy, expected)


@each("weights", [None, [1.0, 0.5, 2.0]])
@each("ignored", [-100, 255, 1])
def test_an_ignored_class_has_neither_loss_nor_gradient(backend, ignored, weights):
    """The loss is the sum over all other positions, whose number is counted."""
    rng = np.random.default_rng(2)
    y, target = rng.normal(size=(4, 5, 3)), 2 * rng.integers(0, 2, (4, 5))
    kept = rng.random((4, 5)) < 0.6
    kept[1] = False
    loss = CategoricalCrossEntropy(0.1, weights, ignore_index=ignored)
    given = backend.asarray(np.where(kept, target, ignored))
    value, dy = loss(backend, backend.asarray(y), given, 0.5)
    dy, put = to_host(dy), backend.asarray
    assert not dy[~kept].any()
    plain = CategoricalCrossEntropy(0.1, weights)
    total, expected = plain(backend, put(y[kept]), put(target[kept]), 0.5)
    # in float64 the two differ by the order of factors
    np.testing.assert_allclose(dy[kept], to_host(expected), rtol=1e-11, atol=1e-15)
    assert float(value) == pytest.approx(float(total), rel=1e-12)
    assert loss.count(y.shape, given) == kept.sum()
    assert loss.count(y.shape, np.eye(3, dtype=int)[target]) == 20  # one-hot rows have no index
    check_loss(loss, (5, 3), np.where(kept, target, ignored), backend=backend)
    with pytest.raises(ValueError, match=r"classes must be in 0..2, got 9"):
        loss.check(y.shape, np.where(kept, target, 9))


def test_an_ignored_class_is_an_integer():
    with pytest.raises(TypeError, match="ignore_index must be a whole number, got 1.5"):
        CategoricalCrossEntropy(ignore_index=1.5)


@each("smoothing", [-0.1, 1.0])
def test_label_smoothing_out_of_range_is_refused(smoothing):
    with pytest.raises(ValueError, match="label_smoothing must be at least 0 and below 1"):
        CategoricalCrossEntropy(smoothing)


def test_an_unknown_loss_or_option_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="unknown loss 'cros_entropy'; did you mean 'cross_entr"):
        get_loss("cros_entropy")
    with pytest.raises(ValueError, match="unknown option of mse 'label_smoothing'"):
        get_loss("mse", label_smoothing=0.1)
