import numpy as np
import pytest

from pydtnn.data.mixing import beta_quantiles
from tests.each import each


@each(
    ("alpha", "below"),
    [
        (0.5, lambda x: 2 / np.pi * np.arcsin(np.sqrt(x))),
        (1.0, lambda x: x),
        (2.0, lambda x: 3 * x**2 - 2 * x**3),
        (3.0, lambda x: 10 * x**3 - 15 * x**4 + 6 * x**5),
    ],
)
def test_quantiles_are_those_of_the_distribution(alpha, below):
    probabilities, quantiles = beta_quantiles(alpha)
    # The trapezoidal rule with steps of about 0.01 of z.
    np.testing.assert_allclose(probabilities, below(quantiles), atol=2e-5)


@each("alpha", [0.01, 0.1, 0.2, 0.4, 1.0, 8.0, 100.0, 1e4])
def test_moments_are_those_of_the_distribution(alpha):
    probabilities, quantiles = beta_quantiles(alpha)
    assert (probabilities[0], probabilities[-1]) == (0, 1)
    assert (np.diff(probabilities) >= 0).all()
    assert (np.diff(quantiles) >= 0).all()
    x = np.interp((np.arange(100_000) + 0.5) / 100_000, probabilities, quantiles)
    assert x.mean() == pytest.approx(0.5, abs=1e-4)
    assert x.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=2e-3)
