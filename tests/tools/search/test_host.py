"""What the groups of a host share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, run_threads
from pydtnn.data import ArrayDataset
from pydtnn.tools.search import host, make_space, run
from pydtnn.tools.search.host import PREFIX, share_on_host
from tests.each import each
from tests.tools.search.test_search import FIXED

pytest.importorskip("optuna")


def load() -> tuple[ArrayDataset, ArrayDataset]:
    x = np.random.default_rng(0).integers(0, 256, (101, 5, 5, 3), np.uint8)
    train = ArrayDataset(x, np.arange(101) % 7, class_names=list("abcdefg"))
    return train, ArrayDataset(x[:9], np.zeros(9, int), like=train)


@each("size", [1, 2, 5])
def test_data_sets_are_loaded_once_on_a_host(size):
    loaded: list[int] = []
    before = {*Path("/dev/shm").glob(f"{PREFIX}*")}

    def share(comm: Communicator) -> Any:
        return share_on_host(comm, lambda: loaded.append(comm.rank) or load())  # type: ignore[func-returns-value]

    found = run_threads(size, share, hosts=["a", "a", "a", "b", "b"][:size])
    assert sorted(loaded) == [0] + [3] * (size > 3)
    whole, _ = load()
    for train, validation in found:
        assert (train.x == whole.x).all()
        assert (train.y == whole.y).all()
        assert train.class_names == whole.class_names
        assert validation.like is train
        assert size in (1, 5) or not train.x.flags.writeable
    assert {*Path("/dev/shm").glob(f"{PREFIX}*")} <= before


def test_each_rank_loads_without_room_or_what_cannot_be_sent(monkeypatch):
    found = run_threads(3, lambda comm: share_on_host(comm, lambda: lambda: comm.rank))
    assert [one() for one in found] == [0, 1, 2]
    monkeypatch.setattr(host, "PLACES", ("/nowhere",))
    data = run_threads(2, lambda comm: share_on_host(comm, load))
    assert all(one[0].x.flags.writeable for one in data)


def test_a_trial_that_needs_too_much_memory_fails_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "free_memory", lambda: 150e6)
    shape = {"samples": 60, "test_samples": 20, "shape": [64, 64, 3], "classes": 4}
    fixed = {**FIXED, "model": "vgg11", "dataset_options": shape, "epochs": 1}
    fixed.pop("global_batch_size")
    space = make_space({"batch_size": [4, 8]}, fixed=fixed, sampler="grid")
    study = run(None, space, tmp_path / "study", show=None)
    assert [one.state.name for one in study.trials] == ["FAIL", "FAIL"]
    reason = study.trials[0].user_attrs["reason"]
    assert "the trial needs" in reason
    assert "150 MB of its host" in reason
    assert not (tmp_path / "study" / "trial-00000").exists()
