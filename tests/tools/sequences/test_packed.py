"""Documents packed to sequences."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from pydtnn.data import load_dataset
from pydtnn.tools.sequences import PackedDataset, load_documents
from pydtnn.tools.sequences.packed import best_fit
from tests.each import each


def slow_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rooms = [capacity - sum(lengths[i] for i in one) - lengths[item] for one in bins]
        fits = [room for room in rooms if room >= 0]
        if not fits:
            bins.append([])
        bins[rooms.index(min(fits)) if fits else -1].append(item)
    return bins


def test_the_longest_item_goes_where_least_room_is_left(rng):
    for capacity in (1, 7, 40):
        lengths = rng.integers(1, capacity + 1, size=200).tolist()
        bins, expected = best_fit(lengths, capacity), slow_best_fit(lengths, capacity)
        assert sorted(i for one in bins for i in one) == list(range(200))
        sums = [sorted(sum(lengths[i] for i in one) for one in way) for way in (bins, expected)]
        assert sums[0] == sums[1]


def pairs(data: PackedDataset) -> list[tuple[int, int]]:
    (tokens, documents), targets = data.read(np.arange(len(data)))
    real = targets != data.ignore_index
    np.testing.assert_array_equal(real, documents > 0)
    np.testing.assert_array_equal(real.sum(axis=1), data.counts)
    assert not tokens[~real].any()
    return sorted(zip(tokens[real].astype(int), targets[real], strict=True))


@each("packed", [True, False])
def test_every_token_but_the_first_of_a_document_is_a_target_once(packed, rng):
    lengths = [1, 2, 30, 9, 8, *rng.integers(1, 20, size=40)]
    ends = np.cumsum(lengths)
    documents = [np.arange(end - n, end) for n, end in zip(lengths, ends, strict=True)]
    data = PackedDataset(documents, 8, packed=packed)
    assert pairs(data) == [(int(a), int(a) + 1) for d in documents for a in d[:-1]]
    pieces = sum(-(-(n - 1) // 8) for n in lengths)
    assert len(data) < pieces if packed else len(data) == pieces


def test_samples_of_a_bucket_have_similar_lengths():
    documents = [np.zeros(n, int) for n in range(2, 34)]
    data = PackedDataset(documents, 40, packed=False, bucket=8)
    order = data.shuffled(3, 1)
    assert sorted(order) == list(range(32))
    own = data.counts[order].reshape(4, 8)
    assert (own.max(axis=1) - own.min(axis=1) == 7).all()


def test_files_are_split_at_empty_lines(tmp_path):
    for name, text in {"a": "one\ntwo\n\nthree\n\n\n\n", "b": "four", "c": "\n\nfive\n\n!"}.items():
        (tmp_path / name).write_text(text)
    train, test = load_dataset("documents", data_dir=tmp_path, length=6)
    texts = [b"one\ntwo\n\n", b"three\n\n", b"four"]
    assert pairs(train) == sorted(pair for text in texts for pair in pairwise(text))
    assert (train.encoding, train.classes, len(test), test.counts.sum()) == ("bytes", 256, 1, 5)
    train, _ = load_documents(tmp_path, length=6, separator=None, packed=False)
    assert train.counts.sum() == 18 - 1 + 4 - 1


@each(
    ("documents", "options", "error", "message"),
    [
        ([[1], []], {}, ValueError, "expected at least one document of 2 tokens"),
        ([[1, 2], [3, 7]], {"classes": 5}, ValueError, r"in 0\.\.4, got 7 at position 3"),
        ([[0.5, 1.0]], {}, TypeError, "sequence of integers, got float64"),
    ],
)
def test_wrong_documents_are_refused(documents, options, error, message):
    with pytest.raises(error, match=message):
        PackedDataset(documents, **options)
