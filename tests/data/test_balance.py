"""Weights that balance the classes of a data set."""

import numpy as np
import pytest

from pydtnn.data import ArrayDataset, balanced_weights
from tests.each import each


@each("counts", [[5, 1, 2], [1, 1], [3000, 7, 200]])
def test_every_class_has_the_same_total_weight_and_samples_have_mean_1(counts):
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    weights = balanced_weights(ArrayDataset(np.zeros((len(y), 1)), y))
    totals = weights * counts
    np.testing.assert_allclose(totals, totals[0], rtol=1e-12)
    assert weights[y].mean() == pytest.approx(1, rel=1e-12)


def test_a_class_without_samples_has_weight_1_and_does_not_count():
    data = ArrayDataset(np.zeros((4, 1)), np.array([0, 0, 0, 2]), classes=4)
    np.testing.assert_allclose(balanced_weights(data), [2 / 3, 1, 2, 1], rtol=1e-12)


def test_the_pixels_of_masks_are_counted_without_those_that_have_no_label():
    y = np.array([[[0, 0], [255, 1]], [[0, 255], [255, 255]]])
    data = ArrayDataset(np.zeros((2, 2, 2, 1)), y, ignore_index=255)
    np.testing.assert_allclose(balanced_weights(data), [4 / 6, 4 / 2], rtol=1e-12)


def test_only_classes_can_be_balanced():
    with pytest.raises(ValueError, match="one class per sample, got"):
        balanced_weights(ArrayDataset(np.zeros((4, 1)), np.zeros((4, 2))))
