"""Pairs to translate, sequences to classify, masked text; and a translation that is learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.data import Loader, TokenDataset, load_dataset
from pydtnn.tools.sequences.computed import MaskedTokens
from pydtnn.train import main

pytestmark = pytest.mark.tools

EVERY = np.arange(64)


def pairs(name: str, **options: int) -> list[tuple[list[int], list[int]]]:
    """Source and target without their ends, after a check of how they are stored."""
    train, test = load_dataset(name, samples=64, test_samples=9, seed=3, **options)
    (source, given, lengths), y = train.read(EVERY)
    found = []
    for row, begin, n, target in zip(source, given, lengths[:, 0].astype(int), y, strict=True):
        end = list(target).index(2)
        assert row[:n].all()
        assert not row[n:].any()
        assert not target[end + 1 :].any()
        assert begin[0] == 1
        np.testing.assert_array_equal(begin[1 : end + 1], target[:end])
        found.append((row[:n].astype(int).tolist(), target[:end].tolist()))
    assert train.ignore_index == 0
    assert y.max() < train.classes == test.classes
    assert [len(part) for part in (train, test)] == [64, 9]
    assert (test.read(EVERY[:9])[0][0] != source[:9]).any()
    np.testing.assert_array_equal(train.read(EVERY[[5, 2]])[1], y[[5, 2]])
    return found


def test_targets_are_sources_backwards():
    found = pairs("reversal", length=5, shortest=2, tokens=4)
    assert {len(source) for source, _ in found} == {2, 3, 4, 5}
    assert {token for source, _ in found for token in source} == {3, 4, 5, 6}
    assert all(target == source[::-1] for source, target in found)


def test_targets_are_sums():
    def number(digits: list[int]) -> int:
        return sum((digit - 3) * 10**i for i, digit in enumerate(digits))

    found = pairs("addition", digits=2)
    for source, target in found:
        assert source[2] == 13
        assert number(source[:2]) + number(source[3:]) == number(target)
    assert {len(target) for _, target in found} == {2, 3}


def test_classes_are_the_most_frequent_tokens():
    train, _ = load_dataset("majority", samples=64, length=7, classes=3)
    (x, lengths), y = train.read(EVERY)
    for row, n, label in zip(x.astype(int), lengths[:, 0].astype(int), y, strict=True):
        assert not row[n:].any()
        counts = np.bincount(row[:n], minlength=4)
        assert counts[0] == 0
        assert label == counts[1:].argmax()
    assert {*y} == {0, 1, 2}
    assert {*lengths[:, 0]} == {*range(1, 8)}


def test_masked_tokens_are_the_targets(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(32, 128)) * 200)
    options = {"data_dir": tmp_path, "length": 100}
    train, test = load_dataset("masked_text", rate=0.2, **options)
    plain, _ = load_dataset("text", **options)
    rows = np.arange(len(train))
    (x, y), (text, _) = train.read(rows), plain.read(rows)
    chosen = y != train.ignore_index
    np.testing.assert_array_equal(y[chosen], text[chosen])
    np.testing.assert_array_equal(x[~chosen], text[~chosen])
    assert train.classes == test.classes == 257
    assert x[x < 256].max() < 256
    assert abs(chosen.mean() - 0.2) < 0.02  # of 17,200
    for share, found in ((0.8, x == 256), (0.1, x == text)):
        assert abs(found[chosen].mean() - share) < 0.03
    np.testing.assert_array_equal(train.read(rows[::-1])[0], x[::-1])


def test_masks_are_those_of_seed_epoch_and_sample_for_any_number_of_ranks():
    tokens = TokenDataset(np.arange(2000) % 50, 20)
    data = MaskedTokens(tokens, 0.3, seed=1).subset(np.arange(48))

    def masks(epoch: int, size: int) -> np.ndarray:
        options: Any = {"global_batch_size": 16, "shuffle": False, "size": size}
        loaders = [Loader(data, rank=rank, **options) for rank in range(size)]
        ranks = [[batch.x for batch in loader.epoch(epoch)] for loader in loaders]
        return np.concatenate([x for step in zip(*ranks, strict=True) for x in step])

    first, *others = (masks(epoch, 1) for epoch in range(3))
    np.testing.assert_array_equal(first, data.read(np.arange(48))[0])
    assert all((x != first).any(axis=1).mean() > 0.9 for x in others)
    for epoch, x in enumerate([first, *others]):
        np.testing.assert_array_equal(masks(epoch, 3), x)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        "transformer_nano:norm_first=true,positions=learned --dataset=addition --epochs=4",
        "transformer_nano:depth=1,norm_first=true --dataset=reversal:length=5,shortest=2 "
        "--epochs=3 --label-smoothing=0.01",
    ],
    ids=["addition", "reversal"],
)
def test_computed_sequences_are_learned(options, tmp_path):
    own = f"--model={options} --metrics=exact_match --optimizer=adam --lr=0.005 --schedule=cosine"
    run: Path = tmp_path / "run"
    usual = ["--batch-size=64", "--threads=1", "--tuning=fixed", f"--output-dir={run}"]
    assert main([*own.split(), *usual]) == 0
    assert json.loads((run / "history.json").read_text())[-1]["val_exact_match"] >= 0.99
