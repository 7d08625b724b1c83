"""The fully connected layer."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.kernels import Backend
from pydtnn.layers import Linear
from pydtnn.model import Model
from pydtnn.testing import check_layer
from tests.each import each


@each("shape", [(1,), (5,), (2, 3), (2, 1, 3)])
@each("bias", [True, False])
def test_linear_keeps_the_contract(shape: tuple[int, ...], bias: bool, backend: Backend) -> None:
    check_layer(Linear(4, bias=bias), shape, backend=backend)


def test_linear_computes_x_w_transposed_plus_b(backend: Backend) -> None:
    rng = np.random.default_rng(0)
    model = Model(Linear(2, bias_initializer="ones"), (3,), backend=backend, dtype="float64")
    x = rng.normal(size=(4, 3))
    expected = x @ model.state()["linear.w"].T + 1
    np.testing.assert_allclose(model.predict(x), expected, rtol=1e-13)


def test_weight_decay_leaves_out_the_bias() -> None:
    parameters = Model(Linear(2), (3,), backend="numpy").parameters
    assert [p.decay for p in parameters.values()] == [True, False]


def test_features_must_be_a_positive_whole_number() -> None:
    with pytest.raises(ValueError, match="Linear: features must be at least 1, got 0"):
        Linear(0)
    with pytest.raises(TypeError, match=r"Linear: features must be a whole number, got 2\.5"):
        Linear(2.5)  # type: ignore[arg-type]


def test_an_unknown_initializer_is_told_with_the_nearest_names_and_the_layer() -> None:
    with pytest.raises(ValueError, match=r"linear: unknown initializer 'he_norml'.*'he_normal'"):
        Model(Linear(3, initializer="he_norml"), (2,), backend="numpy")
