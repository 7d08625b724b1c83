"""Initializers: variances, keys of the generators, names."""

from __future__ import annotations

import re

import numpy as np
import pytest

from pydtnn.layers.initializers import (
    INITIALIZERS,
    Constant,
    Glorot,
    He,
    LeCun,
    Normal,
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


def test_uniform_values_stay_below_the_limit_and_normal_ones_are_not_truncated():
    limit = (3 * 2 / 100) ** 0.5
    uniform = He("uniform")(SHAPE, FAN_IN, FAN_OUT, generator(0, "w"))
    normal = He("normal")(SHAPE, FAN_IN, FAN_OUT, generator(0, "w"))
    assert 0.99 * limit < abs(uniform).max() <= limit
    assert abs(normal).max() > 3 * (2 / 100) ** 0.5


@each("name", INITIALIZERS)
def test_every_name_gives_float64_of_the_shape(name):
    options = {"value": 0.5} if name == "constant" else {}
    w = get_initializer(name, **options)((3, 2), 2, 3, generator(0, "w"))
    assert w.shape == (3, 2)
    assert w.dtype == np.float64


@each(("name", "value"), [("zeros", 0), ("ones", 1)])
def test_constants_are_the_same_everywhere(name, value):
    assert (get_initializer(name)((4,), 0, 0, generator(0, "b")) == value).all()
    assert (Constant(0.25)((4,), 0, 0, generator(0, "b")) == 0.25).all()


def test_values_of_embeddings_do_not_depend_on_the_fans():
    w = get_initializer("embedding")(SHAPE, FAN_IN, FAN_OUT, generator(0, "w"))
    np.testing.assert_array_equal(w, Normal(0.02)(SHAPE, 1, 1, generator(0, "w")))
    assert w.std() == pytest.approx(0.02, rel=0.02)  # 20,000 values: within 0.5 %


def test_fans_of_zero_count_as_one():
    assert np.isfinite(Glorot()((3,), 0, 0, generator(0, "w"))).all()


def test_a_generator_depends_on_seed_and_name_alone():
    first = generator(7, "conv.w").uniform(size=5)
    generator(7, "another").uniform(size=100)
    np.testing.assert_array_equal(first, generator(7, "conv.w").uniform(size=5))
    assert (first != generator(8, "conv.w").uniform(size=5)).all()
    assert (first != generator(7, "conv.b").uniform(size=5)).all()
    assert generator(-1, "w").uniform() != generator(1, "w").uniform()


def test_equal_initializers_compare_equal():
    assert get_initializer("he_normal") == He("normal") != He("uniform")


def test_a_function_of_ones_own_is_an_initializer():
    def mine(shape, fan_in, fan_out, rng):
        return np.full(shape, fan_in)

    assert get_initializer(mine) is mine


@each(
    ("call", "sentence"),
    [
        (
            lambda: get_initializer("he_norml"),
            "unknown initializer 'he_norml'; did you mean 'he_normal'",
        ),
        (
            lambda: get_initializer("constant"),
            "initializer constant: missing a required argument: 'value'",
        ),
        (lambda: get_initializer("zeros", gain=2), "unknown option of zeros 'gain'"),
        (
            lambda: He("gaussian"),
            "He: distribution must be 'uniform' or 'normal', got 'gaussian'",
        ),
        (lambda: Normal(-1), "Normal: deviation must be at least 0, got -1"),
        (
            lambda: Constant(float("nan")),
            "Constant: value must be a finite number, got nan",
        ),
    ],
)
def test_mistakes_are_refused_in_a_sentence(call, sentence):
    with pytest.raises(ValueError, match="^" + re.escape(sentence)):
        call()
