"""When checkpoints are saved."""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Collection
from io import FileIO
from pathlib import Path

import pytest

from pydtnn import Trainer
from pydtnn.callbacks import EMA, Checkpointer, EarlyStopping, HistoryWriter
from pydtnn.training.checkpoint import find_checkpoints, saving
from pydtnn.utils import clock
from pydtnn.utils.errors import AgreedError, NotSavedError
from tests.each import each
from tests.small_training import Recorder, small_fit, small_trainer


def steps_saved(directory: Path) -> list[int]:
    return [int(path.name.rpartition("-")[2]) for path in find_checkpoints(directory)]


@each(
    ("options", "expected"),
    [
        ({"every_epochs": 1, "keep": 9}, [4, 8, 12]),
        ({"every_epochs": 2, "keep": 9}, [8, 12]),
        ({"every_epochs": None, "every_steps": 5, "keep": 9}, [5, 10, 12]),
        ({"every_steps": 3, "keep": 9}, [3, 4, 6, 8, 9, 12]),
        ({"every_epochs": None, "every_steps": 1, "keep": 2}, [11, 12]),
        ({"every": "5 steps", "keep": 9}, [5, 10, 12]),
        ({"every": "2 epochs", "keep": 9}, [8, 12]),
        ({"every": "1h", "keep": 9}, [12]),
        ({"every": "auto", "keep": 9}, [10, 12]),
    ],
)
def test_checkpoints_are_saved_at_the_intervals_and_at_the_end(options, expected, tmp_path):
    small_fit(small_trainer(None, Checkpointer(tmp_path, **options)), epochs=3)
    assert steps_saved(tmp_path) == expected


def test_a_folder_of_another_run_and_callbacks_with_state_after_it_are_refused(tmp_path):
    after = Checkpointer(tmp_path), HistoryWriter(tmp_path)  # which has none
    small_fit(small_trainer(None, *after), epochs=1)
    with pytest.raises(AgreedError, match=r"checkpoint-00000004 of another run; resume from"):
        small_fit(small_trainer(None, Checkpointer(tmp_path)))
    for callback in (EarlyStopping(), EMA()):
        words = rf"{type(callback).__name__} comes after it .* put the Checkpointer last"
        with pytest.raises(AgreedError, match=words):
            small_fit(small_trainer(None, Checkpointer(tmp_path / "new"), callback))


class Disk:
    """A disk on which files are completed when a test allows it, or cannot be completed."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.began = threading.Event()
        self.full: Collection[int] = ()
        self.count = 0
        self._lock = threading.Lock()

    def use(self) -> None:
        """Complete a file, or fail."""
        self.began.set()
        assert self.free.wait(300)
        with self._lock:
            self.count += 1
            if self.count in self.full:
                raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk, complete = Disk(), saving._flush

    def used(stream: FileIO) -> None:
        disk.use()
        complete(stream)

    monkeypatch.setattr(saving, "_flush", used)
    return disk


@pytest.mark.threads(1, 2)
def test_training_continues_while_a_checkpoint_is_written(comm, shared_path, disk):
    """The checkpoint is that of the step at which it began, as one that is written at once."""
    saver = Checkpointer(shared_path / "own", every="3 steps", keep=9)
    seen = []

    def look(trainer: Trainer) -> None:
        step = trainer.optimizer.iterations
        seen.append((step, steps_saved(shared_path / "own")))
        if step == 5:
            assert disk.began.wait(300)
            comm.barrier()
            disk.free.set()

    small_fit(small_trainer(comm, Recorder(on_step=look), saver), epochs=2)
    assert seen[:4] == [(1, []), (2, []), (3, []), (4, [])]
    comm.barrier()
    assert steps_saved(shared_path / "own") == [3, 6, 8]
    saver = Checkpointer(shared_path / "once", every="3 steps", keep=9, background=False)
    small_fit(small_trainer(comm, Recorder(), saver), epochs=2)
    comm.barrier()
    for own, once in zip(
        find_checkpoints(shared_path / "own"), find_checkpoints(shared_path / "once"), strict=True
    ):
        assert (own / "XXH64SUMS").read_bytes() == (once / "XXH64SUMS").read_bytes()


def free_when_awaited(saver: Checkpointer, disk: Disk) -> None:
    """Let the disk complete files as soon as the thread that writes is awaited."""
    thread = saver._saver.pending.thread
    awaited = thread.join
    thread.join = lambda: (disk.free.set(), awaited())


def test_a_step_that_waits_for_the_checkpoint_before_is_reported(
    tmp_path, disk, monkeypatch, caplog
):
    readings = itertools.count(step=2.0)
    monkeypatch.setattr(clock, "now", lambda: next(readings))
    saver = Checkpointer(tmp_path, every="2 steps")

    def look(trainer: Trainer) -> None:
        if trainer.optimizer.iterations == 4:
            free_when_awaited(saver, disk)

    small_fit(small_trainer(None, Recorder(on_step=look), saver), epochs=1)
    assert disk.free.is_set()
    assert "for the checkpoint before, which was still being written; save less" in caplog.text
    assert saver.blocked > saver.waited > 1


@pytest.mark.threads(1, 2)
@pytest.mark.parametrize("background", [True, False])
def test_training_continues_if_a_checkpoint_cannot_be_written(
    background, comm, shared_path, disk, caplog
):
    disk.full = [2]
    disk.free.set()
    saver = Checkpointer(shared_path, every="2 steps", keep=9, background=background)
    small_fit(small_trainer(comm, saver), epochs=2)
    assert steps_saved(shared_path) == [2, 6, 8]
    saver.check_written()
    if comm.rank == 0:
        (line,) = (r.getMessage() for r in caplog.records if "training continues" in r.message)
        assert f"cannot write {shared_path}/checkpoint-00000004: no space left on device;" in line
        assert line.endswith(f"the last good checkpoint is {shared_path}/checkpoint-00000002")


@pytest.mark.threads(2)
@each("why", ["full", "no folder"])
def test_that_no_checkpoint_could_be_written_is_an_error_at_the_end(comm, shared_path, disk, why):
    disk.full = range(99)
    disk.free.set()
    folder = shared_path / why
    if why == "no folder" and comm.rank == 0:
        folder.write_text("")
    saver = Checkpointer(folder / "run", every="2 steps")
    assert len(small_fit(small_trainer(comm, saver), epochs=2)) == 2
    assert find_checkpoints(folder / "run") == []
    with pytest.raises(NotSavedError, match="no checkpoint could be written: "):
        saver.check_written()


def test_a_checkpoint_is_completed_if_an_error_ends_training(tmp_path, disk):
    def fail(trainer: Trainer) -> None:
        if trainer.optimizer.iterations == 3:
            free_when_awaited(saver, disk)
            raise ZeroDivisionError

    saver = Checkpointer(tmp_path, every="2 steps")
    with pytest.raises(ZeroDivisionError):
        small_fit(small_trainer(None, Recorder(on_step=fail), saver))
    assert steps_saved(tmp_path) == [2]
