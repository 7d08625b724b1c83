"""Text as sequences of bytes."""

import numpy as np
import pytest

from pydtnn.data import TokenDataset, load_dataset, load_text
from tests.each import each


def test_samples_follow_each_other_and_targets_are_the_next_tokens():
    data = TokenDataset(np.arange(23), 5)
    assert (len(data), data.classes, data.input_shape) == (4, 23, (5,))
    x, y = data.read(np.array([3, 0]))
    np.testing.assert_array_equal(x, [[15, 16, 17, 18, 19], [0, 1, 2, 3, 4]])
    np.testing.assert_array_equal(y, x + 1)
    assert (x.dtype, y.dtype) == (np.float32, np.int64)
    assert [len(TokenDataset(np.arange(n), 5)) for n in (10, 11)] == [1, 2]  # the last is a target


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    for name, content in {"b/x.txt": b"33", "a.txt": b"1", "b.txt": b"22", ".c": b"4"}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content * 40)
    train, test = load_text(tmp_path, length=8)
    both = np.concatenate([train.tokens, test.tokens]).tobytes()
    assert both == b"1" * 40 + b"\n" + b"33" * 40 + b"\n" + b"22" * 40
    assert len(test.tokens) == len(both) // 10
    assert (train.classes, test.classes) == (256, 256)
    train, _ = load_text(tmp_path, length=8, pattern="a*")
    assert set(train.tokens) == {ord("1")}


def test_one_file_is_a_text(tmp_path):
    (tmp_path / "t").write_bytes(bytes(range(100)))
    train, test = load_dataset("text", data_dir=tmp_path / "t", length=3)
    assert len(train) == 29
    np.testing.assert_array_equal(test.tokens, np.arange(90, 100))


@pytest.mark.long
def test_the_sources_of_python_are_there_without_a_file():
    train, test = load_text()
    assert len(train) > 10_000
    assert len(train) / len(test) == pytest.approx(9, rel=0.01)
    assert b"import" in train.tokens.tobytes()


@each(
    ("tokens", "options", "error", "message"),
    [
        ([0, 1, 2], {"length": 3}, ValueError, "expected more than 3 tokens.*got 3"),
        ([0, 7, 2], {"length": 1, "classes": 5}, ValueError, r"in 0\.\.4, got 7 at position 1"),
        ([0, -1, 2], {"length": 1}, ValueError, "got -1 at position 1"),
        ([0.5, 1.0], {"length": 1}, TypeError, "sequence of integers, got float64"),
        ([[1, 2]], {"length": 1}, TypeError, r"got int64 of shape \(1, 2\)"),
        ([1, 2], {"length": 0}, ValueError, "length must be at least 1, got 0"),
    ],
)
def test_wrong_tokens_are_refused(tokens, options, error, message):
    with pytest.raises(error, match=message):
        TokenDataset(tokens, **options)


def test_missing_and_short_texts_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing does not exist"):
        load_text(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="found no file in"):
        load_text(tmp_path)
    (tmp_path / "short").write_bytes(b"abc")
    with pytest.raises(ValueError, match="expected at least 20 bytes.*got 3"):
        load_text(tmp_path, length=9)
