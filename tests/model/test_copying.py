"""Copies of models, by `copy.deepcopy` and `pickle`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn.layers import GRU, Dropout, Flatten, Linear, Residual, Sequential
from pydtnn.model import Model
from pydtnn.parallel.mesh import Mesh
from pydtnn.saving.models import inputs_to_json
from tests.each import each
from tests.small_training import checksums, small_fit, small_model, small_trainer

COPY: dict[str, Callable[[Model], Model]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


def described(model: Model) -> Any:
    return inputs_to_json(model.description.inputs, model.inputs)


def trained(model: Model, epochs: int = 1) -> dict[str, str]:
    small_fit(small_trainer(model=model), epochs)
    return checksums(model.state())


@each("make", COPY.values())
def test_a_copy_trains_as_the_model_and_changes_nothing_of_it(make):
    model = small_model()
    trained(model)
    model.freeze("conv2d0")
    before, x = checksums(model.state()), np.ones((2, 5, 5, 2))
    other = make(model)
    assert checksums(other.state()) == before
    assert other.frozen == model.frozen
    assert (other.backend is model.backend) == (make is copy.deepcopy)
    assert described(other) == described(model)
    np.testing.assert_array_equal(other.predict(x), model.predict(x))
    after = trained(other)
    assert checksums(model.state()) == before
    assert trained(model) == after != before


@each("make", COPY.values())
def test_layers_in_others_twice_and_changed_later_are_copied(make):
    shared = Linear(6)
    net = Sequential(GRU(3, bidirectional=True), shared, Residual(shared, Dropout(0.1)), Flatten())
    model = Model(net, (4, 5), backend="numpy", dtype="float64", seed=3)
    dropout = next(layer for layer in model.layers if isinstance(layer, Dropout))
    dropout.rate = 0.5
    other = make(model)
    assert [str(layer.name) for layer in other.layers] == [str(la.name) for la in model.layers]
    assert list(other.parameters) == list(model.parameters)
    assert next(la for la in other.layers if isinstance(la, Dropout)).rate == 0.5
    x = np.random.default_rng(0).random((2, 4, 5))
    np.testing.assert_array_equal(other.predict(x), model.predict(x))


@pytest.mark.threads(2)
def test_a_model_of_which_ranks_have_parts_is_not_copied(comm):
    model = Model(Sequential(Flatten(), Linear(4)), (5,), mesh=Mesh(comm, filter=2))
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"^Model: expected a model that each rank has as a"):
            make(model)


class Tensor:
    """As a tensor of PyTorch: it has a type that NumPy does not know, and is converted by name."""

    dtype = object()

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.values


def test_tensors_of_other_libraries_are_predicted():
    model, x = small_model(), np.random.default_rng(0).random((3, 5, 5, 2))
    np.testing.assert_array_equal(model.predict(Tensor(x)), model.predict(x))
    np.testing.assert_array_equal(model.predict(x.tolist()), model.predict(x))
    assert model.predict_classes(Tensor(x)).shape == (3,)
