"""CTC is the sum over all paths of the labels."""

from __future__ import annotations

from itertools import groupby, product

import numpy as np
import pytest

from pydtnn.losses import get_loss
from pydtnn.tools.testing import check_loss
from tests.each import each

pytestmark = pytest.mark.tools

TARGETS = np.array([[5, 1, 2, 0], [4, 1, 1, 0], [3, 2, 0, 0], [5, 0, 0, 0], [5, 1, 2, 1]])


def test_ctc_is_the_sum_over_all_paths_and_its_gradient_that_of_differences(backend):
    y = 2 * np.random.default_rng(0).normal(size=(5, 5, 3))
    p = np.exp(y) / np.exp(y).sum(axis=-1, keepdims=True)
    sums = np.zeros(5)
    for row, (length, *labels) in enumerate(TARGETS):
        for path in product(range(3), repeat=length):
            if [k for k, _ in groupby(path) if k] == [k for k in labels if k]:
                sums[row] += np.prod(p[row, range(length), path])
    loss, _ = get_loss("ctc")(backend, backend.asarray(y), backend.asarray(TARGETS), 1.0)
    assert float(loss) == pytest.approx(-np.log(sums).sum(), rel=1e-13)
    check_loss(get_loss("ctc"), (5, 3), TARGETS)


@each("target", [[4, 2, 2, 2], [6, 1, 0, 0], [5, 3, 0, 0], [5, -1, 0, 0], [5, 0, 1, 0], [0] * 4])
def test_labels_without_a_path_are_refused(target):
    with pytest.raises(
        ValueError, match=r"CTC: expected a length in 1\.\.5, then labels in 0\.\.2"
    ):
        get_loss("ctc").check((1, 5, 3), np.array([target]))
