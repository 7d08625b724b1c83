"""What a checkpoint holds."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from pydtnn.callbacks import Callback, Checkpointer, EarlyStopping
from pydtnn.training.checkpoint import content, load_checkpoint, read_weights, save_checkpoint
from tests.each import each
from tests.kernels.hash64 import hash64
from tests.small_training import fingerprint, small_fit, small_model, small_trainer, trained


def test_a_checkpoint_restores_everything(tmp_path):
    trainer = trained(tmp_path)
    other = small_trainer(None, EarlyStopping(), Checkpointer(tmp_path), model=small_model(seed=1))
    assert load_checkpoint(tmp_path, other) == tmp_path / "checkpoint-00000008"
    assert fingerprint(other) == fingerprint(trainer)
    assert (other.epoch, other.step, other.optimizer.iterations) == (2, 0, 8)
    arrays = read_weights(tmp_path / "checkpoint-00000008")
    for name, array in trainer.model.state().items():
        np.testing.assert_array_equal(arrays.pop(name), array)
    assert not arrays


def test_a_checkpoint_names_arrays_for_people_and_keeps_numbers_in_json(tmp_path):
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


def test_checksums_are_in_the_format_of_xxhsum(tmp_path):
    path = save_checkpoint(tmp_path, small_trainer())
    sums = dict(line.split("  ")[::-1] for line in (path / "XXH64SUMS").read_text().splitlines())
    assert [*sums] == ["arrays.safetensors", "state.json"]
    for name, digest in sums.items():
        assert digest == f"{hash64(np.frombuffer((path / name).read_bytes(), np.uint8)):016x}"
    command = ["xxhsum", "--check", "--strict", "XXH64SUMS"]
    if shutil.which(command[0]) is not None:
        done = subprocess.run(command, cwd=path, capture_output=True, text=True, check=True)
        assert done.stdout == "arrays.safetensors: OK\nstate.json: OK\n"


class Holder(Callback):
    """Has a state that a test gives it."""

    def __init__(self, held: dict[str, Any] | None = None) -> None:
        self.held = held or {}

    def state(self) -> dict[str, Any]:
        return self.held

    def load(self, state: Any) -> None:
        self.held = dict(state)


def test_callbacks_of_one_kind_keep_their_own_states_and_new_ones_start_afresh(tmp_path):
    """Numbers of NumPy and infinities included; what JSON cannot represent is refused."""
    given = {"best": float("-inf"), "n": np.int64(3)}, {"x": np.float32(0.1)}
    path = save_checkpoint(tmp_path, small_trainer(None, *map(Holder, given)))
    assert {"Holder.1", "Holder.2"} < {*json.loads((path / "state.json").read_text())["parts"]}
    loaded = Holder(), Holder(), EarlyStopping()
    load_checkpoint(tmp_path, small_trainer(None, *loaded))
    assert tuple(holder.held for holder in loaded[:2]) == given
    assert (loaded[2].best, loaded[2].waited) == (None, 0)
    with pytest.raises(TypeError, match="arrays or values that JSON can represent, got set"):
        save_checkpoint(tmp_path, small_trainer(None, Holder({"names": {"a", "b"}})))


COUNTS = ([0, 2**62 - 1], [-1, 2**62, 1.0, True, None])
NUMBERS = ([0, 0.5, -1, 2**62 - 1, float("inf")], [2**62, "1", True])
NAMES = ([[], ["a"]], ["a", {"a": 1}, [1], None])
EMPTY = np.zeros(0)
FIELDS: dict[str, tuple[list[Any], list[Any]]] = {
    **dict.fromkeys(["epoch", "step", "iterations"], COUNTS),
    **dict.fromkeys(["lr_factor", "scale", "good"], ([0, 2.5], [-1, float("inf"), float("nan")])),
    "history": (
        [[], *[[{"a": n}] for n in NUMBERS[0]]],
        [{}, [1], *[[{"a": n}] for n in NUMBERS[1]]],
    ),
    "metrics": NAMES,
    "frozen": ([None, *NAMES[0]], NAMES[1][:-1]),
    "totals": ([EMPTY], [0.0, EMPTY[None], EMPTY.astype("f4")]),
    "plan": ([{}, *[{"a": n} for n in COUNTS[0]]], [[], *[{"a": n} for n in COUNTS[1]]]),
    "measured": (
        [{}, {"machine": {"conv": {"1": "direct", "32": "fft"}}}],
        [[], {"m": 1}, {"m": {"c": []}}, *[{"m": {"c": {n: "a"}}} for n in ("0", "1x", "9" * 19)]],
    ),
    "mesh": ([{"a": 2}], [{"a": -1}, []]),
    "local": NAMES,
    "split": ([{"a": [1, 0]}], [{"a": 1}, {"a": [-1]}, []]),
}
"""Values of fields that are valid, and others."""


@each("name", FIELDS)
def test_each_field_of_a_checkpoint_has_its_type(name):
    part = next((part for part, own in content.VALUES.items() if name in own), "choices")
    states = {field: FIELDS[field][0][0] for field in content.VALUES.get(part, ())}
    parts = {one: [{"values": {}, "arrays": []}] for one in content.REQUIRED}

    def check(value: Any) -> None:
        if name in content.OPTIONAL:
            content.read_content(json.dumps({"format": 2, "parts": parts, name: value}).encode())
        if name not in content.OPTIONAL or name == "step":
            content.check_states({part: [states | {name: value}]})

    good, bad = FIELDS[name]
    for value in good:
        check(value) if name != "local" else None
    for value in bad:
        with pytest.raises(ValueError, match=rf"{name} must be "):
            check(value)
