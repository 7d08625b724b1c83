import numpy as np
import pytest

from pydtnn.data import load_dataset
from tests.each import each


def test_synthetic_data_of_any_shape_are_loaded_by_name(tmp_path):
    train, test = load_dataset(
        "synthetic", data_dir=tmp_path, seed=3, samples=20, test_samples=5, shape=[9, 8, 2]
    )
    assert (len(train), len(test), train.input_shape) == (20, 5, (9, 8, 2))
    other = load_dataset("synthetic", seed=4, samples=20, shape=(9, 8, 2))[0]
    assert (other.read(np.arange(3))[0] != train.read(np.arange(3))[0]).any()


@each(
    ("name", "options", "reason"),
    [
        ("cifar", {}, "unknown data set 'cifar'; did you mean 'cifar10' or 'cifar100'"),
        ("nothing", {}, "choose one of .*'cifar10', 'cifar100', 'digits', "),
        ("synthetic", {"sample": 3}, "unknown option of synthetic 'sample'; .*samples"),
        ("mnist", {"labels": "fine"}, "there is none to choose from"),
    ],
)
def test_an_unknown_name_or_option_is_told_with_the_nearest_ones(name, options, reason):
    with pytest.raises(ValueError, match=reason):
        load_dataset(name, **options)
