import subprocess
import sys

import numpy as np
import pytest

from pydtnn.data import load_digits


def test_the_digits_have_a_fixed_split_and_all_grey_levels():
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    train, test = load_digits()
    assert (len(train), len(test), train.input_shape) == (1437, 360, (8, 8, 1))
    parts = train.read(np.arange(1437)), test.read(np.arange(360))
    x, y = (np.concatenate(pair) for pair in zip(*parts, strict=True))
    np.testing.assert_array_equal(y, labels)
    np.testing.assert_array_equal(np.rint(x.reshape(1797, 64) * (16 / 255)), images)
    assert (x.min(), x.max()) == (0, 255)
    assert test.mean is train.mean


def test_scikit_learn_is_imported_only_where_its_file_is_elsewhere(monkeypatch):
    pytest.importorskip("sklearn")
    code = "import sys; from pydtnn.data import load_digits; load_digits(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "sklearn" not in done.stdout.split()
    expected = load_digits()
    monkeypatch.setattr("pydtnn.data.digits.find_spec", lambda name: None)
    for ours, other in zip(expected, load_digits(), strict=True):
        for own, array in zip(*(d.read(np.arange(360)) for d in (ours, other)), strict=True):
            np.testing.assert_array_equal(own, array)


def test_without_scikit_learn_the_way_to_get_it_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match="digits requires scikit-learn; install it with: pip"):
        load_digits()
