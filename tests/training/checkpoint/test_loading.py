"""Which checkpoint is taken, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from pydtnn.callbacks import Checkpointer, EarlyStopping
from pydtnn.comm import Serial
from pydtnn.model.pieces import full_piece
from pydtnn.optimizers import Adam
from pydtnn.parallel.schemes import AllReduce, LocalSGD, ShardedOptimizer
from pydtnn.training.checkpoint import find_checkpoints, load_checkpoint, save_checkpoint
from pydtnn.training.checkpoint.folder import XXH64
from pydtnn.training.checkpoint.reading import examine, read_checkpoint, read_into
from pydtnn.training.trainer import Trainer
from pydtnn.utils.errors import AgreedError
from pydtnn.utils.files import add_files, fill_folder
from tests.each import each
from tests.small_training import fingerprint, small_fit, small_model, small_trainer, trained

FILES = ["XXH64SUMS", "arrays.safetensors", "state.json"]


def cut(name: str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:-5])


def flip_a_bit(path: Path) -> None:
    data = bytearray((path / "arrays.safetensors").read_bytes())
    data[-100] ^= 1
    (path / "arrays.safetensors").write_bytes(data)


def empty(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the JSON of a checkpoint, and give it the checksums of that."""
    files = {name: (path / name).read_bytes() for name in FILES[1:]}
    files["state.json"] = change(files["state.json"])
    shutil.rmtree(path)
    path.mkdir()
    add_files(path, files, XXH64, {})


def put(*keys: str | int, value: Any) -> Callable[[Path], object]:
    """Set what is at some keys of the content."""
    return at(keys, lambda inner: inner.__setitem__(keys[-1], value))


def drop(*keys: str | int) -> Callable[[Path], object]:
    return at(keys, lambda inner: inner.__delitem__(keys[-1]))


def at(keys: Sequence[str | int], change: Callable[[Any], object]) -> Callable[[Path], object]:
    """Change that which holds the last of the keys."""

    def changed(text: bytes) -> bytes:
        inner = content = json.loads(text)
        for key in keys[:-1]:
            inner = inner[key]
        change(inner)
        return json.dumps(content).encode()

    return lambda path: rewrite(path, changed)


VALUES = "parts", "optimizer", 0, "values"
TRAINER = "parts", "trainer", 0, "values"


def test_weights_that_are_not_finite_are_not_continued_from(tmp_path, caplog):
    """The step before a loss that is not finite may have been saved."""
    trainer = trained(tmp_path)
    trainer.model.parameters["head.b"].master[1] = math.inf
    trainer.optimizer.iterations += 1
    save_checkpoint(tmp_path, trainer)
    assert load_checkpoint(tmp_path, small_trainer()) == tmp_path / "checkpoint-00000008"
    assert "model: head.b must be finite" in caplog.text


def test_checkpoints_of_the_first_format_are_read(tmp_path):
    """All arrays in one file, in the order of the library safetensors."""
    trainer = trained(tmp_path)
    for path in find_checkpoints(tmp_path):
        content = json.loads((path / "state.json").read_text()) | {"format": 1}
        arrays = save(load_file(path / "arrays.safetensors"), {"pydtnn": "0.1.0"})
        shutil.rmtree(path)
        fill_folder(
            path, {"arrays.safetensors": arrays, "state.json": json.dumps(content).encode()}
        )
    other = small_trainer(None, EarlyStopping(), Checkpointer(tmp_path), model=small_model(seed=1))
    assert load_checkpoint(tmp_path, other) == tmp_path / "checkpoint-00000008"
    assert fingerprint(other) == fingerprint(trainer)


def test_arrays_are_converted_to_the_type_in_which_they_are_read(tmp_path):
    trained(tmp_path, epochs=1)
    checkpoint = read_checkpoint(find_checkpoints(tmp_path)[0])
    arrays = load_file(checkpoint.path / "arrays.safetensors")
    narrow = {name: np.zeros(array.shape, "float32") for name, array in arrays.items()}
    pieces = [full_piece(name, array) for name, array in narrow.items()]
    read_into(Serial(), checkpoint, pieces, [0])
    for name, array in arrays.items():
        np.testing.assert_array_equal(narrow[name], array.astype("float32"))


def test_older_checkpoints_have_sums_of_another_kind(tmp_path):
    trained(tmp_path)
    for path in find_checkpoints(tmp_path):
        files = {name: (path / name).read_bytes() for name in FILES[1:]}
        shutil.rmtree(path)
        fill_folder(path, files)
        assert (path / "SHA256SUMS").exists()
    flip_a_bit(path)
    assert examine(path)[1] == "arrays.safetensors does not match its checksum"
    assert load_checkpoint(tmp_path, small_trainer()) == tmp_path / "checkpoint-00000004"


