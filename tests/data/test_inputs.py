"""What a model accepts as its inputs: no normalised sample is refused, raw ones are."""

from __future__ import annotations

import unicodedata
from typing import Any

import numpy as np
import pytest

from pydtnn.data import ArrayDataset, Dataset, Loader, create_augmentations, load_dataset
from pydtnn.data.batch import parts
from pydtnn.data.inputs import Inputs, check_same, inputs_of, same_normalization
from tests.each import each

RAW = {
    "of 0 to 255": lambda x: x.astype(np.float32),
    "of 0 to 255, in float64": lambda x: x.astype(np.float64),
    "of 0 to 1": lambda x: x / np.float32(255),
    "of 0 to 1, in float64": lambda x: x / 255,
    "of integers": lambda x: x.astype(np.int64),
}


def sets() -> dict[str, tuple[Dataset, Dataset]]:
    rng = np.random.default_rng(0)
    dark = rng.integers(0, 30, (40, 4, 4, 3), dtype=np.uint8)
    faint = (128 + rng.integers(0, 2, (40, 4, 4, 1))).astype(np.uint8)
    half = np.array([0, 255], np.uint8)[rng.integers(0, 2, (40, 4, 4, 1))]
    arrays = {"dark": dark, "faint": faint, "black and white": half, "constant": dark * 0 + 9}
    pairs = {
        name: (train := ArrayDataset(x, np.zeros(40, int)), ArrayDataset(x, [0] * 40, like=train))
        for name, x in arrays.items()
    }
    return pairs | {
        "digits": load_dataset("digits"),
        "synthetic": load_dataset("synthetic", samples=200, test_samples=100),
    }


SETS = sets()


def check(known: Inputs, x: Any) -> None:
    for part, array in zip(known.parts, parts(x), strict=True):
        part.check("predict", array)


@each("name", SETS)
@each("dtype", ["float32", "float16", "bfloat16"])
def test_no_normalised_sample_is_refused(name, dtype):
    train, test = SETS[name]
    known = inputs_of(train)
    for data in (train, test):
        x = data.read(np.arange(min(len(data), 200)))[0]
        check(known, data.normalize(x, np.dtype(dtype)))
        for row in x[:20]:
            check(known, data.normalize(row[None], np.dtype(dtype)))
        check(known, x)
        check(known, 0 * data.normalize(x))
        check(known, np.empty((0, *x.shape[1:]), np.float32))


@each("name", ["digits", "synthetic", "dark"])
def test_no_augmented_or_interpolated_sample_is_refused(name):
    train, _ = SETS[name]
    known = inputs_of(train)
    augment = create_augmentations("crop:2,flip,cutout:3")
    for batch in Loader(train, global_batch_size=32, augment=augment).epoch(0):
        check(known, batch.x)
        check(known, (batch.x[:, :-1] + batch.x[:, 1:]) / 2)
        check(known, batch.x + np.float32(8 / 255))


@each("kind", RAW)
@each("name", ["digits", "synthetic", "dark"])
def test_raw_pixels_as_numbers_are_refused(name, kind):
    train, test = SETS[name]
    x = RAW[kind](test.read(np.arange(40))[0])
    if name == "digits" and kind == "of integers":
        x = np.rint(x / (255 / 16)) / 16
    message = r"^predict: expected uint8 pixels, or floats normalised as in training, from "
    with pytest.raises(ValueError, match=message):
        check(inputs_of(train), x)


def test_the_range_of_floats_is_measured_and_has_a_wide_margin():
    rng = np.random.default_rng(0)
    known = inputs_of(ArrayDataset(rng.normal(size=(500, 7)), np.zeros(500)))
    check(known, rng.normal(size=(100_000, 7)))
    check(known, rng.standard_t(3, size=(1000, 7)))
    with pytest.raises(ValueError, match=r"expected floats normalised as in training, from -\d"):
        check(known, rng.integers(0, 256, (10, 7)).astype(float))
    with pytest.raises(ValueError, match="expected floats, as in training, got uint8"):
        check(known, np.zeros((2, 7), np.uint8))

    for x in (np.full((9, 2), np.inf), np.full((9, 2), 3.0)):  # without a range
        check(inputs_of(ArrayDataset(x, np.zeros(9))), np.array([[1e30, -1e30]]))


def test_each_of_several_inputs_has_its_own_statistics_and_range():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (20, 4, 4, 3), dtype=np.uint8)
    data = ArrayDataset((images, rng.normal(size=(20, 5))), np.zeros(20))
    known = inputs_of(data)
    assert [part.dtype for part in known.parts] == ["uint8", "float64"]
    x = data.read(np.arange(20))[0]
    check(known, x)
    check(known, data.normalize(x))
    np.testing.assert_array_equal(
        known.parts[0].normalize(images, np.float32), data.normalize(x)[0]
    )
    with pytest.raises(ValueError, match="expected uint8 pixels"):
        check(known, (images.astype(float), x[1]))


def test_statistics_are_the_same_only_if_they_are_those_of_the_training_set():
    train, test = SETS["digits"]
    x, y = test.read(np.arange(100))
    known = inputs_of(train)
    assert same_normalization(train, known)
    assert same_normalization(test, known)
    assert same_normalization(train.subset([1, 2]), known)
    assert not same_normalization(ArrayDataset(x, y), known)
    assert not same_normalization(ArrayDataset(x / 255, y), known)
    floats = ArrayDataset(x / 255, y)
    assert same_normalization(ArrayDataset(x[:9] / 255, y[:9]), inputs_of(floats))


def named(*names: Any, targets: int = 1, encoding: str | None = None) -> Dataset:
    """A data set whose classes have these names."""
    y = np.zeros(4, int)
    given = {"class_names": names} if names else {"classes": 2}
    data = ArrayDataset(
        np.zeros((4, 2), np.float32), y if targets == 1 else (y,) * targets, **given
    )
    data.encoding = encoding
    return data


@each(
    ("given", "known", "words"),
    [
        (named("ant", "cat"), named("cat", "dog"), "class 0 ant instead of cat, class 1 cat ins"),
        (named("a", "b", "c"), named("a", "b"), "number of classes 3 instead of 2"),
        (named("a"), named("a", "b"), "number of classes 1 instead of 2"),
        (named(["a", "b"], ["c"], targets=2), named(["a", "b"], ["d"], targets=2), "of target 1 c"),
        (named(encoding="bytes"), named(encoding="tokenizer 1"), "encoding bytes instead of tok"),
    ],
)
def test_other_classes_and_encodings_are_named(given, known, words):
    for other in (known, inputs_of(known)):
        with pytest.raises(
            ValueError, match=r"^train: expected data like those of it, got"
        ) as told:
            check_same("train", given, other, "it", "stop")
        assert words in str(told.value)


def test_what_is_alike_or_not_known_is_accepted():
    forms = [named(unicodedata.normalize(form, "\u00e9t\u00e9"), "b") for form in ("NFC", "NFD")]
    unknown = named()
    for given, known in ([*forms], [unknown, forms[0]], [forms[0], unknown], [unknown, unknown]):
        check_same("train", given, inputs_of(known), "it", "stop")
    check_same("train", named(encoding="bytes"), unknown, "it", "stop")
