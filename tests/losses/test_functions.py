"""Losses: values by hand, gradients by finite differences, targets, bad input."""

import numpy as np
import pytest

from pydtnn.losses import (
    ALIASES,
    LOSSES,
    BinaryCrossEntropy,
    CategoricalCrossEntropy,
    Hinge,
    KLDivergence,
    MeanAbsoluteError,
    MeanSquaredError,
    get_loss,
)
from pydtnn.tools.testing import check_loss
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
        "divergence": (KLDivergence(), (5, 4), soft),
        "divergence of classes": (KLDivergence(2.0), (5, 4), CLASSES),
        "divergence of logits": (KLDivergence(3.0, from_logits=True), (5, 4), numbers),
        "divergence of sequences": (KLDivergence(0.5), (5, 2, 4), np.stack([soft, soft[::-1]], 1)),
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
def test_a_gradient_is_the_slope_of_its_loss_and_shards_add_up(backend, case):
    loss, shape, target = cases()[case]
    rng = np.random.default_rng(1)
    y, direction = 2 * rng.normal(size=shape), rng.normal(size=shape)
    whole, dy = run(loss, backend, y, target, 0.25)
    h = 1e-6
    ahead, _ = run(loss, backend, y + h * direction, target)
    behind, _ = run(loss, backend, y - h * direction, target)
    # central differences in float64: errors of h^2 and of 1e-16 / h; no kink is as near as h
    assert (dy * direction).sum() == pytest.approx(0.25 * (ahead - behind) / (2 * h), rel=1e-7)
    parts = [run(loss, backend, y[a:b], target[a:b], 0.25) for a, b in ((0, 1), (1, 1), (1, 5))]
    assert sum(value for value, _ in parts) == pytest.approx(whole, rel=1e-12)
    np.testing.assert_allclose(np.concatenate([d for _, d in parts]), dy, rtol=1e-12)


def test_values_by_hand(backend):
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


@each("weights", [None, WEIGHTS])
@each("smoothing", [0.0, 0.1])
@each("soft", [False, True])
def test_cross_entropy_is_that_of_smoothed_and_weighted_probabilities(
    backend, soft, smoothing, weights
):
    rng = np.random.default_rng(8)
    y, p = rng.normal(size=(5, 4)), np.eye(4)[CLASSES]
    p = rng.dirichlet(np.ones(4), size=5) if soft else p
    factors = (1 if weights is None else np.array(weights)) * ((1 - smoothing) * p + smoothing / 4)
    logs = y - np.log(np.exp(y).sum(axis=1, keepdims=True))
    loss = CategoricalCrossEntropy(smoothing, weights)
    for target in (p,) if soft else (p, CLASSES):
        value, dy = run(loss, backend, y, target, 0.5)
        assert value == pytest.approx(-(factors * logs).sum(), rel=1e-12)
        expected = 0.5 * (factors.sum(axis=1, keepdims=True) * np.exp(logs) - factors)
        np.testing.assert_allclose(dy, expected, rtol=1e-11, atol=1e-16)  # differences


def test_all_forms_of_class_weights_agree_and_serve_models_of_several_types(backend):
    y = np.random.default_rng(6).normal(size=(5, 4))
    forms = ([1, 1, 3, 1], {2: 3}, {"2": 3.0}, np.array([1, 1, 3.0, 1]))
    losses = [CategoricalCrossEntropy(class_weights=weights) for weights in forms]
    first, *others = (run(loss, backend, y, CLASSES)[0] for loss in losses)
    assert others == [first] * 3
    single, dy = run(losses[0], backend, y.astype("float32"), CLASSES)
    assert single == pytest.approx(first, rel=1e-6)  # float32
    assert dy.dtype == "float32"
    plain, _ = run(CategoricalCrossEntropy(), backend, y, CLASSES)
    same, _ = run(CategoricalCrossEntropy(class_weights={}), backend, y, CLASSES)
    assert same == pytest.approx(plain, rel=1e-12)
    assert plain < first


@each(
    ("weights", "words"),
    [
        ([1, -1], "class_weights of class 1 must be at least 0, got -1"),
        ([1, np.nan], "class_weights of class 1 must be at least 0, got nan"),
        ({0: "a"}, "class_weights of class 0 must be a number, got 'a'"),
        ({-1: 1.0}, "a class of class_weights must be at least 0, got -1"),
        ([0, 0], "must have at least one number above 0"),
        ("balanced", "must be a list with one number per class"),
        (3, "must be a list with one number per class"),
        ([1, 2, 3], "class_weights must be 4 numbers, one for each output of the model, got 3"),
        ({4: 2.0}, r"class_weights must have classes in 0..3, got 4"),
    ],
)
def test_class_weights_that_do_not_fit_are_refused(backend, weights, words):
    with pytest.raises((TypeError, ValueError), match=f"^CategoricalCrossEntropy: .*{words}"):
        run(CategoricalCrossEntropy(class_weights=weights), backend, np.zeros((5, 4)), CLASSES)


def test_a_logit_of_minus_infinity_excludes_a_class_of_probability_0(backend):
    y, target = np.array([[0.0, -np.inf, 0.0]]), np.array([[0.5, 0.0, 0.5]])
    loss, dy = run(CategoricalCrossEntropy(), backend, y, target)
    assert loss == pytest.approx(np.log(2), rel=1e-12)
    np.testing.assert_allclose(dy, 0, atol=1e-16)


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