def test_every_flipped_bit_is_found(tmp_path):
    """Each one of the index, and some of the other files."""
    path = save_checkpoint(tmp_path, small_trainer())
    assert examine(path)[1] == ""
    for name in FILES:
        data = (path / name).read_bytes()
        bits = 8 * len(data)
        for bit in range(0, bits, 1 if name == FILES[0] else bits // 50):
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            (path / name).write_bytes(damaged)
            assert examine(path)[1] != "", (name, bit)
        (path / name).write_bytes(data)
    assert examine(path)[1] == ""


LISTS = "must be a list of states"
SUMS = "its checksums must be XXH64SUMS or SHA256SUMS for this version of pydtnn, got "
FORMAT = "its format must be 1 or 2 for this version of pydtnn, got "

DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (cut("arrays.safetensors"), "truncated (it must have "),
    (flip_a_bit, "arrays.safetensors does not match its checksum"),
    (cut("state.json"), "state.json does not match its checksum"),
    (cut("XXH64SUMS"), "state.json does not match its checksum"),
    (lambda path: (path / FILES[0]).write_bytes(b"\xff\0" * 9), "does not match its"),
    (lambda path: (path / FILES[1]).unlink(), "arrays.safetensors cannot be read (file"),
    (lambda path: (path / FILES[0]).unlink(), SUMS + "none"),
    (lambda path: (path / FILES[0]).rename(path / "XXH9SUMS"), SUMS + "XXH9SUMS"),
    (
        lambda path: ((path / FILES[0]).unlink(), (path / FILES[0]).mkdir()),
        "XXH64SUMS cannot be read (cannot read",
    ),
    (empty, "got none"),
    # What has the right checksums but not the right content.
    (lambda path: rewrite(path, lambda _: b"[]"), "state.json must contain an object"),
    (lambda path: rewrite(path, lambda _: b"[" * 1_000_000), "state.json cannot be parsed"),
    (put("format", value=3), FORMAT + "3"),
    (drop("format"), FORMAT + "None"),
    (put("format", value=True), FORMAT + "True"),
    (put("parts", value=None), "parts must be an object"),
    (drop("parts", "optimizer"), "it does not contain the part 'optimizer'"),
    (put("parts", "model", value=None), f"model {LISTS}"),
    (put("parts", "model", value=[]), f"model {LISTS}"),
    (put("parts", "model", 0, value=None), f"model {LISTS}"),
    (drop(*VALUES), LISTS),
    (put("parts", "model", 0, "arrays", value=[1]), f"model {LISTS}"),
    (
        put("parts", "model", 0, "arrays", value=["head.x"]),
        "arrays.safetensors does not contain the array model/head.x",
    ),
    (put("parts", "optimizer", 0, "arrays", value=[]), "belongs to no part, optimizer/velocity/"),
    (put(*VALUES, "iterations", value=math.inf), "optimizer: iterations mu"),
    (drop(*TRAINER, "history"), "trainer: history must be"),
    (put("local", value=["exchange"]), "the mesh of"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    trained(folder)
    return folder


@each(("harm", "reason"), DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_taken(
    harm, reason, saved, tmp_path, caplog
):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    old, new = find_checkpoints(tmp_path)
    harm(new)
    trainer = small_trainer(None, EarlyStopping())
    assert load_checkpoint(tmp_path, trainer) == old
    assert (trainer.epoch, trainer.optimizer.iterations) == (1, 4)
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith(f"{new.name} cannot be used: ")
    assert reason in message
    assert message.endswith(f"; {old.name} is used instead")


@pytest.mark.threads(2)
def test_where_every_checkpoint_is_damaged_all_ranks_say_so(comm, tmp_path):
    if comm.rank == 0:
        trained(tmp_path)
        for path in find_checkpoints(tmp_path):
            cut("state.json")(path)
    comm.barrier()
    with pytest.raises(AgreedError) as caught:
        load_checkpoint(tmp_path, small_trainer(comm))
    message = str(caught.value)
    assert f"no checkpoint in {tmp_path} is valid: " in message
    assert message.count("state.json does not match its checksum") == 2
    assert message.endswith("; start again in another folder")


class Picky(EarlyStopping):
    """Comes late in the order of parts, and refuses on one rank, having taken its state."""

    def __init__(self, refuses: bool, sentence: bool) -> None:
        super().__init__()
        self.refuses, self.sentence = refuses, sentence

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        if self.refuses and state["best"] is not None:
            state["nothing"] if self.sentence else self.monitor.nothing  # type: ignore[attr-defined]


REFUSED = {True: r"Picky.1 does not contain 'nothing', so it", False: "be loaded by Picky: Attr"}


@pytest.mark.threads(1, 3)
@each(("scheme", "sentence"), [(AllReduce, True), (ShardedOptimizer, False), (LocalSGD, True)])
def test_where_one_part_is_refused_on_one_rank_no_part_is_loaded_on_any(
    comm, scheme, sentence, tmp_path
):
    def trainer(refuses: bool, seed: int) -> Trainer:
        callbacks = Picky(refuses, sentence), Checkpointer(tmp_path)
        model = small_model(seed=seed)
        return small_trainer(comm, *callbacks, model=model, exchange=scheme(comm))

    small_fit(trainer(False, seed=0), epochs=1)
    fresh = trainer(comm.rank == comm.size - 1, seed=1)
    before = fingerprint(fresh)
    with pytest.raises(AgreedError, match=REFUSED[sentence]):
        load_checkpoint(tmp_path, fresh)
    assert fingerprint(fresh) == before
    assert (fresh.epoch, fresh.step, fresh.optimizer.iterations) == (0, 0, 0)


@each(
    ("options", "message"),
    [
        ({"model": small_model(filters=5)}, "weights do not fit the model: "),
        ({"optimizer": Adam(0.1)}, "Adam: the saved state belongs to another optimizer or model"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_by_name(options, message, tmp_path):
    path = save_checkpoint(tmp_path, small_trainer())
    with pytest.raises(AgreedError, match=f"^{path}: {message}"):
        load_checkpoint(tmp_path, small_trainer(**options))
