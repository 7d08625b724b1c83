"""What stays when a checkpoint cannot be written."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.callbacks import Callback
from pydtnn.comm import Communicator
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint, saving
from pydtnn.utils import files
from pydtnn.utils.errors import AgreedError
from tests.small_training import small_trainer, trained

FILES = ["XXH64SUMS", "arrays.safetensors", "state.json"]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.threads(2)
@pytest.mark.parametrize("file", FILES)
def test_a_full_disk_leaves_the_earlier_checkpoints_and_stops_all_ranks(
    comm: Communicator, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trained(tmp_path, comm, epochs=1)
    before = names(tmp_path)
    comm.barrier()

    def full(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2] if path.name == file else data)
        if path.name == file:
            raise OSError(errno.ENOSPC, "No space left on device")

    def full_at_the_end(stream: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_through", full)
    if file == "arrays.safetensors":
        monkeypatch.setattr(saving, "_flush", full_at_the_end)
    trainer.optimizer.iterations += 1
    with pytest.raises(AgreedError) as caught:
        save_checkpoint(tmp_path, trainer)
    path = tmp_path / "checkpoint-00000005"
    assert str(caught.value).removeprefix("rank 0: ") == (
        f"checkpoint: cannot write {path}: no space left on device; "
        "free some space or choose another folder"
    )
    assert names(tmp_path) == before == ["checkpoint-00000004"]


@pytest.mark.threads(2)
def test_a_folder_that_cannot_be_made_stops_all_ranks(comm: Communicator, tmp_path: Path) -> None:
    if comm.rank == 0:
        (tmp_path / "file").write_text("")
    with pytest.raises(AgreedError, match=r"checkpoint: cannot write .*; choose another folder$"):
        save_checkpoint(tmp_path / "file" / "run", small_trainer(comm))


class OfEachRank(Callback):
    """State that differs between ranks: arrays of several types and shapes, one of them large."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.own: dict[str, Any] = {
            "large": rng.normal(size=(250, 40)),
            "turned": rng.normal(size=(3, 4)).T,
            "number": np.array(rng.integers(99)),
            "empty": np.zeros((0, 3), "float32"),
            "rank": seed,
        }

    def state(self) -> dict[str, Any]:
        return self.own

    def load(self, state: Any) -> None:
        self.own = dict(state)


@pytest.mark.threads(1, 3)
@pytest.mark.mpi(2)
def test_what_differs_between_ranks_goes_to_rank_0_as_plain_arrays(
    comm: Communicator, shared_path: Path
) -> None:
    trainer = small_trainer(comm, OfEachRank(comm.rank))
    before = comm.traffic.bytes
    save_checkpoint(shared_path, trainer)
    # The arrays, and the few bytes of what ranks sum anyway.
    sent = trainer.comm.traffic.bytes - before
    assert 80_104 <= sent < 80_200 if comm.rank else sent < 100
    other = small_trainer(comm, OfEachRank(100))
    load_checkpoint(shared_path, other)
    for name, value in OfEachRank(comm.rank).own.items():
        np.testing.assert_array_equal(other.callbacks[0].state()[name], value)
