"""What random networks are compared by: rounding passes, however it shows, and defects do not."""

from __future__ import annotations

import numpy as np
import pytest

from tests.each import each
from tests.parallel.trajectories import Expected, observe, randomize
from tests.random_networks import NUMPY, Network, Part


def convolutions_and_norm() -> Network:
    """A batch norm over two rows leaves a millionth of the gradient that it is given."""
    conv = Part("Conv2d", (3, 3), {"padding": 1, "bias": False})
    norm = Part("BatchNorm", (), {"momentum": 0.1, "epsilon": 1e-5})
    steps = [(conv, (0,)), (conv, (1,)), (conv, (2,)), (norm, (3,))]
    return Network([(1, 1, 3)] * 2, steps, outputs=[4, 5], batch=2, seed=0)


def test_gradients_that_cancel_in_a_batch_norm_are_as_large_as_what_cancels():
    network = convolutions_and_norm()
    model = network.model(NUMPY)
    randomize(model, network)
    Expected.of(network).assert_alike(observe(model, network))


@each("entry", ["dx0", "gradient conv2d1.w 0", "state conv2d2.w 0", "y1"])
def test_one_element_that_is_off_by_a_billionth_is_found(entry):
    network = convolutions_and_norm()
    expected = Expected.of(network)
    key = next(key for key in expected.record if key.startswith("step1") and key.endswith(entry))
    largest = max(np.abs(a).max() for k, a in expected.record.items() if k.startswith("step1"))
    wrong = {name: array.copy() for name, array in expected.record.items()}
    wrong[key].flat[0] += 1e-9 * largest
    with pytest.raises(AssertionError, match=f"step1.*{entry}: off by"):
        expected.assert_alike(wrong)
