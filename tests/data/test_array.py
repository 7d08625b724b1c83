from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn import SGD, Linear, Model, Trainer
from pydtnn.data import ArrayDataset, Dataset, TokenDataset
from pydtnn.data.dataset import read_samples
from tests.each import each


def test_samples_and_labels_come_back_by_index(rng):
    x = rng.normal(size=(6, 3))
    data = ArrayDataset(x, [2, 0, 1, 1, 0, 0])
    before = x.copy()
    got, labels = data.read(np.array([0, 3]))
    np.testing.assert_array_equal(got, x[[0, 3]])
    assert labels.dtype == np.int64
    assert labels.tolist() == [2, 1]
    assert (len(data), data.input_shape, data.classes) == (6, (3,), 3)
    got[:] = 0
    np.testing.assert_array_equal(data.x, before)  # what is read is a copy
    assert ArrayDataset(x[:2], [0, 1], like=data).classes == 3
    numbers = ArrayDataset(x, rng.normal(size=(6, 2)))
    assert numbers.classes is None
    assert numbers.read(np.array([1]))[1].shape == (1, 2)


def test_channels_first_are_read_channels_last(rng):
    x = rng.integers(0, 256, (4, 3, 6, 5)).astype(np.uint8)
    data = ArrayDataset(x, np.zeros(4, int), channels_first=True)
    assert data.input_shape == (6, 5, 3)
    got, _ = data.read(np.array([2, 1]))
    assert got.flags.c_contiguous
    np.testing.assert_array_equal(got, x[[2, 1]].transpose(0, 2, 3, 1))


FOUR = np.zeros((4, 8, 8, 3), np.uint8)


@each("shape", [(4,), (4, 8, 8)])
@each("dtype", [bool, np.uint8])
def test_labels_may_be_booleans_and_masks(shape, dtype):
    labels = np.arange(np.prod(shape)).reshape(shape) % 2
    data = ArrayDataset(FOUR, labels.astype(dtype))
    assert data.classes == 2
    assert data.y.dtype == np.int64
    np.testing.assert_array_equal(data.y, labels)
    ignoring = ArrayDataset(FOUR, np.where(labels, 1, 255), ignore_index=255)
    assert ignoring.classes == 2
    assert ignoring.y.max() == 255


def test_names_of_classes_give_their_number_and_are_those_of_the_training_set():
    x, y = np.zeros((4, 3), np.uint8), [0, 1, 0, 1]
    train = ArrayDataset(x, y, class_names=["cat", "dog", "hen"])
    assert (train.classes, train.class_names) == (3, ("cat", "dog", "hen"))
    assert ArrayDataset(x, y, like=train).class_names == train.class_names
    assert train.subset([1]).class_names == train.class_names
    assert ArrayDataset(x, y, like=train, classes=4).class_names is None
    two = ArrayDataset(x, (y, np.zeros(4)), class_names=(["cat", "dog"], None))
    assert (two.classes, two.class_names) == ((2, None), (("cat", "dog"), None))
    assert repr(train) == "ArrayDataset(array, 4 samples of (3,), classes 3)"


class Returning(Dataset):
    """Samples as a user's `read` returns them."""

    name, input_shape, classes, pixels = "own", (2,), None, False

    def __init__(self, x: Any, y: Any) -> None:
        self.both = x, y

    def __len__(self) -> int:
        return len(self.both[0])

    def read(self, indices: Any) -> Any:
        return self.both


TWO, RAGGED = np.zeros((2, 3)), [np.zeros(3), np.zeros(4)]
OTHER = ArrayDataset(FOUR[:, :4], [0] * 4)


@each(
    ("x", "y", "options", "reason"),
    [
        (FOUR, [0, 1, 2], {}, "one target for each of the 4 samples, got shape"),
        (FOUR, [0, 1, 2, -1], {}, "must be in 0..2, got -1; .* convert numbers"),
        (TWO, [-1, 1], {}, "in 0..1, got -1; subtract the smallest"),
        (FOUR, [0, 1, 2, 3], {"classes": 3}, "labels must be in 0..2, got 3"),
        (FOUR, [1, 2, 3, 4], {"classes": 4}, "in 0..3, got 4; subtract the smallest"),
        (FOUR, [0, 1, 2, 255], {"classes": 3}, "got 255; .* set ignore_index to one"),
        (FOUR, [0, 1, 2, 3], {"classes": 3, "ignore_index": 255}, "in 0..2, got 3"),
        (FOUR[:, 0, 0, 0], [0] * 4, {}, "must have at least two axes"),
        (FOUR[:, 0, 0], [0] * 4, {"channels_first": True}, "channels_first requires"),
        (FOUR, [0] * 4, {"like": OTHER}, r"of shape \(4, 8, 3\), as in array, got"),
        (FOUR.astype(int), [0] * 4, {}, r"uint8 pixels or floats, got int64; convert it with"),
        (FOUR, ["a"] * 4, {}, "integer labels, booleans or float targets"),
        (FOUR, [0.5] * 4, {"classes": 2}, "2 classes require integer labels"),
        (TWO, [0, 1], {"classes": 2, "class_names": ["cat"]}, "one name for each class, got 1"),
        (TWO, [0, 1], {"class_names": "ab"}, r"must be a list of str, such as \['cat', 'dog'\]"),
        (TWO, [0, 1], {"class_names": [1, 2]}, "must be a list of str"),
        (TWO, [0, 1], {"class_names": ["cat"]}, r"labels must be in 0\.\.0, got 1"),
        (RAGGED, [0, 1], {}, "array: x must have samples of one shape"),
        (np.array(RAGGED, dtype=object), [0, 1], {}, "x must have samples of one shape"),
        (TWO, RAGGED, {}, "y must have samples of one shape"),
        ((TWO, np.zeros((3, 3))), [0, 1], {}, "must be arrays of one length, got lengths .2, 3."),
    ],
)
def test_arrays_that_do_not_fit_are_told_in_one_sentence(x, y, options, reason):
    with pytest.raises((TypeError, ValueError), match=reason):
        ArrayDataset(x, y, **options)


MASKED = np.ma.masked_less(np.array([[1.0, 2], [3, 4]]), 2)


@each(
    "call",
    [
        lambda: ArrayDataset([*MASKED], [0, 1]),
        lambda: ArrayDataset((MASKED, TWO), [0, 1]),
        lambda: ArrayDataset(TWO, (MASKED, np.arange(2))),
        lambda: TokenDataset(np.ma.masked_less(np.arange(300), 2)),
        lambda: Model(Linear(3), (2,), backend="numpy").predict(MASKED),
        lambda: read_samples(Returning(TWO, MASKED), np.arange(2)),
    ],
)
def test_arrays_with_a_mask_are_refused(call):
    with pytest.raises(TypeError, match=r"must be an array without a mask.*\.filled\("):
        call()


def test_the_message_of_integer_targets_says_what_a_loss_takes():
    with pytest.raises(ValueError, match="own: x must have samples of one shape"):
        read_samples(Returning(RAGGED, np.arange(2)), np.arange(2))
    trainer = Trainer(Model(Linear(1), (2,)), SGD(0.1), loss="bce", metrics=(), progress=False)
    with pytest.raises(ValueError, match=r"use \(y \+ 1\) / 2 for targets of -1 and 1"):
        trainer.fit(ArrayDataset(np.zeros((4, 2)), [-1.0, 1, 1, -1]))
