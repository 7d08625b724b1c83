"""Layers of several inputs."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.kernels import Backend
from pydtnn.layers import Add, Concat, Linear, Multiply, Sequential
from pydtnn.model import Model
from pydtnn.testing import check_layer
from tests.each import each


@each("inputs", [2, 3, 4])
def test_add_keeps_the_contract(inputs: int, backend: Backend) -> None:
    check_layer(Add(), *[(3, 2)] * inputs, backend=backend)


@each("second", [(3, 2, 4), (1, 1, 4), (3, 1, 1)])
def test_multiply_keeps_the_contract(second: tuple[int, ...], backend: Backend) -> None:
    check_layer(Multiply(), (3, 2, 4), second, backend=backend)


@each(
    ("axis", "shapes"),
    [
        (-1, [(2, 3, 1), (2, 3, 4)]),
        (0, [(2, 3), (1, 3), (3, 3)]),
        (1, [(2, 3, 2), (2, 1, 2)]),
        (-2, [(2, 3, 2), (2, 1, 2)]),
        (-1, [(4,)]),
    ],
)
def test_concat_keeps_the_contract(
    axis: int, shapes: list[tuple[int, ...]], backend: Backend
) -> None:
    check_layer(Concat(axis), *shapes, backend=backend)


def test_they_compute_what_numpy_does() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 5, 3, 2))
    model = Model(Add(), [(3, 2), (3, 2)], backend="numpy", dtype="float64")
    np.testing.assert_array_equal(model.predict((a, b)), a + b)
    model = Model(Multiply(), [(3, 2), (1, 2)], backend="numpy", dtype="float64")
    np.testing.assert_array_equal(model.predict((a, b[:, :1])), a * b[:, :1])
    model = Model(Concat(0), [(3, 2), (3, 2)], backend="numpy", dtype="float64")
    np.testing.assert_array_equal(model.predict((a, b)), np.concatenate([a, b], axis=1))


def test_shapes_that_do_not_meet_are_told() -> None:
    with pytest.raises(ValueError, match=r"Add: inputs must be .* got \(3,\) and \(4,\); add a"):
        Model(Add(), [(3,), (4,)], backend="numpy")
    with pytest.raises(ValueError, match=r"equal shapes except along axis 1, got \(2, 3\) and \(3"):
        Model(Concat(), [(2, 3), (3, 3)], backend="numpy")
    with pytest.raises(ValueError, match="Concat: axis must exist in an input of shape"):
        Model(Concat(2), [(2, 3), (3, 3)], backend="numpy")
    with pytest.raises(
        ValueError, match=r"second input must have the sizes of the first \(3,\), o"
    ):
        Model(Multiply(), [(3,), (4,)], backend="numpy")
    with pytest.raises(ValueError, match="Multiply: inputs must be two with equally many axes"):
        Model(Multiply(), [(3,), (3, 1)], backend="numpy")
    with pytest.raises(ValueError, match="Add: inputs must be two or more"):
        Model(Add(), (3,), backend="numpy")


def test_a_layer_of_one_input_refuses_two() -> None:
    with pytest.raises(ValueError, match="Linear: expected one input, got 2; merge them first"):
        Model(Sequential(Linear(3)), [(3,), (4,)], backend="numpy")
