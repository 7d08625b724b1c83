"""Which checkpoint is taken, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pydtnn.callbacks import Checkpointer, EarlyStopping
from pydtnn.checkpoint import find_checkpoints, folder, load_checkpoint, save_checkpoint
from pydtnn.comm import Communicator
from pydtnn.comm.exchange import AllReduce
from pydtnn.comm.schemes import LocalSGD, ShardedOptimizer
from pydtnn.errors import AgreedError
from pydtnn.optimizers import Adam
from pydtnn.trainer import Trainer
from tests.small_training import fingerprint, small_fit, small_model, small_trainer, trained

FILES = ["SHA256SUMS", "arrays.safetensors", "state.json"]


def cut(name: str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:-5])


def flip_a_bit(path: Path) -> None:
    data = bytearray((path / "arrays.safetensors").read_bytes())
    data[-100] ^= 1
    (path / "arrays.safetensors").write_bytes(data)


def empty(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


def rewrite_for_the_future(path: Path) -> None:
    files = {name: (path / name).read_bytes() for name in ("arrays.safetensors", "state.json")}
    files["state.json"] = files["state.json"].replace(b'"format": 1', b'"format": 2')
    shutil.rmtree(path)
    folder.write_checkpoint(path, files, keep=9)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "arrays cut": (cut("arrays.safetensors"), "arrays.safetensors does not match its checksum"),
    "a bit flipped": (flip_a_bit, "arrays.safetensors does not match its checksum"),
    "numbers cut": (cut("state.json"), "state.json does not match its checksum"),
    "sums cut": (cut("SHA256SUMS"), "state.json does not match its checksum"),
    "sums are noise": (lambda p: (p / FILES[0]).write_bytes(b"\xff\0" * 9), "does not match its"),
    "arrays gone": (
        lambda p: (p / FILES[1]).unlink(),
        "arrays.safetensors cannot be read (no such",
    ),
    "sums gone": (lambda p: (p / FILES[0]).unlink(), "SHA256SUMS cannot be read (no such file"),
    "empty": (empty, "SHA256SUMS cannot be read (no such file"),
    "of the future": (
        rewrite_for_the_future,
        "its format is 2, and this version of pydtnn reads 1",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_taken(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path)
    old, new = find_checkpoints(tmp_path)
    harm, reason = DAMAGE[damage]
    harm(new)
    trainer = small_trainer(None, EarlyStopping())
    assert load_checkpoint(tmp_path, trainer) == old
    assert trainer.epoch == 1
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith(f"{new.name} cannot be used: ")
    assert reason in message
    assert message.endswith(f"; {old.name} is taken instead")


@pytest.mark.threads(1, 2)
def test_where_every_checkpoint_is_damaged_all_ranks_say_so(
    comm: Communicator, tmp_path: Path
) -> None:
    if comm.rank == 0:
        trained(tmp_path)
        for path in find_checkpoints(tmp_path):
            cut("state.json")(path)
    comm.barrier()
    with pytest.raises(AgreedError) as caught:
        load_checkpoint(tmp_path, small_trainer(comm))
    message = str(caught.value)
    assert f"no checkpoint in {tmp_path} is whole: " in message
    assert message.count("state.json does not match its checksum") == 2
    assert message.endswith("; start again in another folder")


def test_a_damaged_checkpoint_is_gone_after_the_next_is_saved(tmp_path: Path) -> None:
    trained(tmp_path)
    flip_a_bit(find_checkpoints(tmp_path)[-1])
    trainer = small_trainer(None, EarlyStopping(), Checkpointer(tmp_path))
    load_checkpoint(tmp_path, trainer)
    small_fit(trainer)
    assert load_checkpoint(tmp_path, small_trainer()) == tmp_path / "checkpoint-00000008"


class Picky(EarlyStopping):
    """Comes late in the order of parts, and refuses on one rank."""

    def __init__(self, refuses: bool) -> None:
        super().__init__()
        self.refuses = refuses

    def load(self, state: Mapping[str, Any]) -> None:
        if self.refuses and state["best"] is not None:
            state["nothing"]
        super().load(state)


@pytest.mark.threads(1, 2, 3)
@pytest.mark.parametrize("scheme", [AllReduce, ShardedOptimizer, LocalSGD])
def test_where_one_part_is_refused_on_one_rank_no_part_is_loaded_on_any(
    comm: Communicator, scheme: type[AllReduce], tmp_path: Path
) -> None:
    def trainer(refuses: bool, seed: int) -> Trainer:
        callbacks = Picky(refuses), Checkpointer(tmp_path)
        model = small_model(seed=seed)
        return small_trainer(comm, *callbacks, model=model, exchange=scheme(comm))

    small_fit(trainer(False, seed=0), epochs=1)
    fresh = trainer(comm.rank == comm.size - 1, seed=1)
    before = fingerprint(fresh)
    with pytest.raises(AgreedError, match=r"the state of Picky.1 has no 'nothing', so it is of an"):
        load_checkpoint(tmp_path, fresh)
    assert fingerprint(fresh) == before
    assert (fresh.epoch, fresh.step, fresh.optimizer.iterations) == (0, 0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": small_model(filters=5)}, "weights do not fit the model: "),
        ({"optimizer": Adam(0.1)}, "Adam: the saved state is of another optimizer or model"),
    ],
    ids=["model", "optimizer"],
)
def test_a_checkpoint_of_something_else_is_refused_by_name(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = save_checkpoint(tmp_path, small_trainer())
    with pytest.raises(AgreedError, match=f"^{path}: {message}"):
        load_checkpoint(tmp_path, small_trainer(**options))
