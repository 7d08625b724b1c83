"""What stays when a checkpoint cannot be written."""

from __future__ import annotations

import builtins
import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.callbacks import Callback, EarlyStopping
from pydtnn.comm import Communicator, run_threads
from pydtnn.training.checkpoint import (
    find_checkpoints,
    layout,
    load_checkpoint,
    save_checkpoint,
    saving,
)
from pydtnn.utils import files
from pydtnn.utils.errors import AgreedError
from tests.small_training import small_trainer, trained

FILES = ["XXH64SUMS", "arrays.safetensors", "state.json"]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.threads(2)
@pytest.mark.parametrize("file", [*FILES, "arrays-00002"])
def test_a_full_disk_leaves_the_earlier_checkpoints_and_stops_all_ranks(
    comm, file, tmp_path, monkeypatch
):
    trainer = trained(tmp_path, comm, epochs=1)
    before = names(tmp_path)
    comm.barrier()

    def full(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2] if path.name == file else data)
        if path.name == file:
            raise OSError(errno.ENOSPC, "No space left on device")

    def full_at_the_end(stream: FileIO) -> None:
        if Path(stream.name).name.startswith(file):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_through", full)
    monkeypatch.setattr(saving, "_flush", full_at_the_end)
    if "-" in file:
        monkeypatch.setattr(layout, "FILE_BYTES", 600)
    trainer.optimizer.iterations += 1
    with pytest.raises(AgreedError) as caught:
        save_checkpoint(tmp_path, trainer)
    path = tmp_path / "checkpoint-00000005"
    words = f"cannot write {path}: no space left on device; free some space or choose another fol"
    assert words in str(caught.value)
    assert str(caught.value).startswith("rank 1: " if "-" in file else ("rank 0: ", "checkpoint"))
    assert names(tmp_path) == before == ["checkpoint-00000004"]


@pytest.mark.threads(2)
def test_a_folder_that_cannot_be_made_stops_all_ranks(comm, tmp_path):
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
def test_what_differs_between_ranks_goes_to_rank_0_as_plain_arrays(comm, shared_path):
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
    if comm.size > 1:
        words = rf"was saved per rank by {comm.size} ranks, .*; resume with {comm.size} ranks"
        with pytest.raises(AgreedError, match=words):
            load_checkpoint(shared_path, small_trainer(None, OfEachRank(0)))


CALLS = [(os, name) for name in ("mkdir", "rename", "replace", "rmdir", "unlink", "fsync")]
CALLS.append((builtins, "open"))


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Killed(BaseException):
    """The end of the process, which nothing in it can handle."""


class Disk:
    """What changes files is counted, and call number `end` (from 1) raises `error`.

    After `Killed` all later calls raise it too, and files that no fsync has brought to the disk are
    there by half. Another error is that call's alone, as on a disk that is full for a while.
    """

    def __init__(self, patch: pytest.MonkeyPatch, end: int, error: BaseException) -> None:
        self.end, self.error = end, error
        self.calls = 0
        self._cached: dict[int, Path] = {}  # by inode
        for module, name in CALLS:
            patch.setattr(module, name, self._counting(name, getattr(module, name)))

    def _counting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **keywords: Any) -> Any:
            if name == "open" and args[1:2] != ("xb",):
                return call(*args, **keywords)
            self.calls += 1
            dead = self.calls >= self.end and isinstance(self.error, Killed)
            if dead:
                self._lose()
            if dead or self.calls == self.end:
                raise self.error
            result = call(*args, **keywords)
            if name == "open":
                self._cached[os.fstat(result.fileno()).st_ino] = Path(args[0])
            elif name == "fsync":
                self._cached.pop(os.fstat(args[0]).st_ino, None)
            return result

        return counted

    def _lose(self) -> None:
        for path in self._cached.values():
            if path.exists():
                os.truncate(path, path.stat().st_size // 2)
        self._cached.clear()


Told = tuple[int, int]
"""What a checkpoint is known by: its step, and a number in another of its parts."""


def save(directory: Path, told: Told, ranks: int = 1, keep: int = 1) -> None:
    def rank(comm: Communicator) -> None:
        trainer = small_trainer(comm, callback := EarlyStopping())
        trainer.optimizer.iterations, callback.waited = told
        save_checkpoint(directory, trainer, keep=keep)

    run_threads(ranks, rank)


def load(directory: Path) -> Told:
    trainer = small_trainer(None, callback := EarlyStopping())
    assert load_checkpoint(directory, trainer) is not None
    return trainer.optimizer.iterations, callback.waited


Case = tuple[Told, Told, bool]
"""A checkpoint that is there, the one whose writing is disturbed, and whether step 9 is damaged."""

CASES: dict[str, Case] = {
    "in a row": ((4, 0), (5, 1), False),
    "in place of another": ((4, 0), (4, 1), False),
    "before a damaged one": ((2, 0), (3, 1), True),
    "in place of a damaged one": ((2, 0), (9, 1), True),
}


def prepare(directory: Path, case: Case) -> None:
    save(directory, case[0])
    if case[2]:
        (directory / "checkpoint-00000009").mkdir()
        (directory / "checkpoint-00000009" / "state.json").touch()


def disturbed(
    case: Case, ranks: int, folder: Path, error: BaseException
) -> Iterator[tuple[Path, BaseException | None]]:
    """Save with an error at each call in turn, until it is at none; tell where, and what came."""
    for end in itertools.count(1):
        directory = folder / str(end)
        prepare(directory, case)
        raised: BaseException | None = None
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, end, error)
            try:
                save(directory, case[1], ranks)
            except (Killed, AgreedError) as problem:
                raised = problem
        if disk.calls < end:
            break
        yield directory, raised
    assert end > 12  # calls were counted
    assert raised is None
    assert load(directory) == case[1]
    assert len(list(directory.iterdir())) == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_wherever_writing_ends_the_old_checkpoint_or_the_new_is_there(case, ranks, tmp_path):
    """After a kill and on a full disk, which is told unless the new checkpoint is there."""
    full = OSError(errno.ENOSPC, "No space left on device")
    for error, name in ((Killed(), "killed"), (full, "full")):
        for directory, raised in disturbed(case, ranks, tmp_path / name, error):
            if error is full and raised is None:
                assert load(directory) == case[1]
            if error is full and raised is not None:
                assert "checkpoint: cannot write " in str(raised)
                assert "no space left on device; free some space" in str(raised)
            assert load(directory) in case[:2]
            save(directory, (10, 2))
            assert load(directory) == (10, 2)
            assert [path.name for path in directory.iterdir()] == ["checkpoint-00000010"]


def test_a_checkpoint_that_is_removed_does_not_look_like_one_any_more(tmp_path, monkeypatch):
    """Removing a folder is many calls; what a kill among them leaves would be called damaged."""
    save(tmp_path, (1, 0))
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
    save(tmp_path, (2, 0))
    assert [path.name for path in find_checkpoints(tmp_path)] == ["checkpoint-00000002"]
