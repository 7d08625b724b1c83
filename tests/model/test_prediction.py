"""Predicting from raw and from normalised samples."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from pydtnn.data import ArrayDataset, load_dataset
from pydtnn.data.inputs import inputs_of
from pydtnn.layers import Block, Flatten, Linear, Sequential
from pydtnn.model import Model
from pydtnn.optimizers import SGD
from pydtnn.saving import load, save_model
from pydtnn.training.trainer import Trainer
from tests.each import each


@each("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_pixels_are_normalised_with_the_bytes_of_the_data_set(dtype):
    train, test = load_dataset("synthetic", samples=64, test_samples=20, shape=(8, 8, 3))
    net = Sequential(Flatten(), Linear(10))
    model = Model(net, (8, 8, 3), dtype=dtype, backend="numpy")
    model.inputs = inputs_of(train)
    x, _ = test.read(np.arange(20))
    expected = model.predict(test.normalize(x, model.dtype))
    np.testing.assert_array_equal(model.predict(x), expected)
    np.testing.assert_array_equal(model.predict(x.tolist(), check_range=False).shape, (20, 10))
    with pytest.raises(ValueError, match="got values from .*; pass pixels as uint8"):
        model.predict(x.astype(np.float32))


@each(
    ("x", "words"),
    [
        (np.zeros((1, 2), np.uint8), r"got uint8; .*Trainer\.fit .* pydtnn\.load"),
        (np.array([["1", "2"]]), "expected an array of numbers, got "),
        (np.array([[None, 1.0]]), "expected an array of numbers, got "),
    ],
)
def test_what_are_no_numbers_or_pixels_without_statistics_is_refused(x, words):
    with pytest.raises((TypeError, ValueError), match=rf"^Model\.predict: .*{words}"):
        Model(Linear(1), (2,), backend="numpy").predict(x)


class Outputs(Block):
    def wire(self, graph: Any, *inputs: Any) -> Any:
        return graph.add(Linear(3, name="a"), *inputs), graph.add(Linear(1, name="b"), *inputs)


def test_classes_are_numbers_or_names():
    model = Model(Linear(3, bias=False), (3,), backend="numpy")
    model.parameters["linear.w"].master[...] = np.eye(3)
    x = np.array([[0.1, 0.9, 0.2], [3.0, 1.0, 2.0]])
    assert model.predict_classes(x).tolist() == [1, 0]
    with pytest.raises(ValueError, match="the names of the classes are not known; train on a data"):
        model.predict_classes(x, labels=True)
    model.inputs = inputs_of(ArrayDataset(x, [1, 0], class_names=["cat", "dog", "hen"]))
    assert model.predict_classes(x, labels=True).tolist() == ["dog", "cat"]
    model.inputs = inputs_of(ArrayDataset(x, [1, 0], class_names=["cat", "dog"]))
    with pytest.raises(ValueError, match="a name for each of the 3 classes of .*, got 2; omit"):
        model.predict_classes(x, labels=True)


def test_a_single_output_is_a_class_of_two_and_several_outputs_are_a_tuple():
    model = Model(Outputs(), (2,), backend="numpy")
    x = np.random.default_rng(0).normal(size=(6, 2))
    kinds, sizes = model.predict_classes(x)
    np.testing.assert_array_equal(kinds, model.predict(x)[0].argmax(axis=1))
    np.testing.assert_array_equal(sizes, model.predict(x)[1][:, 0] > 0)
    targets = (np.arange(6) % 3, np.zeros((6, 1)))
    model.inputs = inputs_of(ArrayDataset(x, targets, class_names=(["x", "y", "z"], None)))
    names, numbers = model.predict_classes(x, labels=True)
    assert names.tolist() == ["xyz"[k] for k in kinds]
    np.testing.assert_array_equal(numbers, sizes)


def trained(loss: Any, data: ArrayDataset, outputs: int) -> Model:
    model = Model(Linear(outputs), data.input_shape, backend="numpy")
    Trainer(model, SGD(0.1), loss=loss, progress=False).fit(data, batch_size=4)
    return model


RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 3))
NAMES = ["red", "round", "small"]

REGRESSIONS = {
    "one number": ("mse", ArrayDataset(X, RNG.normal(size=(24, 1))), 1),
    "several numbers": ("mae", ArrayDataset(X, RNG.normal(size=(24, 4))), 4),
    "whole numbers": ("mse", ArrayDataset(X, np.arange(24)), 1),
}


@each(("loss", "data", "outputs"), REGRESSIONS.values())
def test_a_model_of_numbers_predicts_no_classes(loss, data, outputs, tmp_path):
    model = trained(loss, data, outputs)
    save_model(model, tmp_path / "model")
    for known in (model, load(tmp_path / "model"), copy.deepcopy(model)):
        with pytest.raises(ValueError, match="one that was trained to predict numbers; use"):
            known.predict_classes(X)
        assert known.predict(X).shape == (24, outputs)


@each("dtype", ["float32", "int64"])
def test_independent_labels_are_predicted_each(dtype, tmp_path):
    data = ArrayDataset(X, (RNG.random((24, 3)) < 0.5).astype(dtype))
    data.class_names = tuple(NAMES)
    model = trained("bce", data, 3)
    save_model(model, tmp_path / "model")
    for known in (model, load(tmp_path / "model")):
        found = known.predict_classes(X)
        np.testing.assert_array_equal(found, model.predict(X) > 0)
        names = known.predict_classes(X, labels=True)
        assert names == [tuple(n for n, k in zip(NAMES, row, strict=True) if k) for row in found]
