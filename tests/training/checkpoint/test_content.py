"""What a checkpoint holds."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from pydtnn.callbacks import Callback, Checkpointer, EarlyStopping
from pydtnn.comm import Communicator
from pydtnn.kernels.reference.hash import hash64
from pydtnn.parallel.exchange import AllReduce
from pydtnn.training.checkpoint import (
    find_checkpoints,
    load_checkpoint,
    read_weights,
    save_checkpoint,
)
from pydtnn.utils.errors import AgreedError
from tests.small_training import fingerprint, small_fit, small_model, small_trainer, trained


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_checkpoint_restores_everything(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    other = small_trainer(None, EarlyStopping(), Checkpointer(tmp_path), model=small_model(seed=1))
    assert load_checkpoint(tmp_path, other) == tmp_path / "checkpoint-00000008"
    assert fingerprint(other) == fingerprint(trainer)
    assert (other.epoch, other.step, other.optimizer.iterations) == (2, 0, 8)
    arrays = read_weights(tmp_path / "checkpoint-00000008")
    for name, array in trainer.model.state().items():
        np.testing.assert_array_equal(arrays.pop(name), array)
    assert not arrays


def test_a_checkpoint_names_arrays_for_people_and_keeps_numbers_in_json(tmp_path: Path) -> None:
    trainer = small_trainer(None, EarlyStopping())
    small_fit(trainer, epochs=1)
    path = save_checkpoint(tmp_path, trainer, config={"lr": 0.1})
    arrays = load_file(path / "arrays.safetensors")
    assert {"model/head.w", "model/batchnorm1.running_mean", "optimizer/velocity/head.w"} < set(
        arrays
    )
    np.testing.assert_array_equal(arrays["model/head.w"], trainer.model.state()["head.w"])
    state = json.loads((path / "state.json").read_text())
    assert state["format"] == 2
    assert (state["step"], state["seed"], state["configuration"]) == (4, 0, {"lr": 0.1})
    assert state["parts"]["EarlyStopping.1"][0]["values"] == trainer.callbacks[0].state()


def test_checksums_are_in_the_format_of_xxhsum(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, small_trainer())
    sums = dict(line.split("  ")[::-1] for line in (path / "XXH64SUMS").read_text().splitlines())
    assert [*sums] == ["arrays.safetensors", "state.json"]
    for name, digest in sums.items():
        assert digest == f"{hash64(np.frombuffer((path / name).read_bytes(), np.uint8)):016x}"
    command = ["xxhsum", "--check", "--strict", "XXH64SUMS"]
    if shutil.which(command[0]) is not None:
        done = subprocess.run(command, cwd=path, capture_output=True, text=True, check=True)
        assert done.stdout == "arrays.safetensors: OK\nstate.json: OK\n"


def test_the_same_training_leaves_the_same_bytes_in_every_folder(tmp_path: Path) -> None:
    for name in ("one", "another"):
        trained(tmp_path / name)
    one, another = (find_checkpoints(tmp_path / name)[-1] for name in ("one", "another"))
    assert contents(one) == contents(another)


@pytest.mark.threads(1, 2, 3)
def test_a_checkpoint_does_not_tell_the_number_of_ranks(comm: Communicator, tmp_path: Path) -> None:
    trainer = small_trainer(comm)  # without a step, whose sums the number of ranks would round
    save_checkpoint(tmp_path / "ranks", trainer)
    if comm.rank == 0:
        save_checkpoint(tmp_path / "serial", small_trainer())
        ranks, serial = (find_checkpoints(tmp_path / name)[0] for name in ("ranks", "serial"))
        assert contents(ranks) == contents(serial)


@pytest.mark.threads(2)
def test_a_checkpoint_of_two_ranks_can_be_continued_by_one(
    comm: Communicator, tmp_path: Path
) -> None:
    trainer = trained(tmp_path, comm, epochs=1)
    comm.barrier()
    other = small_trainer(None, EarlyStopping())
    load_checkpoint(tmp_path, other)
    assert fingerprint(other) == fingerprint(trainer)


def test_two_callbacks_of_one_kind_keep_their_own_states(tmp_path: Path) -> None:
    first, second = EarlyStopping("val_loss", 5), EarlyStopping("loss", 7)
    first.load({"best": 1.0, "waited": 2})
    second.load({"best": 3.0, "waited": 4})
    save_checkpoint(tmp_path, small_trainer(None, first, second))
    first, second = EarlyStopping("val_loss", 5), EarlyStopping("loss", 7)
    load_checkpoint(tmp_path, small_trainer(None, first, second))
    assert (first.waited, second.waited) == (2, 4)


def test_a_callback_that_the_checkpoint_does_not_know_starts_afresh(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, small_trainer())
    callback = EarlyStopping()
    load_checkpoint(tmp_path, small_trainer(None, callback))
    assert (callback.best, callback.waited) == (None, 0)


def test_numpy_numbers_and_infinities_in_a_state_come_back(tmp_path: Path) -> None:
    class Holder(Callback):
        def __init__(self, **held: Any) -> None:
            self.held = held

        def state(self) -> dict[str, Any]:
            return self.held

        def load(self, state: Any) -> None:
            self.held = state

    saved, loaded = Holder(best=float("-inf"), n=np.int64(3), x=np.float32(0.1)), Holder()
    save_checkpoint(tmp_path, small_trainer(None, saved))
    load_checkpoint(tmp_path, small_trainer(None, loaded))
    assert loaded.held == saved.held


def test_a_state_that_json_cannot_tell_is_refused(tmp_path: Path) -> None:
    class Wrong(Callback):
        def state(self) -> dict[str, Any]:
            return {"names": {"a", "b"}}

    with pytest.raises(TypeError, match="arrays or values that JSON can represent, got set"):
        save_checkpoint(tmp_path, small_trainer(None, Wrong()))


class Compressing(AllReduce):
    """A scheme in which every rank keeps something of its own."""

    residual = np.zeros(3)

    def state(self) -> dict[str, Any]:
        return {"residual": self.residual, "sent": self.comm.rank}

    def load(self, state: Any) -> None:
        self.residual, self.sent = state["residual"], state["sent"]


@pytest.mark.threads(3)
@pytest.mark.mpi(2)
def test_what_differs_between_ranks_is_kept_for_each(comm: Communicator, shared_path: Path) -> None:
    exchange = Compressing(comm)
    exchange.residual = np.full(3, comm.rank + 0.5)
    save_checkpoint(shared_path, small_trainer(exchange=exchange))
    resumed = Compressing(comm)
    load_checkpoint(shared_path, small_trainer(exchange=resumed))
    np.testing.assert_array_equal(resumed.residual, exchange.residual)
    assert resumed.sent == comm.rank


@pytest.mark.threads(3)
def test_what_differs_between_ranks_wants_as_many_ranks_again(
    comm: Communicator, tmp_path: Path
) -> None:
    exchange = Compressing(comm)
    exchange.residual = np.full(3, comm.rank + 0.5)
    save_checkpoint(tmp_path, small_trainer(exchange=exchange))
    with pytest.raises(
        AgreedError, match=r"exchange was saved per rank by 3 ranks, .*; resume with 3 ranks"
    ):
        load_checkpoint(tmp_path, small_trainer())
