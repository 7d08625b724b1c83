"""Initializers: variances, keys of the generators, names."""

import numpy as np
import pytest

from pydtnn.layers.initializers import (
    INITIALIZERS,
    Constant,
    Glorot,
    He,
    LeCun,
    Normal,
    Whitening,
    generator,
    get_initializer,
)
from tests.each import each

SHAPE, FAN_IN, FAN_OUT = (200, 100), 100, 200


@each("distribution", ["uniform", "normal"])
@each(("family", "variance"), [(Glorot, 2 / 300), (He, 2 / 100), (LeCun, 1 / 100)])
def test_random_values_have_mean_zero_and_the_papers_variance(family, variance, distribution):
    w = family(distribution)(SHAPE, FAN_IN, FAN_OUT, generator(0, "w"))
    assert w.shape == SHAPE
    assert w.dtype == np.float64
    # 20,000 values: the mean is within 4 sigma / 141, the variance within a few times 1 %
    assert abs(w.mean()) < 0.03 * variance**0.5
    assert w.var() == pytest.approx(variance, rel=0.05)


def test_values_of_embeddings_do_not_depend_on_the_fans():
    w = get_initializer("embedding")(SHAPE, FAN_IN, FAN_OUT, generator(0, "w"))
    np.testing.assert_array_equal(w, Normal(0.02)(SHAPE, 1, 1, generator(0, "w")))
    assert w.std() == pytest.approx(0.02, rel=0.02)  # 20,000 values: within 0.5 %


def test_filters_that_whiten_give_uncorrelated_responses_to_their_model_and_those_of_other_sign():
    w = Whitening(near=0.9, channels=0.8)((16, 2, 2, 2), 8, 16, generator(0, "w")).reshape(16, 8)
    chain = np.array([[1, 0.9], [0.9, 1]])
    covariance = np.kron(np.kron(chain, chain), [[1, 0.8], [0.8, 1]])  # rows, columns, channels
    np.testing.assert_allclose(w[:8] @ covariance @ w[:8].T, np.eye(8), atol=1e-12)
    np.testing.assert_array_equal(w[8:], -w[:8])
    assert abs(w[0]).min() > 0.2 * abs(w[0]).max()  # the mean comes first


def test_a_generator_depends_on_seed_and_name_alone():
    first = generator(7, "conv.w").uniform(size=5)
    generator(7, "another").uniform(size=100)
    np.testing.assert_array_equal(first, generator(7, "conv.w").uniform(size=5))
    assert (first != generator(8, "conv.w").uniform(size=5)).all()
    assert (first != generator(7, "conv.b").uniform(size=5)).all()
    assert generator(-1, "w").uniform() != generator(1, "w").uniform()


def mine(shape, fan_in, fan_out, rng):
    return np.full(shape, 7.0)


@each(
    ("name", "value"),
    [*((name, None) for name in INITIALIZERS), ("zeros", 0), ("ones", 1), (mine, 7)],
)
def test_every_name_and_any_function_gives_float64_of_the_shape(name, value):
    options = {"value": 0.25} if name == "constant" else {}
    initializer = get_initializer(name, **options)
    for fans in ((2, 3), (0, 0)):  # fans of zero count as one
        w = initializer((3, 2), *fans, generator(0, "w"))
        assert (w.shape, w.dtype) == ((3, 2), np.float64)
        assert np.isfinite(w).all()
        assert (w == options.get("value", value)).all() or (value is None and not options)
    assert get_initializer("he_normal") == He("normal") != He("uniform")


@each(
    ("call", "words"),
    [
        (lambda: get_initializer("he_norml"), "unknown initializer .* did you mean 'he_normal'"),
        (lambda: get_initializer("constant"), "constant: missing a required argument: 'value'"),
        (lambda: get_initializer("zeros", gain=2), "unknown option of zeros 'gain'"),
        (lambda: He("gaussian"), "He: distribution must be 'uniform' or 'normal', got 'gaussian'"),
        (lambda: Normal(-1), "Normal: deviation must be at least 0, got -1"),
        (lambda: Whitening(near=1.0), "Whitening: near must be .* below 1, got 1"),
        (lambda: Constant(float("nan")), "Constant: value must be a finite number, got nan"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(call, words):
    with pytest.raises(ValueError, match=words):
        call()
