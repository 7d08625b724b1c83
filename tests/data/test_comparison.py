import numpy as np
import pytest

from pydtnn.data import ArrayDataset
from pydtnn.data.comparison import check_data, check_samples
from pydtnn.utils.errors import AgreedError


class Noisy(ArrayDataset):
    """Samples that differ each time they are read."""

    def read(self, indices):
        x, y = super().read(indices)
        return x + np.random.default_rng().random(x.shape), y


@pytest.mark.threads(3)
def test_a_rank_with_other_samples_is_named_unless_they_differ_each_time(comm):
    x, other = np.arange(40.0).reshape(20, 2), int(comm.rank == 1)
    check_data(comm, "fit", [("training set", ArrayDataset(x, [0] * 20)), ("test set", None)])
    check_data(comm, "fit", [("training set", Noisy(x + other, [0] * 20))])
    check_samples(comm, "predict", [x])
    for array in (x + other, x[other:]):
        differing = ArrayDataset(array, [0] * len(array))
        with pytest.raises(AgreedError, match=r"fit: .*samples of the training set .*rank 1"):
            check_data(comm, "fit", [("training set", differing)])
    with pytest.raises(AgreedError, match=r"predict: .*rank 1"):
        check_samples(comm, "predict", [x, x + other])