@each("logits", [False, True])
def test_a_divergence_is_the_mean_over_the_positions_whose_targets_are_known(backend, logits):
    rng, t = np.random.default_rng(3), 1.0 if logits else 2.0
    y, q, kept = rng.normal(size=(4, 5, 3)), rng.dirichlet(np.ones(3), (4, 5)), rng.random((4, 5))
    p, kept = np.exp(y / t) / np.exp(y / t).sum(axis=-1, keepdims=True), kept[..., None] < 0.6
    terms, target = t**2 * q * np.log(q / p), np.log(q) if logits else q
    known = np.where(kept, target, np.nan)
    loss = KLDivergence(t, logits, ignore_nan=True)
    value, dy = run(loss, backend, y, known, 0.5)
    assert value == pytest.approx((terms * kept).sum(), rel=1e-12)
    np.testing.assert_allclose(dy, 0.5 * t * (p - q) * kept, rtol=1e-11, atol=1e-15)
    assert loss.count(y.shape, known) == kept.sum()
    value, _ = run(KLDivergence(t, logits), backend, y, target)
    assert value == pytest.approx(terms.sum() / 5, rel=1e-12)


HALVES = np.full((2, 2), 0.5)


@each(
    ("loss", "shape", "target", "words"),
    [
        ("cross_entropy", (3, 4), np.array([0, 4, 1]), "classes .* 0..3, got 4 for sample 1"),
        ("hinge", (3, 4), np.array([0, 1, -1]), "Hinge: classes .* got -1 for sample 2"),
        ("mse", (3, 4), np.array([0, 1, 9]), "MeanSquaredError: classes must be in 0..3"),
        ("cross_entropy", (3, 4), np.zeros(3), r"must be integer classes .* or prob.*got float64"),
        ("cross_entropy", (3, 4), np.zeros(2, "int64"), r"must be integer classes of shape \(3,\)"),
        ("cross_entropy", (3, 2, 2, 4), np.zeros(3, "int64"), r"shape \(samples, classes\), got"),
        ("mae", (3, 4), np.zeros((3, 5)), r"the target must have the shape \(3, 4\)"),
        ("cross_entropy", (2, 2), 1.5 * HALVES, "sum of 1.5 and a minimum of 0.75 for sample 0"),
        ("cross_entropy", (1, 2), np.array([[-0.5, 1.5]]), "sum of 1 and a minimum of -0.5"),
        ("cross_entropy", (2, 3), HALVES, r"must have the shape \(2, 3\) .*, got \(2, 2\)"),
        ("kl", (2, 2), 1.5 * HALVES, "KLDivergence: probabilities .* sum of 1.5"),
        ("kl", (1, 2), np.full((1, 2), np.nan), "KLDivergence: probabilities .* sum of nan"),
        ("hinge", (2, 2), HALVES, r"Hinge: the target must be integer classes of shape \(2,\)"),
        ("bce", (2, 2), np.array([[0, 1], [1, 1.5]]), r"must be in \[0, 1\], got 1.5 for sample 1"),
        ("bce", (2, 1), np.array([np.nan, 1]), "got nan for sample 0 of the batch"),
        ("cross_entropy", (3, 3), np.array([1, 2, 3]), "labels start at 0: subtract 1"),
        ("cross_entropy", (3, 3), np.array([0, 2, 3]), "batch; use one output of the"),
    ],
)
def test_targets_that_do_not_fit_are_refused_before_any_work(backend, loss, shape, target, words):
    out = np.full(shape, 7.0)
    with pytest.raises(ValueError, match=words):
        get_loss(loss)(backend, np.zeros(shape), target, 1.0, out)
    assert (out == 7).all()


@each("shape", [(6,), (6, 2, 3)])
@each("dtype", [bool, "uint8", "float32"])
def test_one_hot_rows_of_any_type_and_masks_are_classes(backend, shape, dtype):
    rng = np.random.default_rng(1)
    y, target = rng.normal(size=(*shape, 3)), rng.integers(0, 3, shape)
    value, expected = run(CategoricalCrossEntropy(), backend, y, target)
    again, dy = run(CategoricalCrossEntropy(), backend, y, np.eye(3)[target].astype(dtype))
    assert again == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(dy, expected, atol=1e-15)
    one, binary = np.ascontiguousarray(y[..., :1]), target > 0
    value, expected = run(BinaryCrossEntropy(), backend, one, binary[..., None] * 1.0)
    again, dy = run(BinaryCrossEntropy(), backend, one, binary.astype(dtype))
    assert again == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(dy, expected, rtol=1e-12)


@each(
    ("make", "words"),
    [
        (lambda: CategoricalCrossEntropy(ignore_index=1.5), "ignore_index must be a whole number"),
        (lambda: CategoricalCrossEntropy(1.0), "label_smoothing must be at least 0 and below 1"),
        (lambda: KLDivergence(0), "KLDivergence: temperature must be above 0, got 0"),
        (lambda: get_loss("cros_entropy"), "unknown loss .*; did you mean 'cross_entr"),
        (lambda: get_loss("mse", label_smoothing=0.1), "unknown option of mse 'label_smoothing'"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(make, words):
    with pytest.raises((TypeError, ValueError), match=words):
        make()


def test_losses_have_short_and_long_names():
    assert get_loss("cross_entropy", label_smoothing=0.1).label_smoothing == 0.1
    assert isinstance(get_loss("mean-squared error"), MeanSquaredError)
    assert set(ALIASES.values()) <= set(LOSSES)


def test_the_plain_cross_entropy_alone_takes_parts_of_the_outputs():
    assert CategoricalCrossEntropy().takes_parts
    for options in ({"label_smoothing": 0.1}, {"class_weights": WEIGHTS}, {"ignore_index": 1}):
        assert not CategoricalCrossEntropy(**options).takes_parts
